# SPDX-License-Identifier: Apache-2.0
"""What a program's code reads and only its loop binds anew: globals, class attributes, closed-over values.

    SCALE = 2.0; loss = model(x); SCALE = 1.0; loss.backward()

No forward changes it, so no trace tells. So each call notes what all of these are bound to, by reference;
what such a value holds is looked at where code can change it (`process_images`). As a rule nothing has
changed since the call before, and its table is used again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_, itemgetter
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from memscale.state.process_tables import ABSENT, differs, strong, without_graph


class Bindings:
    """A table of names, each bound to a value.

    Attributes:
        held: what `read` returned when this was made, without tensors that have a graph.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = {name: without_graph(value) for name, value in self.read().items()}

    def read(self) -> dict[Any, Any]:
        """Names and values, without those that are not bound."""
        raise NotImplementedError

    def bind(self, name: Any, value: Any) -> None:
        """Binds a name; `ABSENT`: to nothing."""
        raise NotImplementedError

    def parts(self) -> Iterable[Any]:
        """Nothing."""
        return ()

    def write(self, values: dict[Any, Any]) -> None:
        """Binds what is bound to something else."""
        now = self.read()
        for name, value in values.items():
            if differs(now.get(name, ABSENT), value):
                self.bind(name, strong(value))
        for name in now.keys() - values.keys():
            self.bind(name, ABSENT)

    def differs(self) -> bool:
        """Whether anything is bound to something else."""
        now, held = self.read(), self.held
        if len(now) == len(held) and all(map(is_, now.values(), held.values())):
            return bool(now.keys() != held.keys())
        return now.keys() != held.keys() or any(differs(now[name], value) for name, value in held.items())


class _Globals(Bindings):
    """Names in a Python module."""

    __slots__ = ("_all", "_values", "names", "place")

    def __init__(self, place: dict[str, Any], names: Sequence[str]) -> None:
        self.place, self.names = place, names
        super().__init__()
        self._all = itemgetter(*names, *names[:1])  # of two at least, so that it gives a tuple
        self._values = (*self.held.values(), *list(self.held.values())[:1])

    def read(self) -> dict[Any, Any]:
        """Names and values."""
        place = self.place
        return {name: place[name] for name in self.names if name in place}

    def bind(self, name: Any, value: Any) -> None:
        """Binds a name."""
        if value is ABSENT:
            del self.place[name]
        else:
            self.place[name] = value

    def differs(self) -> bool:
        """Whether anything is bound to something else. As a rule all are bound, to the same."""
        try:
            now = self._all(self.place)
        except KeyError:
            return super().differs()
        is_same = len(now) == len(self._values) and all(map(is_, now, self._values))
        return not is_same and super().differs()


class _Entries(Bindings):
    """A dictionary as a whole."""

    __slots__ = ("place",)

    def __init__(self, place: dict[Any, Any]) -> None:
        self.place = place
        super().__init__()

    def read(self) -> dict[Any, Any]:
        """Keys and values."""
        return dict(self.place)

    def bind(self, name: Any, value: Any) -> None:
        """Makes, changes or removes an entry."""
        if value is ABSENT:
            del self.place[name]
        else:
            self.place[name] = value


class _OfClass(Bindings):
    """What a class has itself."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind
        super().__init__()

    def read(self) -> dict[Any, Any]:
        """Names and values."""
        return dict(vars(self.kind))

    def bind(self, name: Any, value: Any) -> None:
        """Binds a name, but for what Python keeps there: of names such as `__add__` only functions count."""
        if name.startswith("__") and FunctionType not in (type(value), type(vars(self.kind).get(name))):
            return
        if value is ABSENT:
            type.__delattr__(self.kind, name)
        else:
            type.__setattr__(self.kind, name, value)


class _Cells(Bindings):
    """What functions have closed over."""

    __slots__ = ("cells",)

    def __init__(self, cells: Sequence[CellType]) -> None:
        self.cells = cells
        super().__init__()

    def read(self) -> dict[Any, Any]:
        """Numbers of cells and what is in them."""
        found = {}
        for number, cell in enumerate(self.cells):
            try:
                found[number] = cell.cell_contents
            except ValueError:  # empty
                continue
        return found

    def bind(self, name: Any, value: Any) -> None:
        """Fills a cell."""
        if value is ABSENT:
            del self.cells[name].cell_contents
        else:
            self.cells[name].cell_contents = value


class _OfFunctions(Bindings):
    """Defaults of functions' arguments, and their code."""

    __slots__ = ("functions",)

    def __init__(self, functions: Sequence[weakref.ref[FunctionType]]) -> None:
        self.functions = functions
        super().__init__()

    def read(self) -> dict[Any, Any]:
        """By the function's number and the attribute's name."""
        found: dict[Any, Any] = {}
        for number, ref in enumerate(self.functions):
            function = ref()
            if function is not None:
                found[number, "__defaults__"] = function.__defaults__
                found[number, "__kwdefaults__"] = function.__kwdefaults__
                found[number, "__code__"] = function.__code__
        return found

    def bind(self, name: Any, value: Any) -> None:
        """Gives a function another one."""
        number, attribute = name
        function = self.functions[number]()
        if function is not None and value is not ABSENT:
            setattr(function, attribute, value)


class KeptBindings:
    """A place whose bindings are noted.

    Args:
        make: its table; None: it is gone.
    """

    __slots__ = ("_last", "_make")

    def __init__(self, make: Callable[[], Bindings | None]) -> None:
        self._make = make
        self._last: Bindings | None = None

    def tables(self) -> list[Any]:
        """What is bound now. The table of the call before, where that is the same."""
        last = self._last
        if last is None or last.differs():
            last = self._make()
            has_tensors = last is not None and any(issubclass(type(v), Tensor) for v in last.held.values())
            self._last = None if has_tensors else last
        return [] if last is None else [last]

    def values(self) -> Iterable[Any]:
        """Nothing: what they hold is not looked at here."""
        return ()


def kept_globals(place: dict[str, Any], names: Iterable[str]) -> KeptBindings:
    """Names in a Python module's globals."""
    return KeptBindings(functools.partial(_Globals, place, tuple(names)))


def kept_entries(place: dict[Any, Any]) -> KeptBindings:
    """All that a dictionary holds."""
    return KeptBindings(functools.partial(_Entries, place))


def kept_class(kind: type) -> KeptBindings:
    """All that a class has itself."""
    ref = weakref.ref(kind)

    def table() -> Bindings | None:
        found = ref()
        return None if found is None else _OfClass(found)

    return KeptBindings(table)


def kept_cells(cells: Iterable[CellType]) -> KeptBindings:
    """What these hold."""
    return KeptBindings(functools.partial(_Cells, tuple(cells)))


def kept_functions(functions: Iterable[FunctionType]) -> KeptBindings:
    """Defaults and code of these."""
    return KeptBindings(functools.partial(_OfFunctions, tuple(map(weakref.ref, functions))))
