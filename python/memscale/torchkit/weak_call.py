# SPDX-License-Identifier: Apache-2.0
"""Hooks that hold nothing: PyTorch holds them, and what they call may hold what PyTorch hangs them on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
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

    @property
    def is_dead(self) -> bool:
        """Whether its object has gone."""
        return self._method() is None

    def __call__(self, *arguments: Any) -> Any:
        """What the method returns; None once its object has gone."""
        method = self._method()
        return None if method is None else method(*self._first, *arguments)


def remove_dead(hooks: MutableMapping[int, Any]) -> None:
    """Takes hooks out of PyTorch's dictionary whose objects have gone."""
    for key, hook in list(hooks.items()):
        if isinstance(hook, WeakCall) and hook.is_dead:
            del hooks[key]
