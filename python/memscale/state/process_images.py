# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of what a model's code can reach outside of its modules: globals, classes, caches.

A forward that runs for a plan fills caches of the process, counts, and sets flags. What it can reach is read
off the code (`reached_code`). What no code names (`globals()["x"]`, state of another thread) is left to
`leftovers`.
"""

from __future__ import annotations

import argparse
import configparser
import functools
import random
import sys
import threading
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from memscale.state.flat_contents import is_flat
from memscale.state.iterators import copy_of, is_iterator, is_taken_from
from memscale.state.library_names import names_used_by, registries_of
from memscale.state.loop_tables import kept_cells, kept_class, kept_entries, kept_functions, kept_globals
from memscale.state.process_settings import KeptSettings
from memscale.state.process_tables import (
    AttributeName,
    Kept,
    KeptAttribute,
    KeptByFunction,
    KeptName,
    KeptTensors,
)
from memscale.state.reached_code import (
    CACHE,
    INERT,
    ON_CREATION,
    SETTERS,
    Place,
    is_library,
    is_of_library,
    names_of,
    reached_from,
    set_by,
    strings_of,
    writes_of,
)
from memscale.state.value_images import (
    ABSENT,
    Images,
    _Image,
    attributes_of,
    content_of,
    is_plain,
    same_as,
    slots_of,
)
from memscale.torchkit.torch_settings import users_modes

_STATE: Final = (
    dict, list, tuple, set, deque, UserDict, UserList, ChainMap, weakref.WeakKeyDictionary, weakref.WeakSet,
    weakref.WeakValueDictionary, threading.local, SimpleNamespace, random.Random, torch.Generator, MethodType,
    functools.partial, memoryview, ContextVar, argparse.Namespace, configparser.RawConfigParser,
    configparser.SectionProxy, SobolEngine,
)  # fmt: skip
"""Classes of libraries whose objects a program uses to keep something. Others are not looked into."""

_CONTAINERS: Final = (dict, list, tuple, set, deque)

_MANY: Final = 10_000
"""Containers above this size are data, not caches: to copy one for each plan costs more than the trace."""

_MOST_TENSORS: Final = 1_000
"""Beside the model's own: more are data."""

_CODE: Final = (*INERT, FunctionType, CACHE, type, ModuleType, property, staticmethod, classmethod)
_GRADIENTS: Final = frozenset({"grad", "backward", "zero_grad"})
_OF_CLASS: Final = frozenset({"type", "__class__"})

_FUNCTIONS: Final = (FunctionType, CACHE, type, ModuleType, property, staticmethod, classmethod)

_OPEN: Final = (
    dict, list, set, deque, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary,
    threading.local, SimpleNamespace, random.Random, torch.Generator, nn.Module,
)  # fmt: skip
"""Classes of libraries whose objects any code may change."""

_DECORATED: Final = frozenset({FunctionType, CACHE, type, str})
_STATES_OF_GENERATORS: Final = frozenset({"getstate", "setstate", "get_state", "set_state"})
"""Methods by which code puts a generator back itself: it may end where it began although it was used."""

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

    def leading_to(self, is_sought: Callable[[_Image], bool]) -> set[int]:
        """The ids of values whose images are sought, or that hold one that is."""
        found = {key for key, image in self.images.items() if image is not None and is_sought(image)}
        held_by: dict[int, list[int]] = {}
        if found:
            for key, image in self.images.items():
                for child in () if image is None else image.children:
                    held_by.setdefault(id(child), []).append(key)
        pending = list(found)
        while pending:
            new = [key for key in held_by.get(pending.pop(), ()) if key not in found]
            found.update(new)
            pending += new
        return found


def _is_numpy_generator(kind: type) -> bool:
    return kind.__module__.startswith("numpy.random.")


