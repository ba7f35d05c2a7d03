# SPDX-License-Identifier: Apache-2.0
"""Finds and removes objects that a dry run leaves alive, or makes planning refuse.

A fake tensor holds its mode, and an autograd graph that was recorded holds its recorder. When these are gone
after a trace, all that was made with them is. Objects from before the trace are frozen meanwhile, so the
garbage collector looks at new objects alone, which takes a millisecond.

Where something stays, the way up its referrers ends at an object from before the trace: the dictionary,
class, function or closure that keeps it. There the entry is deleted, whole:
`TABLE[7] = {"cos": fake}` loses key 7.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memscale.errors import ProfileError
from memscale.state.value_images import attributes_of, slots_of
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.save_slots import Slot

_CACHE: Final = type(functools.lru_cache(len))


_OWN_CACHES: Final = (("torch.nested._internal.nested_tensor", "_dummy_instance"),)
"""PyTorch's caches of one value each, which anyone may fill first: (module, name)."""


class LeftoverError(ProfileError):
    """Planning left something in the process that cannot be put back."""


class Watch:
    """What must be gone when a block has ended."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def add(self, token: object) -> None:
        """Watches an object that whatever must go holds: the mode of fakes, a recorder."""
        self._refs.append(weakref.ref(token))

    def alive(self) -> list[Any]:
        """Those that are still there."""
        return [token for token in (ref() for ref in self._refs) if token is not None]

    def left(self) -> list[Tensor]:
        """Tensors without data, and those with a graph of what is watched. Much else may hold a mode."""
        tokens = self.alive()
        if not tokens:
            return []
        has_saves = any(type(one) is Slot for one in gc.get_referrers(*tokens))
        return [
            value
            for value in _frozen.made()
            if (issubclass(type(value), FakeTensor) and any(value.fake_mode is token for token in tokens))
            or (has_saves and _has_graph(value))
        ]


@contextmanager
def none_left() -> Iterator[Watch]:
    """A block that leaves nothing of what it watches behind.

    Raises:
        LeftoverError: something is left in a place that cannot be put back. It is removed all the same.
    """
    watch = Watch()
    caches = _own_caches()
    _frozen.enter()
    error: BaseException | None = None
    try:
        yield watch
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            _put_back_caches(caches)
            _forget_frames(error)
            _prove(watch, error)
        finally:
            error = None
            _frozen.leave()


def _own_caches() -> list[Any]:
    return [getattr(sys.modules.get(place), name, None) for place, name in _OWN_CACHES]


def _put_back_caches(before: list[Any]) -> None:
    """Binds PyTorch's own caches as before. The next one who needs a value makes it."""
    for (place, name), value in zip(_OWN_CACHES, before, strict=True):
        if getattr(sys.modules.get(place), name, value) is not value:
            setattr(sys.modules[place], name, value)


class _Frozen:
    """Freezes what is there before the first of several traces, until the last is over.

    Where the program has frozen objects itself, as servers do before they fork, nothing is frozen or thawed:
    the rest is little, and is noted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces = 0
        self._is_ours = False
        self._before: frozenset[int] = frozenset()

    def enter(self) -> None:
        """A trace begins."""
        with self._lock:
            if self._traces == 0:
                self._is_ours = gc.get_freeze_count() == 0
                if self._is_ours:
                    gc.freeze()
                else:
                    self._before = frozenset(map(id, gc.get_objects()))
            self._traces += 1

    def leave(self) -> None:
        """It is over."""
        with self._lock:
            self._traces -= 1
            if self._traces:
                if self._is_ours:  # a search has thawed all
                    gc.freeze()
            else:
                if self._is_ours:
                    gc.unfreeze()
                self._before = frozenset()

    def made(self) -> list[Any]:
        """Objects that were made since."""
        before = self._before
        found = gc.get_objects()
        return [value for value in found if id(value) not in before] if before else found


_frozen = _Frozen()


def _forget_frames(error: BaseException | None) -> None:
    """Drops the local variables of what an error has ended: an error is kept, and must not keep tensors."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            if tensors_of(one.args):
                one.args = tuple(_without_tensors(value) for value in one.args)
            if isinstance(one, AttributeError):
                one.obj = None  # a tensor, or an output that holds some
            pending += (one.__cause__, one.__context__)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return repr(value)
    return type(value).__name__ if tensors_of(value) else value


def _prove(watch: Watch, error: BaseException | None) -> None:
    """Removes what is left. What the block has raised counts for more than a place that nobody knows."""
    torch.clear_autocast_cache()
    left = _collected(watch)
    if not left:
        return
    kept = _Search().remove(watch)
    left = _collected(watch)
    if error is None and left:
        kept.append("a place that the garbage collector does not know")
    if kept:
        outcome = "They are still there" if left else "They have been removed"
        raise LeftoverError(
            f"planning left tensors without data in {', '.join(dict.fromkeys(kept))}. {outcome}, and what "
            "was there before is not known: run one forward with real data before planning"
        ) from error


def _collected(watch: Watch) -> int:
    """Collects garbage as long as that removes any of what is watched. Returns how much is left.

    A node of an autograd graph shows the collector its hooks only when no later node leads to it. So of
    blocks whose hooks hold nodes (`register_multi_grad_hook`), each goes a collection after the next one.
    """
    gc.collect()
    before, left = -1, len(watch.left())
    while left and left != before:
        gc.collect()
        before, left = left, len(watch.left())
    return left


