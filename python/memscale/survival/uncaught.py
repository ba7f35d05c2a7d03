# SPDX-License-Identifier: Apache-2.0
"""Sees exceptions that end the program: memory may run out in the loop itself, in its loss or in a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Seen:
    """Stands in for `sys.excepthook`, and calls it."""

    def __init__(self) -> None:
        self.before: _Hook | None = None
        self.listeners: list[Callable[[BaseException], None]] = []

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before = self.before or sys.__excepthook__
        try:
            for listener in [*self.listeners]:
                listener(error)
        finally:
            before(kind, error, traceback)


_SEEN: Final = _Seen()


def add(listener: Callable[[BaseException], None]) -> None:
    """Has something called with each of them, before Python prints it."""
    if listener not in _SEEN.listeners:
        _SEEN.listeners.append(listener)
    if sys.excepthook is not _SEEN:
        _SEEN.before = sys.excepthook
        sys.excepthook = _SEEN


def remove(listener: Callable[[BaseException], None]) -> None:
    """Ends that. After the last one Python's own hook is in its place."""
    if listener in _SEEN.listeners:
        _SEEN.listeners.remove(listener)
    if not _SEEN.listeners and sys.excepthook is _SEEN and _SEEN.before is not None:
        sys.excepthook = _SEEN.before
