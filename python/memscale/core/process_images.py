# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of what a model's code can reach outside of its modules: globals, classes, caches.

A forward that runs for a plan fills caches of the process, counts, and sets flags. What it can reach is read
off the code (`reached_code`). What no code names (`globals()["x"]`, state of another thread) is left to
`leftovers`.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from memscale.core.flat_contents import is_flat
from memscale.core.iterators import copy_of, is_iterator
from memscale.core.reached_code import CACHE, INERT, Place, bound_by, is_library, reached_from
from memscale.core.value_images import ABSENT, Images, content_of, is_plain, same_as
from memscale.techniques.process_tables import Kept, KeptAttribute, KeptByFunction, KeptName
from memscale.techniques.torch_settings import users_modes

_STATE: Final = (
    dict, list, tuple, set, deque, UserDict, UserList, ChainMap, weakref.WeakKeyDictionary, weakref.WeakSet,
    weakref.WeakValueDictionary, threading.local, SimpleNamespace, random.Random, torch.Generator, MethodType,
    memoryview,
)  # fmt: skip
"""Classes of libraries whose objects a program uses to keep something. Others are not looked into."""

_CONTAINERS: Final = (dict, list, tuple, set, deque)

_MANY: Final = 10_000
"""Containers above this size are data, not caches: to copy one for each plan costs more than the trace."""

_CODE: Final = (*INERT, FunctionType, CACHE, type, ModuleType, property, staticmethod, classmethod)
_DECORATED: Final = frozenset({FunctionType, CACHE, type, str})
_REGISTRIES: Final = frozenset({"_parameters", "_buffers", "_modules", "_memscale_executor"})


class _StateImages(Images):
    """Images of what a program keeps, without what belongs to libraries."""

    def _take(self, value: Any, depth: int, most: int) -> None:
        kind = type(value)
        if issubclass(kind, _STATE):
            if issubclass(kind, _CONTAINERS) and not is_plain(kind):
                return
            if hasattr(kind, "__len__") and kind is not memoryview and len(value) > _MANY:
                return
        elif is_flat(value) or (self.bindings and issubclass(kind, (nn.Module, nn.Parameter))):
            pass
        elif kind is not FunctionType and is_library(kind.__module__) and not _is_numpy_generator(kind):
            return
        super()._take(value, depth, most)

    def leading_to_changed(self) -> set[int]:
        """The ids of values that have changed, or that hold one that has."""
        changed = {key for key, image in self.images.items() if image is not None and image.changed()}
        held_by: dict[int, list[int]] = {}
        if changed:
            for key, image in self.images.items():
                for child in () if image is None else image.children:
                    held_by.setdefault(id(child), []).append(key)
        pending = list(changed)
        while pending:
            new = [key for key in held_by.get(pending.pop(), ()) if key not in changed]
            changed.update(new)
            pending += new
        return changed


def _is_numpy_generator(kind: type) -> bool:
    return kind.__module__.startswith("numpy.random.")