class _Search:
    """Finds the places from before a trace that keep what was made in it, and empties them.

    Attributes:
        made: objects made since the freeze, by id; and dictionaries that held nothing to track before.
        tainted: what leads to a leftover.
        unknown: names of places where what was there before is not known.
    """

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.tainted: dict[int, Any] = {}
        self.unknown: list[str] = []

    def remove(self, watch: Watch) -> list[str]:
        """Removes what leads to what is watched. Returns `unknown`."""
        self.made.update((id(value), value) for value in _frozen.made())
        level: list[Any] = list(watch.left())
        gc.unfreeze()  # referrers are looked for among all objects
        for holder in self._holders(level):
            self._empty(holder)
        self.made.clear()
        self.tainted.clear()
        return self.unknown

    def _holders(self, level: list[Any]) -> list[Any]:
        """Objects from before that hold, directly, what leads to the tokens."""
        holders: dict[int, Any] = {}
        own = {id(self.made), id(self.tainted), id(holders), id(self.__dict__)}  # this search itself
        while level:
            self.tainted.update((id(value), value) for value in level)
            own.add(id(level))
            following: list[Any] = []
            for one in gc.get_referrers(*level):
                if id(one) in own or type(one) in (FrameType, _Search) or id(one) in self.tainted:
                    continue
                if id(one) in self.made:
                    following.append(one)
                else:
                    holders[id(one)] = one
            level = list({id(one): one for one in following}.values())
        return list(holders.values())

    def _is_tainted(self, value: Any) -> bool:
        return id(value) in self.tainted

    # ---- holders ---------------------------------------------------------------------------------

    def _empty(self, holder: Any) -> None:
        """Takes out of an object from before what leads to a leftover."""
        kind = type(holder)
        if issubclass(kind, dict):
            self._empty_dict(holder)
        elif kind is _CACHE:
            holder.cache_clear()
        elif issubclass(kind, set):
            holder.difference_update([value for value in holder if self._is_tainted(value)])
        elif issubclass(kind, (list, deque)):
            self._empty_sequence(holder)
        elif issubclass(kind, tuple):  # it cannot have got anything new, so its dictionaries are from before
            for value in holder:
                self._lost_keys(value)
        elif kind is CellType:
            if not self._lost_keys(holder.cell_contents):
                holder.cell_contents = None
                self.unknown.append("what a function has closed over")
        else:
            self._empty_object(holder)

    def _empty_dict(self, holder: dict[Any, Any]) -> None:
        owner = _owner_of(holder)
        for key, value in list(holder.items()):
            if not (self._is_tainted(key) or self._is_tainted(value)):
                continue
            if owner is None:
                del holder[key]
            elif not self._lost_keys(value):
                self._unbind(owner, key)

    def _lost_keys(self, value: Any) -> bool:
        """Whether a value is a dictionary with leftovers, which a program has bound; it loses them."""
        if type(value) is not dict or not self._is_tainted(value):
            return False
        for key, item in list(value.items()):
            if self._is_tainted(key) or self._is_tainted(item):
                del value[key]
        return True

    def _empty_sequence(self, holder: list[Any] | deque[Any]) -> None:
        kept = [value for value in holder if not self._is_tainted(value)]
        was_extended = all(one is other for one, other in zip(kept, holder, strict=False))
        if not was_extended:
            self.unknown.append(f"a {type(holder).__name__} of {_keeper_of(holder)}")
        holder.clear()
        holder.extend(kept)

    def _empty_object(self, holder: Any) -> None:
        attributes = attributes_of(holder)
        if self._lost_keys(attributes):
            return
        names = list(attributes or ()) + slots_of(type(holder))
        found = [name for name in names if self._is_tainted(getattr(holder, name, None))]
        for name in found:
            if not self._lost_keys(getattr(holder, name)):
                self._unbind(holder, name)
        if not found:
            self.unknown.append(f"an object of {_name(type(holder))}")

    def _unbind(self, owner: Any, name: str) -> None:
        """Takes a leftover from a name. What that was bound to before is not known, but for properties."""
        if type(getattr(type(owner), name, None)) is functools.cached_property:
            delattr(owner, name)
            return
        setattr(owner, name, None)
        self.unknown.append(_name(owner, name))


def _has_graph(value: Any) -> bool:
    return issubclass(type(value), Tensor) and value.grad_fn is not None


def _owner_of(attributes: dict[Any, Any]) -> Any:
    """What has a dictionary as its attributes; None: it is one of its own."""
    for one in gc.get_referrers(attributes):
        kind = type(one)
        if issubclass(kind, (ModuleType, FunctionType)) or not issubclass(kind, type):
            is_owner = kind is not FrameType and attributes_of(one) is attributes
        else:
            is_owner = any(held is attributes for held in gc.get_referents(one.__dict__))
        if is_owner or issubclass(kind, threading.local):
            return one
        if kind is dict and any(issubclass(type(other), threading.local) for other in gc.get_referrers(one)):
            return SimpleNamespace()  # attributes of one thread
    return None


def _keeper_of(value: Any) -> str:
    """A name for what holds a container."""
    for one in gc.get_referrers(value):
        if type(one) is dict:
            owner = _owner_of(one)
            for name in [name for name, held in one.items() if held is value and owner is not None]:
                return _name(owner, name)
    return "an unknown place"


def _name(owner: Any, attribute: str = "") -> str:
    named = owner if isinstance(owner, (type, FunctionType, ModuleType)) else type(owner)
    parts = [] if issubclass(type(named), ModuleType) else [named.__module__]
    parts.append(getattr(named, "__qualname__", named.__name__))
    return ".".join([*parts, attribute] if attribute else parts)
