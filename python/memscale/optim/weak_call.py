# SPDX-License-Identifier: Apache-2.0
"""Hooks that hold nothing: PyTorch holds them, and what they call may hold what PyTorch hangs them on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakCall:
    """Calls a method for as long as its object lives.

    Args:
        method: bound.
        first: arguments in front of those of each call.
    """

    def __init__(self, method: Callable[..., Any], *first: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *arguments: Any) -> Any:
        """What the method returns; None once its object has gone."""
        method = self._method()
        return None if method is None else method(*self._first, *arguments)
