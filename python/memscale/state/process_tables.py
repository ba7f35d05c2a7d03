# SPDX-License-Identifier: Apache-2.0
"""What a forward changes outside of its modules: globals, class attributes, functions, generators.

The trace says which of the places that a model's code reaches its forward changes (`process_images`), or its
code binds: a counter, a cache, a generator of random numbers of one's own. A recompute finds there what the
forward found, and what it changes is undone, as for attributes of modules (`attribute_tables`).

What is written down keeps no graph alive: of a tensor that has one only what it holds is kept. Else each step
would hold the one before, where a place keeps something of it.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Final, Protocol

import torch
from torch import Tensor

ABSENT: Final = object()
"""Stands for a value that is not there."""

LARGE: Final = 1_000
"""Items of a container: above, to copy it for each call costs more than the call."""


SMALL_BYTES: Final = 64 * 1024
"""Of a tensor: up to here it may be held, or copied, for each call."""


class Kept(Protocol):
    """A place in the process, without what it holds."""

    def tables(self) -> list[Any]:
        """What it has itself now, as tables; none if it is gone."""

    def values(self) -> Iterable[Any]:
        """What it leads to beside these."""


class KeptName:
    """A name in a Python module's globals; it need not be bound."""

    __slots__ = ("_globals", "name")

    def __init__(self, namespace: dict[str, Any], name: str) -> None:
        self._globals = namespace
        self.name = name

    @property
    def key(self) -> tuple[int, str]:
        """Which name this is."""
        return id(self._globals), self.name

    def tables(self) -> list[Any]:
        """What it is bound to."""
        return [Name(self._globals, self.name)]

    def values(self) -> Iterable[Any]:
        """Nothing more."""
        return ()


class KeptAttribute:
    """A name in a class, or in what is a library's (`reached_code.Reached.borrowed`)."""

    __slots__ = ("_owner", "name")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self.name = name

    def tables(self) -> list[Any]:
        """What it is bound to."""
        owner = self._owner()
        return [] if owner is None else [AttributeName(owner, self.name)]

    def values(self) -> Iterable[Any]:
        """Nothing more."""
        return ()


class KeptByFunction:
    """What a function has closed over, its attributes and the defaults of its arguments."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = weakref.ref(function)

    def tables(self) -> list[Any]:
        """Its attributes."""
        function = self._function()
        return [] if function is None else [_Attributes(function)]

    def values(self) -> Iterable[Any]:
        """Its cells and defaults."""
        function = self._function()
        if type(function) is not FunctionType:
            return ()
        named = (function.__kwdefaults__ or {}).values()
        return *(function.__closure__ or ()), *(function.__defaults__ or ()), *named


class KeptTensors:
    """Tensors that the code reaches, and may write to one day (`written_tensors`).

    Args:
        tensors: these.
        past_versions: the code names `.data`, by which it can write without moving a version.
    """

    __slots__ = ("_refs", "past_versions")

    def __init__(self, tensors: Iterable[Tensor], past_versions: bool) -> None:
        self.past_versions = past_versions
        self._refs = [weakref.ref(tensor) for tensor in tensors]

    def tables(self) -> list[Any]:
        """Nothing: what they hold is not written down."""
        return []

    def values(self) -> Iterable[Any]:
        """Those that are still there."""
        return [tensor for tensor in (ref() for ref in self._refs) if tensor is not None]


class Weak:
    """In place of a tensor that has a graph: what it holds, without the graph.

    A global may be bound to another before backward. Plain autograd holds what the forward has used of it.
    """

    __slots__ = ("_data", "ref")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self._data = tensor.detach()
        self._data.requires_grad_(tensor.requires_grad)

    def is_of(self, value: Any) -> bool:
        """Whether a value is that tensor."""
        return value is not None and self.ref() is value

    def tensor(self) -> Tensor:
        """That tensor; if it is gone, one of its values, which is no leaf either if it requires gradients."""
        found = self.ref()
        if found is not None:
            return found
        with torch.enable_grad():
            return self._data.clone() if self._data.requires_grad else self._data


def weakened(held: Any, is_single: bool) -> Any:
    """What a table has read, without graphs.

    Args:
        held: a dictionary or a list of the table's own, or a single value.
        is_single: it is a value.
    """
    if is_single:
        return without_graph(held)
    if isinstance(held, dict):
        return {key: without_graph(value) for key, value in held.items()}
    return list(map(without_graph, held))


def without_graph(value: Any) -> Any:
    """A value to hold until backward. Plain autograd holds what it needs of a tensor, too, and no graph."""
    return Weak(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def strengthened(held: Any, is_single: bool) -> Any:
    """What was `weakened`, with tensors."""
    if is_single:
        return strong(held)
    if isinstance(held, dict):
        return {key: strong(value) for key, value in held.items()}
    return list(map(strong, held))


def strong(value: Any) -> Any:
    """A value, or the tensor that it stands for."""
    return value.tensor() if type(value) is Weak else value


def differs(now: Any, before: Any) -> bool:
    """Whether a place holds something else; plain values are compared, all others are the same or not."""
    if now is before:
        return False
    if type(before) is Weak:
        return not before.is_of(now)
    return type(now) is not type(before) or type(now) not in _PLAIN or bool(now != before)


_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes})


class Name:
    """A global variable."""

    __slots__ = ("held", "name", "place")

    def __init__(self, place: dict[str, Any], name: str) -> None:
        self.place, self.name = place, name
        self.held = self.read()

    def read(self) -> Any:
        """What it is bound to."""
        return self.place.get(self.name, ABSENT)

    def parts(self) -> Iterable[Any]:
        """What it was bound to."""
        return (self.held,)

    def write(self, value: Any) -> None:
        """Binds it to this, if it is not."""
        if value is ABSENT:
            self.place.pop(self.name, None)
        elif differs(self.read(), value):
            self.place[self.name] = value

    def differs(self) -> bool:
        """Whether it is bound to something else."""
        return differs(self.read(), self.held)


class AttributeName(Name):
    """An attribute of a class or another object, which it has itself."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        super().__init__({}, name)

    def read(self) -> Any:
        """What it is bound to."""
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        """Binds it to this, if it is not."""
        present = self.read()
        if value is ABSENT:
            if present is not ABSENT:
                delattr(self.owner, self.name)
        elif differs(present, value):
            setattr(self.owner, self.name, value)


