# SPDX-License-Identifier: Apache-2.0
"""Tables of slots, lists and closures: what `attribute_tables` writes down beside dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CellType, MethodType
from typing import Any, Final

from memscale.state.process_tables import ABSENT, Weak

PLAIN: Final = frozenset({int, float, bool, complex, str, bytes, type(None)})
"""Compared by value."""


def differs(now: Any, before: Any) -> bool:
    """Whether a place holds something else; plain values are compared, all others are the same or not."""
    if now is before:
        return False
    kind = type(now)
    if kind is not type(before):
        return not (type(before) is Weak and before.is_of(now))
    if kind in PLAIN:
        return bool(now != before)
    # A bound method is made again whenever it is asked for.
    return not (kind is MethodType and now.__func__ is before.__func__ and now.__self__ is before.__self__)


class Slots:
    """What an object has in place of a dictionary."""

    __slots__ = ("held", "names", "place")

    def __init__(self, place: Any, names: Sequence[str]) -> None:
        self.place = place
        self.names = names
        self.held = self.read()

    def read(self) -> dict[str, Any]:
        """What it holds."""
        return {name: getattr(self.place, name, ABSENT) for name in self.names}

    def parts(self) -> Iterable[Any]:
        """The values that it held."""
        return self.held.values()

    def write(self, values: dict[str, Any]) -> None:
        """Makes it hold these, where it does not."""
        for name, value in values.items():
            present = getattr(self.place, name, ABSENT)
            if value is ABSENT and present is not ABSENT:
                object.__delattr__(self.place, name)
            elif value is not ABSENT and differs(present, value):
                object.__setattr__(self.place, name, value)

    def differs(self) -> bool:
        """Whether it holds anything else than it held."""
        present = self.read()
        return any(differs(present[name], value) for name, value in self.held.items())


class Elements:
    """A list, a set or a queue."""

    __slots__ = ("held", "place")

    def __init__(self, place: Any) -> None:
        self.place = place
        self.held = self.read()

    def read(self) -> list[Any]:
        """What it holds."""
        return list(self.place)

    def parts(self) -> Iterable[Any]:
        """The elements that it held."""
        return self.held

    def write(self, values: list[Any]) -> None:
        """Makes it hold these, in this order, where it does not."""
        if self._differs(values):
            self.place.clear()
            if isinstance(self.place, set):
                self.place.update(values)
            else:
                self.place.extend(values)

    def differs(self) -> bool:
        """Whether it holds anything else than it held, or in another order."""
        return self._differs(self.held)

    def _differs(self, values: list[Any]) -> bool:
        return len(self.place) != len(values) or any(map(differs, self.place, values))


class Cell:
    """A variable that a function has closed over."""

    __slots__ = ("held", "place")

    def __init__(self, place: CellType) -> None:
        self.place = place
        self.held = self.read()

    def read(self) -> Any:
        """What it holds."""
        try:
            return self.place.cell_contents
        except ValueError:  # empty yet
            return ABSENT

    def parts(self) -> Iterable[Any]:
        """What it held."""
        return (self.held,)

    def write(self, value: Any) -> None:
        """Makes it hold this, where it does not."""
        if value is ABSENT:
            return
        if differs(self.read(), value):
            self.place.cell_contents = value

    def differs(self) -> bool:
        """Whether it holds something else than it held."""
        return self.held is not ABSENT and differs(self.read(), self.held)
