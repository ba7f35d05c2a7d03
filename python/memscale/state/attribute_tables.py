# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of what hangs on modules beside parameters and buffers.

A root sets a number, an adapter's name, an entry of a dictionary or a tensor on its blocks for the time of
its forward and resets it at the end; backward comes later. So a call notes what it finds, by reference, and
its recompute gets that back:

    module.__dict__      without PyTorch's registries: parameters and buffers see `checkpoint_state`
    module's slots       of its class
    children             which modules, under which names, in which order
    its forward hooks    one that has come since belongs to later forwards
    its tensors          attributes of parameters and buffers
    what hangs on it     dictionaries, lists, sets, objects (a configuration, say), what functions have
                         closed over, modules that are referred to; each by what it holds itself; small
                         arrays of NumPy and of Python and `bytearray` by their contents

Values are compared by identity, plain ones by value. Only what differs is exchanged, and what was there
before the recompute is put back after it.

Beside these come places of the process that the forward changes (`process_tables`). Not seen: what else
changes there, and files. The values of a recompute are compared with those of its forward for that reason
(`recompute_check`).
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from memscale.state import process_tables
from memscale.state.flat_contents import FLAT, flat_contents, viewed_by
from memscale.state.iterators import IteratorCopy, is_taken_from
from memscale.state.key_order import base_of, items_of, put_back_in_order, put_in_order
from memscale.state.loop_tables import Bindings
from memscale.state.module_notes import OWN_TENSORS, ModuleNotes, attributes_of_tensors
from memscale.state.process_tables import ABSENT as _ABSENT
from memscale.state.process_tables import (
    Kept,
    Name,
    Whole,
    keeper,
    strengthened,
    weakened,
)
from memscale.state.value_images import content_of_variable, is_plain, slots_of
from memscale.state.value_tables import PLAIN, Cell, Elements, Slots, differs
from memscale.torchkit.forward_slot import StandIn

_DEPTH = 4
"""Containers inside of containers that are looked into."""

_MOST = 400
"""Containers behind the modules of one call. A module that holds a data set is not to make its calls slow."""

_REGISTRIES: Final = frozenset(vars(nn.Module())) | {"_memscale_executor", "__reduce_ex__", "__deepcopy__"}
"""Modules and parameters, and hooks: see `has_foreign_hooks`."""

_OPAQUE: Final = PLAIN | {
    Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    type, ModuleType, BuiltinFunctionType, range, slice, enum.EnumMeta,
}  # fmt: skip
"""Types of values that hold nothing that is looked at here."""

_SKIPPED: Final = _OPAQUE - OWN_TENSORS
"""Of a module's attributes: its tensors are noted."""

_NOT_LOOKED_INTO: Final = frozenset(
    {"torch", "memscale", "threading", "_thread", "logging", "concurrent", "multiprocessing", "asyncio",
     "io", "_io", "queue", "_queue", "socket", "subprocess", "random", "numpy"}
)  # fmt: skip
"""Packages whose objects have state that other threads may use, or that is restored elsewhere."""

_PROXIES: Final = (weakref.ProxyType, weakref.CallableProxyType)


_slots_of = functools.lru_cache(maxsize=1 << 10)(slots_of)


class _Table(Protocol):
    """One container: what it held when the table was made, and how to make it hold that again.

    Attributes:
        held: what `read` returned then.
    """

    held: Any

    def read(self) -> Any:
        """What it holds, in a copy."""

    def write(self, values: Any) -> None:
        """Makes it hold what `read` has returned, where it does not."""

    def parts(self) -> Iterable[Any]:
        """The values in `held`."""

    def differs(self) -> bool:
        """Whether it holds anything else than `held`."""