class _Attributes:
    """What a function has for attributes, or a `threading.local` in this thread."""

    __slots__ = ("held", "place")

    def __init__(self, place: Any) -> None:
        self.place = place
        self.held = self.read()

    def read(self) -> dict[str, Any]:
        """Its attributes."""
        return dict(self.place.__dict__)

    def parts(self) -> Iterable[Any]:
        """Their values."""
        return self.held.values()

    def write(self, values: dict[str, Any]) -> None:
        """Makes it have these, where it has not."""
        place = self.place.__dict__
        for name in [name for name in place if name not in values]:
            del place[name]
        for name, value in values.items():
            if differs(place.get(name, ABSENT), value):
                place[name] = value

    def differs(self) -> bool:
        """Whether it has others."""
        present = self.place.__dict__
        return present.keys() != self.held.keys() or any(
            differs(present[name], value) for name, value in self.held.items()
        )


class Whole:
    """Something that is looked at as a whole and holds no other values."""

    __slots__ = ("held", "place")

    def __init__(self, place: Any) -> None:
        self.place = place
        self.held = self.read()

    def read(self) -> Any:
        """Its state."""
        raise NotImplementedError

    def parts(self) -> Iterable[Any]:
        """Nothing."""
        return ()


class Generator(Whole):
    """A generator of random numbers: PyTorch's, Python's or NumPy's."""

    __slots__ = ()

    def read(self) -> Any:
        """Its state."""
        if isinstance(self.place, torch.Generator):
            return self.place.get_state()
        if isinstance(self.place, random.Random):
            return self.place.getstate()
        return copy.deepcopy(bits_of(self.place).state)

    def write(self, state: Any) -> None:
        """Gives it a state."""
        if isinstance(self.place, torch.Generator):
            self.place.set_state(state)
        elif isinstance(self.place, random.Random):
            self.place.setstate(state)
        else:
            bits_of(self.place).state = state

    def differs(self) -> bool:
        """Whether it has moved."""
        now = self.read()
        if isinstance(now, Tensor):
            return not torch.equal(now, self.held)
        return str(now) != str(self.held) if isinstance(now, dict) else bool(now != self.held)


def is_numpy_generator(value: Any) -> bool:
    """Whether a value is a generator of NumPy's, or what one draws its bits from."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    kinds = numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator
    return issubclass(type(value), kinds)


def bits_of(generator: Any) -> Any:
    """What a generator of NumPy's draws from."""
    if hasattr(generator, "random_raw"):
        return generator
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def keeper(value: Any) -> Any:
    """A table for a generator of random numbers or a thread-local.

    Returns:
        None for all else.
    """
    if isinstance(value, (torch.Generator, random.Random)) and not isinstance(value, random.SystemRandom):
        return Generator(value)
    if isinstance(value, threading.local):
        return _Attributes(value)
    return Generator(value) if is_numpy_generator(value) else None
