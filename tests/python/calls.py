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

_ACTIVE: list[dict[str, dict[CodeType, Callable[..., object]]]] = []


@contextmanager
def beside(before: Actions | None = None, after: Actions | None = None) -> Iterator[None]:
    """Inside the block, in this thread and in those that begin there, actions run with calls of functions.

    Blocks may lie within each other; the actions of the outer one come first.

    Args:
        before: function → called with its positional arguments when it is entered. What it raises comes out
            of the call, and ends the watch of that thread.
        after: function → called with its result and its arguments when it is left.
    """
    actions = {"call": _by_code(before or {}), "return": _by_code(after or {})}
    if not _ACTIVE:
        threading.setprofile(_seen)
        sys.setprofile(_seen)
    _ACTIVE.append(actions)
    try:
        yield
    finally:
        _ACTIVE.remove(actions)
        if not _ACTIVE:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def _seen(frame: FrameType, event: str, result: Any) -> None:
    for actions in list(_ACTIVE):
        action = actions.get(event, {}).get(frame.f_code)
        if action is not None:
            action(*([result] if event == "return" else []), *_arguments(frame))


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
    found = {}
    for call, action in actions.items():
        function: Any = inspect.unwrap(
            getattr(call, "__func__", call)
        )  # of a class method, of a decorated one
        found[function.__code__] = action
    return found


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    values = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        values += frame.f_locals[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
    return values