class _Mapping:
    """A dictionary: of a module or an object, or one that hangs there."""

    __slots__ = ("held", "place", "without")

    def __init__(
        self,
        place: dict[Any, Any],
        without: frozenset[str] = frozenset(),
        all_held: dict[Any, Any] | None = None,
    ) -> None:
        self.place = place
        self.without = without
        self.held = self._of(place if all_held is None else all_held)

    def read(self) -> dict[Any, Any]:
        """What it holds."""
        return self._of(self.place)

    def _of(self, values: dict[Any, Any]) -> dict[Any, Any]:
        without = self.without
        return (
            {key: value for key, value in values.items() if key not in without} if without else dict(values)
        )

    def parts(self) -> Iterable[Any]:
        """The values that it held."""
        return self.held.values()

    def write(self, values: dict[Any, Any]) -> None:
        """Makes it hold these, where it does not."""
        for key in self._differing(values):
            self._bind(key, values.get(key, _ABSENT))
        if self._is_other_order(values):
            if self.without:
                put_in_order(self.place, [key for key in values if key != "forward"])
            else:
                put_back_in_order(self.place, values)

    def differs(self) -> bool:
        """Whether it holds anything else than it held, or in another order."""
        return bool(self._differing(self.held)) or self._is_other_order(self.held)

    def _is_other_order(self, keys: Iterable[Any]) -> bool:
        without = self.without
        if not without:
            return list(self._keys()) != list(keys)  # asked by `==` only where they are not the same object
        present = [key for key in self.place if key not in without and key != "forward"]
        return present != [key for key in keys if key != "forward"]

    def _keys(self) -> Iterable[Any]:
        return self.place

    def _bind(self, key: Any, value: Any) -> None:
        if value is _ABSENT:
            self.place.pop(key, None)
        else:
            self.place[key] = value

    def _differing(self, values: dict[Any, Any]) -> list[Any]:
        place = self.place
        keys = [key for key, value in values.items() if differs(place.get(key, _ABSENT), value)]
        if len(place) > len(values) - len(keys):  # else none has come
            keys += [key for key in place if key not in values and key not in self.without]
        return (
            [key for key in keys if key != "forward" or not _are_ours(place, values)]
            if self.without
            else keys
        )


class _OwnReading(_Mapping):
    """A dictionary whose class reads or writes its own way: what it has as a dictionary, behind that."""

    __slots__ = ()

    def _of(self, values: dict[Any, Any]) -> dict[Any, Any]:
        return dict(items_of(values))

    def _keys(self) -> Iterable[Any]:
        return base_of(self.place).keys(self.place)  # type: ignore[no-any-return]

    def _bind(self, key: Any, value: Any) -> None:
        base = base_of(self.place)
        if value is _ABSENT:
            base.__delitem__(self.place, key)
        else:
            base.__setitem__(self.place, key, value)

    def _differing(self, values: dict[Any, Any]) -> list[Any]:
        present = self.read()
        keys = [key for key, value in values.items() if differs(present.get(key, _ABSENT), value)]
        return keys + [key for key in present if key not in values]


class _Registries:
    """Which modules are in modules, in order, their hooks, and attributes of tensors: small dictionaries."""

    __slots__ = ("_lasting", "_modules", "held")

    def __init__(
        self, notes: ModuleNotes, of_tensors: Sequence[dict[Any, Any]], tensors_held: Sequence[dict[Any, Any]]
    ) -> None:
        self._modules: list[nn.Module] = []
        self._lasting: list[dict[Any, Any]] = []
        children: list[dict[Any, Any]] = []
        lasting: list[dict[Any, Any]] = []
        for number, module in enumerate(notes.modules):
            of_children, *of_hooks = notes.places_of(number)
            if isinstance(module._modules, dict):  # no scripted one
                self._modules.append(module)
                children.append(of_children)
            self._lasting += module._forward_hooks, module._forward_pre_hooks
            lasting += of_hooks
        self._lasting += of_tensors
        self.held = [*children, *lasting, *tensors_held]

    def _places(self) -> list[dict[Any, Any]]:
        # A `Sequential` that loses a child gets another dictionary.
        places: list[dict[Any, Any]] = [module._modules for module in self._modules]
        return places + self._lasting

    def read(self) -> list[dict[Any, Any]]:
        """What they hold."""
        return [place.copy() if place else _EMPTY for place in self._places()]

    def parts(self) -> Iterable[Any]:
        """Nothing: the modules are looked at by themselves."""
        return ()

    def write(self, values: list[dict[Any, Any]]) -> None:
        """Makes them hold these, in their order, where they do not."""
        for place, before in zip(self._places(), values, strict=True):
            if (place or before) and _is_other(place, before):
                place.clear()
                place.update(before)

    def differs(self) -> bool:
        """Whether one holds anything else than it held, or in another order."""
        return any(
            (place or before) and _is_other(place, before)
            for place, before in zip(self._places(), self.held, strict=True)
        )