class _ClassBindings:
    """What a class binds its names to."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.before = dict(vars(kind))

    def values(self) -> list[tuple[str, Any]]:
        """Its names, but for those with a meaning to Python, with what they were bound to."""
        return [(name, value) for name, value in self.before.items() if not name.startswith("__")]

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


class _MayChange:
    """What the code of a model can change, by what it names: more than it does change.

    Something that is set, used and set back within a forward looks unchanged, and so does what begins to
    change in a later step. Still a recompute has to find it as its own call did, and has to leave it alone.

    Args:
        functions: of the program that are reached. Libraries reach, and name, too much.
        methods: of modules, of libraries, too: what they bind counts.
    """

    def __init__(self, functions: Sequence[FunctionType], methods: Sequence[FunctionType]) -> None:
        self._own = set(map(id, functions))
        self._globals: set[tuple[int, str]] = set()
        self._set: set[str] = set()
        self._set_beside: dict[str, set[str]] = {}  # what is set by code that uses a name
        for function in functions:
            code = function.__code__
            sets, names = set_by(code), names_of(code)
            self._set |= sets
            for name in (*names, *code.co_freevars) if sets else ():
                self._set_beside.setdefault(name, set()).update(sets)
            if "globals" in names:
                self._globals.update((id(function.__globals__), name) for name in strings_of(code))
        named = [function.__code__ for function in functions]
        if any(not SETTERS.isdisjoint(names_of(code)) for code in named):
            self._set.update(*map(strings_of, named))
        for function in (*functions, *methods):
            writes = writes_of(function.__code__)
            self._globals.update((id(function.__globals__), name) for name in writes.globals)

    def value(self, value: Any) -> bool:
        """What a value holds itself."""
        kind = type(value)
        if issubclass(kind, _CODE):
            return False
        if issubclass(kind, _OPEN) or is_flat(value) or is_taken_from(value) or _is_numpy_generator(kind):
            return True
        attributes, slots = attributes_of(value), slots_of(kind)
        if attributes is None and not slots:
            return False
        if not is_of_library(kind.__module__):
            return True
        return not self._set.isdisjoint(attributes or ()) or not self._set.isdisjoint(slots)

    def place(self, place: Place, value: Any, leading: set[int]) -> bool:
        """What a name is bound to, or what that holds, or leads to by one of these."""
        if (id(place.globals), place.name) in self._globals:
            return True
        if is_of_library(place.globals.get("__name__")):
            return False
        return self.attribute(place.name, value, leading)

    def attribute(self, name: str, value: Any, leading: set[int]) -> bool:
        """What a name of a class, or of a Python module, is bound to, or what that holds or leads to."""
        if name in self._set and not issubclass(type(value), _FUNCTIONS):
            return True
        return id(value) in leading or self.value(value)

    def of_class(self, kind: type) -> set[str]:
        """Names that a class may get: set by code that uses the class's name, or by its own as of a class."""
        found = set(self._set_beside.get(kind.__name__, ()))
        for value in vars(kind).values():
            function = value.__func__ if type(value) is classmethod else value
            if id(function) in self._own and (
                function is not value or not _OF_CLASS.isdisjoint(names_of(function.__code__))
            ):
                found |= writes_of(function.__code__).attributes
        return found

    def borrowed_by(self, bound: Iterable[tuple[Place, Any]]) -> Iterator[AttributeName]:
        """Names that code sets in a library's object, or a tensor, that it has by a name of its own."""
        for place, value in bound:
            kind = type(value)
            is_owner = issubclass(kind, Tensor) or (
                is_library(kind.__module__) and not issubclass(kind, _CODE)
            )
            if is_owner and kind.__dictoffset__ and kind.__weakrefoffset__:
                for name in self._set_beside.get(place.name, ()):
                    yield AttributeName(value, name)

    def held_by(self, function: Any, leading: set[int]) -> bool:
        """What a function has for attributes, has closed over or for defaults, or what these lead to."""
        if id(function) not in self._own:
            return False
        if writes_of(function.__code__).cells or function.__name__ in self._set_beside:
            return True
        if not self._set.isdisjoint(function.__dict__):
            return True
        held = [*map(content_of, function.__closure__ or ()), *_defaults_of(function)]
        return any(id(value) in leading or self.value(value) for value in held)


