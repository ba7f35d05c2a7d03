# SPDX-License-Identifier: Apache-2.0
"""Plain attributes of modules (flags, strings, None) as a part of a step's signature.

A loop may switch an adapter off between two forwards: then another step runs than the one that was
planned. So each step is looked at before it runs:

    bool, str, members of an enum       by value
    whole numbers                       by value: how many blocks run, say
    None, other numbers                 as that, and as 0 or not: a rate of 0 saves no mask
    short lists, tuples, dictionaries   of these, by value: names of active adapters, say
    anything else                       only as "something"

Objects that hang on modules, such as a configuration, count by their attributes, each object once. Numbers
of PyTorch's own layers do not count, but for the rates of dropouts.

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

_NONE: Final[dict[str, Any]] = {}

_SOMETHING: Final = object()
"""In place of any value that counts only as one that is not None. An attribute that is not there is alike."""

_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__) | {"forward", "__reduce_ex__", "__deepcopy__"}
"""PyTorch's own of every module (the training flag counts elsewhere), and MemScale's."""

_BOOKKEEPING: Final = ("_memscale", "_is_accelerate", "_is_hf_", "_current_fx_name")
"""How names begin under which libraries note on a model what they have done with it."""

_LAYERS: Final = ("torch.nn.modules.", "torch.nn.utils.")
"""Where PyTorch's modules are that compute. Its others, such as replicas, keep books of each step."""

_NUMBER: Final = 0.5
"""In place of any number that is neither whole nor 0."""

_RATE: Final = "p"
"""Of PyTorch's dropouts."""

_LONGEST: Final = 8
"""Items of a list that counts by value; longer ones are data."""

_PLAIN: Final = frozenset({str, bool, int, type(None)})
"""Types that count by value, in lists too."""

_LARGEST: Final = 256
"""Attributes of an object that is looked into."""

_NO_SETTINGS: Final = frozenset(
    {"torch", "memscale", "threading", "_thread", "logging", "weakref", "functools", "collections", "numpy",
     "accelerate", "deepspeed", "lightning", "pytorch_lightning"}
)  # fmt: skip
"""Packages whose objects are no settings of a model: those of trainers keep books of each step."""

_OF_A_FILE: Final = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
)
"""What `save_pretrained` writes into a configuration as it saves: where it comes from, and what it is of."""

_LONGEST_WORD: Final = 128

_ALIKE: Final = 2
"""New plans in a row that were the same step, until the attribute counts no more."""

_MOST_VALUES: Final = 16
"""Values of one attribute that plans are made for."""


class ModuleAttributes:
    """Reads the plain attributes of one model before each step."""

    def __init__(self) -> None:
        self._listed: list[tuple[weakref.ref[nn.Module], int, tuple[str, ...]]] = []
        # Of objects that hang on them: number of the module, name, id, attributes, and names of those.
        self._objects: list[tuple[int, str, int, int, tuple[str, ...]]] = []
        self._places: list[tuple[str, str]] = []
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
                values.append(value if type(value) in _PLAIN else _plain(value))
        for number, name, known_id, size, names in self._objects:
            item = modules[number].__dict__.get(name)
            attributes = getattr(item, "__dict__", _NONE)
            if id(item) != known_id or len(attributes) != size:
                return None
            values += [_plain(attributes.get(name, _SOMETHING)) for name in names]
        return values

    def _list(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._listed = [(weakref.ref(item), len(item.__dict__), _names_of(item)) for _, item in named]
        self._objects = []
        self._places = [
            (path, name) for (path, _), (*_, names) in zip(named, self._listed, strict=True) for name in names
        ]
        seen = set()
        for number, ((path, module), (*_, names)) in enumerate(zip(named, self._listed, strict=True)):
            for name in names:
                value = module.__dict__[name]
                if id(value) not in seen and _has_settings(value):
                    seen.add(id(value))
                    inner = tuple(key for key in value.__dict__ if key not in _OF_A_FILE)
                    self._objects.append((number, name, id(value), len(value.__dict__), inner))
                    self._places += [(f"{path}.{name}", key) for key in inner]
        self._values = None

    def _counting(self, values: list[Any]) -> Attributes:
        return tuple(
            (*place, value)
            for place, value in zip(self._places, values, strict=True)
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
        """A step was traced again, which differs from the one in force in nothing but attributes.

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
    is_own = not home.startswith(_LAYERS)
    return tuple(
        name
        for name, value in module.__dict__.items()
        if name not in _OF_EVERY_MODULE
        and not name.startswith(_BOOKKEEPING)
        and (is_own or name == _RATE or isinstance(value, bool) or not isinstance(value, (int, float)))
    )


def _has_settings(value: Any) -> bool:
    """Whether an attribute's value is an object of a program's own kind, such as a configuration."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package in _NO_SETTINGS or package == "builtins" or isinstance(value, (type, enum.Enum, nn.Module)):
        return False
    attributes = getattr(value, "__dict__", None)
    return (
        type(attributes) is dict and len(attributes) <= _LARGEST and all(type(n) is str for n in attributes)
    )


def _plain(value: Any) -> Any:
    """A value as it counts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if issubclass(kind, float):
        return _NUMBER if value else 0.0
    if issubclass(kind, (list, tuple)):
        short = len(value) <= _LONGEST and all(type(item) in _PLAIN for item in value)
        return tuple(value) if short else _SOMETHING
    if kind is dict:
        short = len(value) <= _LONGEST and all(
            type(item) in _PLAIN for pair in value.items() for item in pair
        )
        return tuple(value.items()) if short else _SOMETHING
    if issubclass(kind, enum.Enum):
        return value
    if issubclass(kind, str):
        return str(value)
    return int(value) if issubclass(kind, int) else _SOMETHING
