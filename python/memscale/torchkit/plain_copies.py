# SPDX-License-Identifier: Apache-2.0
"""Copies of a wrapped model are plain models, as `detach` would leave it, and know nothing of MemScale.

`copy.copy`, `copy.deepcopy` and `pickle`, and so `torch.save`, ask an object for `__reduce_ex__` before they
ask its class. On a module that has something of ours in its dictionary there lies one that answers as the
class does, without what is ours:

    vars(module)   forward: stand-in   _memscale_executor: …   weight: …   __reduce_ex__: ours
    in a copy      (class's own)                               weight: …

What a copy leaves out is of class `Ours`. Other changes (a flag that is off while we are there) are undone
in a copy by the `change` that was registered with them, but for `copy.copy`, whose copies share the children.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn

GONE: Final = object()
"""In place of a value that a copy does not have."""

Change = Callable[[nn.Module, dict[str, Any]], None]
"""Puts the attributes that a copy of a module gets right, in place."""


class Ours:
    """What MemScale puts into the dictionary of a module."""

    def without(self, key: str) -> Any:
        """What a copy has there.

        Args:
            key: where it lies.

        Returns:
            The value that there would be without MemScale; `GONE` for none.
        """
        return GONE


class _Reduce(Ours):
    """Lies on a module as `__reduce_ex__`. Knows how many need it, and what they change."""

    key = "__reduce_ex__"

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.before = vars(module).get(self.key)
        self.users = 0
        self.changes: list[Change] = []

    def __call__(self, protocol: Any) -> Any:
        module = self.module()
        assert module is not None  # somebody is copying it
        reduced = self.before or type(module).__reduce_ex__.__get__(module)
        parts = reduced(protocol)
        if not isinstance(parts, tuple):
            return parts
        is_shallow = sys._getframe(1).f_code is copy.copy.__code__
        changes = [] if is_shallow else self.changes
        return (parts[0], *(_plain(part, module, changes) for part in parts[1:3]), *parts[3:])

    def without(self, key: str) -> Any:
        return GONE if self.before is None else self.before


class _DeepCopy(Ours):
    """Lies as `__deepcopy__` on a module whose class has one: its copy is put right afterwards."""

    key = "__deepcopy__"

    def __init__(self, reduce: _Reduce) -> None:
        self.reduce = reduce

    def __call__(self, memo: dict[int, Any]) -> Any:
        module = self.reduce.module()
        assert module is not None
        for value in vars(module).values():
            if isinstance(value, Ours):
                memo[id(value)] = value  # not to be copied on the way
        twin = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        plain = _plain(dict(vars(twin)), module, self.reduce.changes)
        for key, value in plain.items():
            if isinstance(vars(twin)[key], Ours):
                plain[key] = copy.deepcopy(value, memo)
        vars(twin).clear()
        vars(twin).update(plain)
        return twin


def _plain(part: Any, module: nn.Module, changes: Iterable[Change]) -> Any:
    """A part of what `__reduce_ex__` returns, without what is ours."""
    if isinstance(part, tuple):
        return tuple(_plain(item, module, changes) for item in part)
    if not isinstance(part, dict):
        return part
    shown = {key: value.without(key) if isinstance(value, Ours) else value for key, value in part.items()}
    plain = {key: value for key, value in shown.items() if value is not GONE}
    for change in changes:
        change(module, plain)
    return plain


def begin(module: nn.Module, change: Change | None = None) -> None:
    """From now on copies of a module are without what is ours. Each call wants an `end`.

    Args:
        module: gets, or has, something of ours.
        change: what else copies are to have otherwise.
    """
    own = vars(module)
    reduce = own.get(_Reduce.key)
    if not isinstance(reduce, _Reduce):
        reduce = own[_Reduce.key] = _Reduce(module)
        if hasattr(type(module), _DeepCopy.key) and _DeepCopy.key not in own:
            own[_DeepCopy.key] = _DeepCopy(reduce)
    reduce.users += 1
    if change is not None:
        reduce.changes.append(change)


def end(module: nn.Module, change: Change | None = None) -> None:
    """As before the matching `begin`."""
    own = vars(module)
    reduce = own.get(_Reduce.key)
    if not isinstance(reduce, _Reduce):  # somebody has put another in its place
        return
    reduce.users -= 1
    if change in reduce.changes:
        reduce.changes.remove(change)
    if reduce.users:
        return
    if isinstance(own.get(_DeepCopy.key), _DeepCopy):
        del own[_DeepCopy.key]
    if reduce.before is None:
        del own[_Reduce.key]
    else:
        own[_Reduce.key] = reduce.before
