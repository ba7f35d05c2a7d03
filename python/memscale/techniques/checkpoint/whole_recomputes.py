# SPDX-License-Identifier: Apache-2.0
"""Finds forwards whose recompute must run to its end, although backward needs less.

What is between `lock.acquire()` and `lock.release()` without `finally`, or between `queue.get()` and
`queue.put(...)`, must not end in between: the next one who asks would wait for ever. Such pairs are found in
the code that a module's class, or that of an object on it, reaches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn

from memscale.state.reached_code import Reached, is_library, names_of
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.forward_slot import StandIn

_PAIRS: Final = (frozenset({"acquire"}), frozenset({"get", "put"}), frozenset({"lock", "unlock"}))
# With the code of the class's forward, which may get another one.
_known: weakref.WeakKeyDictionary[type, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def runs_to_the_end(modules: Iterable[nn.Module]) -> bool:
    """Whether one of some modules may hold for a time what it must give back itself."""
    kinds: dict[type, None] = {}
    for module in modules:
        kinds[type(module)] = None
        for value in module.__dict__.values():
            if not issubclass(type(value), (Tensor, nn.Module)):
                kinds[type(value)] = None
        forward = module.__dict__.get("forward")
        forward = forward._bottom.original if isinstance(forward, StandIn) else forward
        if type(forward) is FunctionType and _has_pairs(Reached([type(module)]), forward):
            return True
    return any(map(_holds, kinds))


def _holds(kind: type) -> bool:
    if is_library(kind.__module__):
        return False
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    known = _known.get(kind)
    if known is None or known[0] is not code:
        reached = Reached([kind])
        reached.of_class(kind)
        known = _known[kind] = code, _has_pairs(reached, *vars(kind).values())
    return known[1]


def _has_pairs(reached: Reached, *values: Any) -> bool:
    reached.reach(*values)
    return any(
        pair <= names_of(function.__code__)
        for function in reached.functions
        if not is_library(function.__globals__.get("__name__"))
        for pair in _PAIRS
    )


never_compiled(runs_to_the_end, _holds, _has_pairs)
