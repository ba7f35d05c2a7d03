# SPDX-License-Identifier: Apache-2.0
"""The context variables of a forward, for its recompute.

A variable may hold a list or dictionary into which a model collects what its layers return, as transformers
does for hidden states. The context of each recomputed layer would keep what all layers after it have
collected, and a recompute would collect its results once more. So the context has copies of such containers,
with what was in them when the layer began, and each recompute has copies of its own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Final

from memscale.torchkit.compiled import never_compiled

_MOST_ENTRIES: Final = 1000
"""A larger container is no collection of layers' results, and copying it for each layer would take long."""

_CONTAINERS: Final = (list, dict)


class ContextCopy:
    """The context of the caller, as it is now."""

    __slots__ = ("_containers", "_context")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._containers = [
            variable for variable, value in self._context.items() if type(value) in _CONTAINERS
        ]
        if self._containers:
            _renew(self._context, self._containers)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function in this context. What it sets, and adds to lists and dictionaries, is lost."""
        context = self._context.copy()
        if self._containers:
            _renew(context, self._containers)
        return context.run(function, *args, **kwargs)


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS


def _renew(context: contextvars.Context, containers: list[contextvars.ContextVar[Any]]) -> None:
    for variable in containers:
        context.run(variable.set, _copy_of(context[variable], {}))


def _copy_of(value: Any, known: dict[int, Any]) -> Any:
    """A container's copy, with copies of the containers in it; anything else is itself."""
    if not _is_container(value) or len(value) > _MOST_ENTRIES:
        return value
    if id(value) not in known:
        copy = known[id(value)] = type(value)()
        if type(value) is list:
            copy.extend(_copy_of(item, known) for item in value)
        else:
            copy.update((key, _copy_of(item, known)) for key, item in value.items())
    return known[id(value)]


never_compiled(ContextCopy, _is_container, _renew, _copy_of)