class _ClassBindings:
    """What a class binds its names to."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.before = dict(vars(kind))

    def changed(self, leading: set[int]) -> list[str]:
        """Names that are bound to something else, or whose values are among these."""
        now, before = vars(self.kind), self.before
        return [
            name
            for name in now.keys() | before.keys()
            if not name.startswith("__")
            and (now.get(name, ABSENT) is not before.get(name, ABSENT) or id(before.get(name)) in leading)
        ]

    def restore(self) -> None:
        now = vars(self.kind)
        if len(now) == len(self.before) and all(map(_same, now.values(), self.before.values())):
            return
        for name in [name for name in now if name not in self.before]:
            delattr(self.kind, name)
        for name, value in self.before.items():
            if now.get(name, ABSENT) is not value:
                setattr(self.kind, name, value)


def _same(one: Any, other: Any) -> bool:
    return one is other


class ProcessImages:
    """What the code of a model can reach in the process, as it is now.

    Args:
        model: its own modules are looked at elsewhere (`model_state`).
        contents: what runs computes for real: put back what parameters of others have for data, too.
    """

    def __init__(self, model: nn.Module, contents: bool = False) -> None:
        modules = list(model.modules())
        hung = [*_hung_on(model, modules), *users_modes()]
        kinds = map(type, (*modules, *hung))
        reached = reached_from(dict.fromkeys(kind for kind in kinds if not is_library(kind.__module__)))
        reached.leave_out(modules)
        reached.reach(*hung)
        self._images = _StateImages(contents=False, modules=modules, bindings=contents)
        self._bound = [(place, place.globals.get(place.name, ABSENT)) for place in reached.places.values()]
        self._classes = [_ClassBindings(kind) for kind in reached.classes.values()]
        self._caches = [(cache, cache.cache_info()) for cache in reached.caches]
        self._empty: list[dict[str, Any]] = []  # attributes of functions and tensors
        self._functions = [*reached.functions, *reached.caches]
        bases = dict.fromkeys(base for kind in map(type, modules) for base in kind.__mro__)
        own = [base for base in bases if not is_library(base.__module__)]
        self._methods = [item for base in own for item in vars(base).values() if type(item) is FunctionType]
        for value in hung:
            self._take(value)
        for _, value in self._bound:
            self._take(value)
        for bindings in self._classes:
            for name, value in bindings.before.items():
                if not name.startswith("__"):
                    self._take(value)
        for keeper in (*reached.functions, *reached.caches, *model.parameters(), *model.buffers()):
            self._take_attributes(keeper.__dict__)
        for function in reached.functions:
            self._take_held(function)
        parametrize = sys.modules.get("torch.nn.utils.parametrize")  # what its `cached` keeps
        if parametrize is not None:
            self._take(parametrize._cache)
        self._lend_iterators(reached.functions)

    def _take(self, value: Any) -> None:
        if not issubclass(type(value), _CODE):
            self._images.take(value)

    def _take_attributes(self, attributes: dict[str, Any]) -> None:
        if attributes:
            self._images.take(attributes)
        else:
            self._empty.append(attributes)

    def _take_held(self, function: FunctionType) -> None:
        """What a function has closed over, beside other code, and the defaults of its arguments."""
        if any(type(content_of(cell)) not in _DECORATED for cell in function.__closure__ or ()):
            self._images.take(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._take(value)

    def _lend_iterators(self, functions: list[FunctionType]) -> None:
        """Binds copies of iterators, so that the originals stay where they are."""
        for place, value in self._bound:
            if is_iterator(value):
                place.globals[place.name] = copy_of(value)
        for function in functions:
            for cell in function.__closure__ or ():
                if is_iterator(content_of(cell)):
                    cell.cell_contents = copy_of(content_of(cell))

    def changed(self) -> list[Kept]:
        """Where something is otherwise than before, or may be for the time of a forward: a method binds it.

        Iterators are left out: what has been taken from one cannot be given back.
        """
        leading = self._images.leading_to_changed()
        bound = {
            (id(function.__globals__), name)
            for function in self._methods
            for name in bound_by(function.__code__)
        }
        found: list[Kept] = []
        for place, value in self._bound:
            now = place.globals.get(place.name, ABSENT)
            is_bound = same_as(now) != same_as(value) or (id(place.globals), place.name) in bound
            if (is_bound or id(value) in leading) and not is_iterator(value):
                found.append(KeptName(*place))
        for bindings in self._classes:
            found += [KeptAttribute(bindings.kind, name) for name in bindings.changed(leading)]
        filled = set(map(id, filter(None, self._empty)))
        for function in self._functions if leading or filled else ():
            places = [function, attributes := function.__dict__]
            if type(function) is FunctionType:
                places += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            if id(attributes) in filled or not leading.isdisjoint(map(id, places)):
                found.append(KeptByFunction(function))
        return found

    def restore(self) -> None:
        """Binds and fills everything as before."""
        with ExitStack() as stack:  # whatever one of them raises
            for cache, before in self._caches:
                stack.callback(_empty_again, cache, before)
            for bindings in self._classes:
                stack.callback(bindings.restore)
            for attributes in filter(None, self._empty):
                stack.callback(attributes.clear)
            stack.callback(self._images.restore)
            for place, value in self._bound:
                stack.callback(_bind_again, place, value)


def _hung_on(model: nn.Module, modules: list[nn.Module]) -> Iterator[Any]:
    """What hangs on modules and tensors of a model: hooks, replaced forwards, objects of any kind."""
    for module in modules:
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES and not issubclass(type(value), INERT):
                is_registry = name.endswith("_hooks") and type(value) in (dict, OrderedDict)
                yield from value.values() if is_registry else (value,)
    for tensor in (*model.parameters(), *model.buffers()):
        hooks: Any = getattr(tensor, "_post_accumulate_grad_hooks", None), tensor._backward_hooks
        for registry in filter(None, hooks):
            yield from registry.values()
        yield from tensor.__dict__.values()


def _bind_again(place: Place, value: Any) -> None:
    if place.globals.get(place.name, ABSENT) is value:
        return
    if value is ABSENT:
        del place.globals[place.name]
    else:
        place.globals[place.name] = value


def _empty_again(cache: Any, before: Any) -> None:
    """Empties a function's cache that was empty. Of one that was not, nobody could put the rest back."""
    if before.currsize == 0 and cache.cache_info().currsize:
        cache.cache_clear()