def _defaults_of(function: FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


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
        self._of_model = set(map(id, (*model.parameters(), *model.buffers())))
        self._images = _StateImages(contents=False, modules=modules, bindings=contents)
        self._bound = [(place, place.globals.get(place.name, ABSENT)) for place in reached.places.values()]
        self._classes = [_ClassBindings(kind) for kind in reached.classes.values()]
        self._borrowed = [AttributeName(owner, name) for (_, name), owner in reached.borrowed.items()]
        self._used = [*reached.used.values()]
        self._caches = [(cache, cache.cache_info()) for cache in reached.caches]
        self.replays_generators = not reached.names.isdisjoint(_STATES_OF_GENERATORS)
        self._empty: list[dict[str, Any]] = []  # attributes of functions and tensors
        self._functions = [*reached.functions, *reached.caches]
        bases = dict.fromkeys(base for kind in map(type, modules) for base in kind.__mro__)
        self._kinds = [base for base in bases if base is not object]
        own = [base for base in bases if not is_library(base.__module__)]
        self._methods = [item for base in own for item in vars(base).values() if type(item) is FunctionType]
        self._own = [item for item in reached.own_functions() if item.__name__ not in ON_CREATION]
        self._may_change = _MayChange(self._own, self._methods)
        self._borrowed += self._may_change.borrowed_by(self._bound)
        self._settings = KeptSettings(frozenset().union(*(names_of(item.__code__) for item in self._own)))
        self._settings_before = self._settings.tables()
        named = (names_of(item.__code__) for item in (*self._own, *self._methods))
        self.uses_gradients = any(not names.isdisjoint(_GRADIENTS) for names in named)
        self._names_data = any(
            "data" in names_of(item.__code__)
            for item in reached.functions
            if not is_library(item.__globals__.get("__name__"))
        )
        for value in hung:
            self._take(value)
        for value in (*(value for _, value in self._bound), *(item.held for item in self._borrowed)):
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
        for value in _defaults_of(function):
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
        """Where something is otherwise than before, or may be one day: code can change it."""
        leading = self._images.leading_to(_Image.changed)
        may_change = self._may_change
        open_to = self._images.leading_to(
            lambda image: may_change.value(image.value) or any(map(is_taken_from, image.children))
        )
        found: list[Kept] = []
        for place, value in self._bound:
            now = place.globals.get(place.name, ABSENT)
            is_bound = same_as(now) != same_as(value) or may_change.place(place, value, open_to)
            if is_bound or id(value) in leading:
                found.append(KeptName(*place))
        for bindings in self._classes:
            names = dict.fromkeys(bindings.changed(leading))
            if not is_of_library(bindings.kind.__module__):
                names |= {
                    name: None
                    for name, value in bindings.values()
                    if may_change.attribute(name, value, open_to)
                }
                names |= dict.fromkeys(may_change.of_class(bindings.kind))
            found += [KeptAttribute(bindings.kind, name) for name in names]
        borrowed = (item for item in self._borrowed if item.held is not ABSENT or item.read() is not ABSENT)
        found += [KeptAttribute(item.owner, item.name) for item in borrowed]
        if self._settings_before:
            found.append(self._settings)
        filled = set(map(id, filter(None, self._empty)))
        for function in self._functions:
            places = [function, attributes := function.__dict__]
            if type(function) is FunctionType:
                places += _defaults_of(function)
            is_other = id(attributes) in filled or not leading.isdisjoint(map(id, places))
            if is_other or may_change.held_by(function, open_to):
                found.append(KeptByFunction(function))
        found += self._bound_by_loop({item.key for item in found if isinstance(item, KeptName)})
        tensors = self._tensors()
        is_any = tensors or self._names_data
        return [*found, KeptTensors(tensors, self._names_data)] if is_any else found

    def _bound_by_loop(self, known: set[tuple[int, str]]) -> list[Kept]:
        """What the program's code reads and does not bind: the loop may.

        Args:
            known: names in globals that are looked at anyway.
        """
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for place, value in self._bound:
            is_own = not is_of_library(place.globals.get("__name__"))
            if is_own and value is not ABSENT and (id(place.globals), place.name) not in known:
                names.setdefault(id(place.globals), (place.globals, []))[1].append(place.name)
        found: list[Kept] = [kept_globals(*item) for item in names.values()]
        foreign = [kind for kind in self._kinds if kind is not nn.Module and is_of_library(kind.__module__)]
        used = [*self._used, *names_used_by(foreign).values()]
        found += [kept_globals(vars(module), names) for module, names in used]
        places = [*names.values(), *((vars(it), names) for it, names in used if not is_library(it.__name__))]
        values: list[Any] = [place.get(name) for place, listed in places for name in listed]
        found += map(kept_entries, registries_of(values))
        helpers = [
            item for item in values if issubclass(type(item), type) and not is_library(item.__module__)
        ]
        found += [kept_globals(item.__dict__, item.__dict__) for item in self._own if item.__dict__]
        kinds = [bindings.kind for bindings in self._classes]
        own = [kind for kind in kinds if not is_of_library(kind.__module__)]
        found += map(kept_class, dict.fromkeys([*own, *helpers, *self._kinds, Tensor]))
        found.append(kept_functions(self._own))
        cells = {
            id(cell): cell
            for function in self._own
            for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)
            if name != "__class__"
        }
        return [*found, kept_cells(cells.values())] if cells else found

    def _tensors(self) -> list[Tensor]:
        """What has been reached of these, beside those of the model."""
        values = [value for _, value in self._bound]
        values += [value for bindings in self._classes for _, value in bindings.values()]
        values += [item for function in self._own for item in _defaults_of(function)]
        values += [
            child for image in self._images.images.values() if image is not None for child in image.children
        ]
        found = {id(value): value for value in values if type(value) in (Tensor, nn.Parameter)}
        return [tensor for key, tensor in found.items() if key not in self._of_model][:_MOST_TENSORS]

    def restore(self) -> None:
        """Binds and fills everything as before."""
        with ExitStack() as stack:  # whatever one of them raises
            for cache, before in self._caches:
                stack.callback(_empty_again, cache, before)
            for bindings in self._classes:
                stack.callback(bindings.restore)
            for item in (*self._borrowed, *self._settings_before):
                stack.callback(item.write, item.held)
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
