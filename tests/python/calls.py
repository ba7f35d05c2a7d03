# SPDX-License-Identifier: Apache-2.0
"""Stands beside calls of the product: sees arguments, may wait, raise or interrupt, and exchanges nothing."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

Actions = Mapping[Callable[..., Any], Callable[..., object]]


@contextmanager
def beside(before: Actions | None = None, after: Actions | None = None) -> Iterator[None]:
    """Inside the block, in this thread and in those that begin there, actions run with calls of functions.

    Args:
        before: function → called with its positional arguments when it is entered. What it raises comes out
            of the call, and ends the watch of that thread.
        after: function → the same when it is left.
    """
    actions = {"call": _by_code(before or {}), "return": _by_code(after or {})}

    def seen(frame: FrameType, event: str, unused: Any) -> None:
        action = actions.get(event, {}).get(frame.f_code)
        if action is not None:
            action(*_arguments(frame))

    earlier = sys.getprofile()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(earlier)
        threading.setprofile(None)  # type: ignore[arg-type]


def failing(error: BaseException | type[BaseException], at: int = 1) -> Callable[..., None]:
    """An action that raises at the n-th call."""
    calls = 0

    def action(*unused: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    return action


def _by_code(actions: Actions) -> dict[CodeType, Callable[..., object]]:
    found = {inspect.unwrap(function): action for function, action in actions.items()}
    return {function.__code__: action for function, action in found.items()}  # type: ignore[attr-defined]


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    values = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        values += frame.f_locals[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
    return values