_SINGLE: Final = (Cell, Name)
"""Tables of one value."""

_WHOLE: Final = (Whole, *FLAT)
"""Tables of something that holds no other values."""

_WITHOUT_VALUES: Final = (_Registries, *_WHOLE)
"""Tables in which no iterators are looked for."""


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that are not the transformers library's own.

    Their own may fire in a recompute, too; of others nobody knows. Hooks for backward fire in the graph of
    the forward, once.
    """
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    return any(
        not (getattr(hook, "__module__", None) or "").startswith("transformers.")
        for registry in (module._forward_hooks, module._forward_pre_hooks)
        for hook in registry.values()
    )


class AttributeTables:
    """What hung on some modules when this was made.

    Args:
        modules: whose attributes are read; not those of their children.
        kept: places of the process that are read, too.
        modes: `TorchFunctionMode` of the program, in force: what they count, they count once.
        tensors: that the modules read beside parameters and buffers. Attributes of these are read, too.

    Attributes:
        notes: what the modules had.
        tensors: what has been found beside parameters and buffers of the modules; to be dropped soon.
        referred: other modules that have been found; the same.
    """

    __slots__ = (
        "_iterators", "_of_modules", "_of_process", "_of_tensors", "_tables", "_tensors_held", "notes",
        "referred", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        modules: Sequence[nn.Module],
        kept: Sequence[Kept] = (),
        modes: Sequence[Any] = (),
        tensors: Iterable[Tensor] = (),
    ) -> None:
        self.notes = ModuleNotes(modules)
        self._tables: list[_Table] = []
        self._of_process: list[_Table] = []
        self._of_modules: list[_Table] | None = None  # made when somebody needs them
        self.tensors: list[Tensor] = []
        self.referred: list[nn.Module] = []
        self._iterators: dict[int, IteratorCopy] = {}  # by id
        seen = set(map(id, modules))
        level = self._leading(self.notes.attributes(_REGISTRIES, _SKIPPED), _OPAQUE)
        for module in modules:
            if _slots_of(type(module)):  # type: ignore[arg-type]
                level += self._leading(self._slots(module), _OPAQUE)
        of_tensors = attributes_of_tensors(self.notes.tensors)
        for attributes in filter(None, of_tensors):
            level += self._leading(attributes.values(), _OPAQUE)
        if level:
            self._walk(level, seen, self._enter, _OPAQUE)
        if kept or modes:
            self._add_kept(kept, modes, seen)
        self._of_tensors = of_tensors + attributes_of_tensors((*tensors, *self.tensors))
        self._tensors_held = [place.copy() if place else _EMPTY for place in self._of_tensors]

    def _walk(
        self, level: list[Any], seen: set[int], enter: Callable[[Any], Iterable[Any]], opaque: frozenset[Any]
    ) -> None:
        """Writes values down, and what hangs on them."""
        most = len(self._tables) + _MOST
        for _ in range(_DEPTH):
            found: list[Any] = []
            for value in level:
                if id(value) not in seen and len(self._tables) < most:
                    seen.add(id(value))
                    found += self._leading(enter(value), opaque)
            level = found

    def _leading(self, values: Iterable[Any], opaque: frozenset[Any]) -> list[Any]:
        """Those that lead to others. Notes the tensors among them."""
        leading: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in OWN_TENSORS:
                self.tensors.append(value)
            elif kind not in opaque:
                leading.append(value)
        return leading

    def _add_kept(self, kept: Sequence[Kept], modes: Sequence[Any], seen: set[int]) -> None:
        first = len(self._tables)
        level: list[Any] = [*modes, *(inspect.unwrap(type(mode).__torch_function__) for mode in modes)]
        for place in kept:
            for table in place.tables():
                level += self._add(table)
            level += place.values()
        level = self._leading(level, _OPAQUE)
        self._walk(level, seen, self._enter_in_process, _OPAQUE)
        self._of_process = self._tables[first:]
        del self._tables[first:]
        for table in self._of_process:
            if not isinstance(table, (*_WHOLE, Bindings)):
                table.held = weakened(table.held, isinstance(table, _SINGLE))

    def _enter_in_process(self, value: Any) -> Iterable[Any]:
        table = flat_contents(value, process_tables.SMALL_BYTES)
        if table is not None:
            return self._add(table)
        if isinstance(value, (dict, list, set, deque)) and len(value) > process_tables.LARGE:
            return ()
        return self._enter(value)

    def _enter(self, value: Any) -> Iterable[Any]:
        """Writes one value down, and returns what it holds."""
        kind = type(value)
        if kind is tuple:
            return value  # type: ignore[no-any-return]
        if kind in _PROXIES or kind is weakref.ref:
            return self._enter_referred(value, kind)
        if issubclass(kind, dict):
            if is_plain(kind):
                return self._add(_Mapping(value))
            return self._add(_OwnReading(value))
        if issubclass(kind, (list, set, deque)):
            return self._add(Elements(value)) if is_plain(kind) else ()
        if kind is CellType:
            return self._add(Cell(value))
        keeps = keeper(value)
        if keeps is not None:
            return self._add(keeps)
        if is_taken_from(value):
            self._iterators[id(value)] = IteratorCopy(value)
            return ()
        if kind is FunctionType:
            return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
        if kind is MethodType:
            return (value.__self__,)
        if kind is functools.partial:
            return (value.func, *value.args, *value.keywords.values())
        if kind is ContextVar:
            return (content_of_variable(value),)
        return self._enter_object(value, kind)

    def _enter_referred(self, value: Any, kind: type) -> Iterable[Any]:
        """What a weak reference leads to. A proxy does not say of what it is, but has its attributes."""
        if kind is weakref.ref:
            return (value(),)
        try:
            place = value.__dict__
        except (ReferenceError, AttributeError):
            return ()
        return self._add(_Mapping(place, _REGISTRIES if "_parameters" in place else frozenset()))

    def _enter_object(self, value: Any, kind: type) -> Iterable[Any]:
        if issubclass(kind, nn.Module):
            self.referred.append(value)
            return [*self._add(_Mapping(value.__dict__, _REGISTRIES)), *self._slots(value)]
        if issubclass(kind, tuple):
            return value  # type: ignore[no-any-return]
        # Streams may get what other threads write. Where a forward writes to one, it is not recomputed.
        table = flat_contents(value, process_tables.SMALL_BYTES, streams=False)
        parts = () if table is None else self._add(table)
        if kind is memoryview:
            return (viewed_by(value),)
        is_opaque = kind.__module__.partition(".")[0] in _NOT_LOOKED_INTO and kind is not SobolEngine
        if is_opaque or issubclass(kind, type):
            return parts
        place = getattr(value, "__dict__", None)
        if type(place) is dict:
            parts = [*parts, *self._add(_Mapping(place))]
        return [*parts, *self._slots(value)]

    def _slots(self, value: Any) -> Iterable[Any]:
        names = _slots_of(type(value))  # type: ignore[arg-type]
        return self._add(Slots(value, names)) if names else ()

    def _add(self, table: _Table) -> Iterable[Any]:
        self._tables.append(table)
        return table.parts()

    def recorded(self) -> AbstractContextManager[None]:
        """For the time of the call: what it takes from generators is noted."""
        generators = {key: item for key, item in self._iterators.items() if item.recorded is not None}
        return self._recorded(generators) if generators else nullcontext()

    @contextmanager
    def _recorded(self, generators: dict[int, IteratorCopy]) -> Iterator[None]:
        self._exchange({key: item.recorded for key, item in generators.items()})
        try:
            yield
        finally:
            self._exchange({id(item.recorded): item.iterator for item in generators.values()})

    def _exchange(self, stand_ins: dict[int, Any]) -> None:
        """Puts these in the places of iterators, which come by their ids."""
        for table in (*self._of_modules_now(), *self._tables, *self._of_process):
            if not isinstance(table, _WITHOUT_VALUES):
                _put_stand_ins(table, stand_ins)

    def _of_modules_now(self) -> list[_Table]:
        """What the modules have themselves, their children and hooks, and what hangs on tensors."""
        if self._of_modules is None:
            notes = self.notes
            tables: list[_Table] = [
                _Mapping(module.__dict__, _REGISTRIES, notes.attributes_of(number))
                for number, module in enumerate(notes.modules)
            ]
            self._of_modules = [*tables, _Registries(notes, self._of_tensors, self._tensors_held)]
        return self._of_modules

    def are_modules_same(self) -> bool:
        """Whether modules and what hangs on their tensors hold the same objects; False: one may differ."""
        if not self.notes.are_same():
            return False
        if any(self._tensors_held):
            return not any(map(_is_other, self._of_tensors, self._tensors_held))
        return not any(self._of_tensors)

    def differing(self, is_same: bool | None = None) -> list[_Table]:
        """Containers that hold something else now.

        Args:
            is_same: what `are_modules_same` returns.
        """
        tables = (*self._tables, *self._of_process)
        if not (self.are_modules_same() if is_same is None else is_same):
            tables = *self._of_modules_now(), *tables
        return [table for table in tables if table.differs()]

    def restore(
        self,
        stack: ExitStack,
        differing: Sequence[_Table],
        refused: Callable[[str], Exception],
        is_same: bool = False,
    ) -> None:
        """Puts back what containers held. What all of them hold now comes again when `stack` closes.

        Of all of them: a recompute that stops early leaves what it has set, and not yet reset. What has been
        taken from an iterator cannot be given back: in its place comes a copy from before the call.

        Args:
            stack: ends with the recompute.
            differing: what holds something else than it held.
            refused: what to raise where the recompute takes more from a generator than its call, by its type.
            is_same: modules are as they were. What the recompute changes on them `put_modules_back` undoes,
                which the caller calls at the end.
        """
        tables = [*self._tables, *self._of_process]
        if self._iterators or not is_same:
            tables = [*self._of_modules_now(), *tables]
        if tables:
            stack.callback(_write_back, [(table, table.read()) for table in tables])
        of_process = set(map(id, self._of_process)) if differing else set()
        for table in differing:
            if id(table) not in of_process or isinstance(table, _WHOLE):
                table.write(table.held)
            else:
                table.write(strengthened(table.held, isinstance(table, _SINGLE)))
        if self._iterators:
            self._exchange({key: before.again(refused) for key, before in self._iterators.items()})

    def put_modules_back(self) -> None:
        """What a recompute has changed on modules that were as they had been."""
        _write_back([(table, table.held) for table in self._of_modules_now()])


def _put_stand_ins(table: _Table, stand_ins: dict[int, Any]) -> None:
    """Puts these in the places of iterators, which come by their ids."""
    values = table.read()
    if isinstance(table, _SINGLE):
        values = stand_ins.get(id(values), values)
    elif isinstance(values, dict):
        values = {key: stand_ins.get(id(value), value) for key, value in values.items()}
    else:
        values = [stand_ins.get(id(value), value) for value in values]
    table.write(values)


def _write_back(present: list[tuple[_Table, Any]]) -> None:
    """Makes tables hold what they held before a recompute, the last one first, whatever one raises."""
    try:
        while present:
            table, values = present.pop()
            table.write(values)
    finally:
        if present:
            _write_back(present)


_EMPTY: Final[dict[Any, Any]] = {}


def _is_other(place: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return list(place) != list(before) or any(map(differs, place.values(), before.values()))


def _are_ours(*places: dict[Any, Any]) -> bool:
    """Whether a forward that differs does so by a technique that came or went: that is never exchanged."""
    forwards = [place.get("forward", _ABSENT) for place in places]
    return all(forward is _ABSENT or isinstance(forward, StandIn) for forward in forwards)
