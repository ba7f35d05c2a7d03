# SPDX-License-Identifier: Apache-2.0
"""Plain attributes of a model's modules, as a part of what a plan is for: flags, words, what is None.

A loop may switch an adapter off between two forwards: then another step runs than the one that was
planned. So each step is looked at before it runs:

    bool, str, members of an enum       by value
    short lists and tuples of words     by value: names of active adapters, say
    None                                as that; anything else only as "something"
    numbers                             not at all: they count steps, or are settings that decide no memory

What changes at every step without changing the step must not ask for a plan each time. `learn` finds that
out, as `PlainValues` does for arguments.

Cost: one look-up per attribute; names are listed once per module. Nothing of the model is held.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from torch import nn

__all__ = ["Attributes", "ModuleAttributes"]

Attributes = tuple[tuple[str, str, Any], ...]
"""(path of a module, name, value) of all plain attributes that count, in module order."""

_SOMETHING: Final = object()
"""In place of any value that counts only as one that is not None. An attribute that is not there is alike."""

_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__) | {"forward", "__reduce_ex__", "__deepcopy__"}
"""PyTorch's own of every module, of which the training flag counts elsewhere, and MemScale's."""

_BOOKKEEPING: Final = ("_memscale", "_is_accelerate", "_is_hf_")
"""How names begin under which libraries note on a model what they have done with it."""

_LAYERS: Final = ("torch.nn.modules.", "torch.nn.utils.")
"""Where PyTorch's modules are that compute. Its others, such as replicas, keep books of each step."""

_LONGEST: Final = 8
"""Words of a list that counts by value; longer ones are data."""

_LONGEST_WORD: Final = 128

_ALIKE: Final = 2
"""New plans in a row that were the same step, until the attribute counts no more."""

_MOST_VALUES: Final = 16
"""Values of one attribute that plans are made for."""


class ModuleAttributes:
    """Reads the plain attributes of one model before each step."""

    def __init__(self) -> None:
        self._listed: list[tuple[weakref.ref[nn.Module], int, tuple[str, ...]]] = []
        self._paths: list[str] = []
        self._values: list[Any] | None = None  # None: listed anew, and not read yet
        self._read: Attributes = ()
        self._ignored: set[tuple[str, str]] = set()
        self._alike: dict[tuple[str, str], int] = {}
        self._seen: dict[tuple[str, str], set[Any]] = {}

    def read(self, model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Attributes:
        """What counts now. The same object as last time, if nothing has changed.

        Args:
            model: whose.
            modules: its own, in their order, where the caller has them already.
        """
        modules = list(model.modules()) if modules is None else modules
        values = self._values_of(modules)
        if values is None:
            self._list(model)
            values = self._values_of(modules)
            assert values is not None
        if values != self._values:
            self._values = values
            self._read = self._counting(values)
        return self._read

    def _values_of(self, modules: Sequence[nn.Module]) -> list[Any] | None:
        """Values of the attributes that are listed; None: there are other modules or attributes by now."""
        if len(modules) != len(self._listed):
            return None
        values: list[Any] = []
        for module, (known, size, names) in zip(modules, self._listed, strict=True):
            attributes = module.__dict__
            if known() is not module or len(attributes) != size:
                return None
            for name in names:
                value = attributes.get(name, _SOMETHING)
                kind = type(value)
                if value is None or kind is bool or kind is str:
                    values.append(value)
                else:
                    values.append(_plain(value))
        return values

    def _list(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._listed = [(weakref.ref(item), len(item.__dict__), _names_of(item)) for _, item in named]
        self._paths = [path for path, _ in named]
        self._values = None

    def _counting(self, values: list[Any]) -> Attributes:
        listed = zip(self._paths, self._listed, strict=True)
        places = [(path, name) for path, (_, _, names) in listed for name in names]
        return tuple(
            (*place, value)
            for place, value in zip(places, values, strict=True)
            if value is not _SOMETHING and place not in self._ignored
        )

    # ---- what does not count -------------------------------------------------------------------------

    def ignore(self, changed: Mapping[str, Collection[str]]) -> None:
        """A forward changes these itself, so that they are no sign of another step: path → names."""
        self._ignore({(path, name) for path, names in changed.items() for name in names})

    def note_forward(self, before: Attributes, after: Attributes) -> None:
        """The same of what differs after a forward: caches that it has filled, above all."""
        self._ignore({item[:2] for item in set(before) ^ set(after)})

    def learn(self, before: Attributes, now: Attributes, is_same_step: bool) -> None:
        """A step was traced anew, which differs from the one in force in nothing but attributes.

        Args:
            before: of the plan that was in force.
            now: of the new one.
            is_same_step: nothing in it differs from the earlier one.
        """
        old, new = ({(path, name): value for path, name, value in values} for values in (before, now))
        useless = set()
        for place in old.keys() | new.keys():
            values = old.get(place, _SOMETHING), new.get(place, _SOMETHING)
            if values[0] == values[1]:
                continue
            seen = self._seen.setdefault(place, set())
            seen.update(values)
            self._alike[place] = self._alike.get(place, 0) + 1 if is_same_step else 0
            if self._alike[place] >= _ALIKE or len(seen) > _MOST_VALUES:
                useless.add(place)
        self._ignore(useless)

    def _ignore(self, places: set[tuple[str, str]]) -> None:
        if not places <= self._ignored:
            self._ignored |= places
            self._read = tuple(item for item in self._read if item[:2] not in places)


def _names_of(module: nn.Module) -> tuple[str, ...]:
    home = type(module).__module__
    if home.startswith("torch.") and not home.startswith(_LAYERS):
        return ()
    return tuple(
        name
        for name, value in module.__dict__.items()
        if name not in _OF_EVERY_MODULE
        and not name.startswith(_BOOKKEEPING)
        and (isinstance(value, bool) or not isinstance(value, (int, float, complex)))
    )


def _plain(value: Any) -> Any:
    """A value that is neither None, bool nor str, as it counts."""
    if isinstance(value, (list, tuple)):
        short = len(value) <= _LONGEST and all(type(word) is str for word in value)
        return tuple(value) if short else _SOMETHING
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        return str(value)
    return _SOMETHING
