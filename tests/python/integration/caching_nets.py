# SPDX-License-Identifier: Apache-2.0
"""Small nets whose forward keeps something in the process, each in another kind of place."""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


def ramp(length: int, scale: float = 1.0) -> Tensor:
    """What the nets keep: made of constants, and with no fake to write into."""
    return torch.sin(torch.arange(length, dtype=torch.float32)[:, None] * scale)


class Net(nn.Module):
    """Two blocks behind a `kept` tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kept(x.shape[1])
        for block in self.blocks:
            x = x + block(x)
        return x

    def kept(self, length: int) -> Tensor:
        raise NotImplementedError


@functools.lru_cache(maxsize=8)
def bounded(length: int) -> Tensor:
    return ramp(length)


@functools.cache
def unbounded(length: int) -> dict[str, Tensor]:
    return {"sin": ramp(length)}


class LruCache(Net):
    def kept(self, length: int) -> Tensor:
        return bounded(length)


class Cache(Net):
    def kept(self, length: int) -> Tensor:
        return unbounded(length)["sin"]


class CachedMethod(Net):
    @functools.lru_cache(maxsize=4)  # noqa: B019 - as models do
    def kept(self, length: int) -> Tensor:
        return ramp(length)


TABLE: dict[int, Tensor] = {}
NESTED: dict[int, Any] = {}


class GlobalDict(Net):
    def kept(self, length: int) -> Tensor:
        return TABLE.setdefault(length, ramp(length))


class NestedDict(Net):
    def kept(self, length: int) -> Tensor:
        if length not in NESTED:
            NESTED[length] = {}
            NESTED[length]["sin"] = (ramp(length), "sin")
        tensor: Tensor = NESTED[length]["sin"][0]
        return tensor


READY = False
RAMP: Tensor | None = None


class GlobalFlag(Net):
    def kept(self, length: int) -> Tensor:
        global READY, RAMP
        if not READY:
            RAMP, READY = ramp(length), True
        assert RAMP is not None
        return RAMP


class Unbound(Net):
    def kept(self, length: int) -> Tensor:
        global LATE
        try:
            return LATE  # type: ignore[name-defined, no-any-return]
        except NameError:
            LATE = ramp(length)  # type: ignore[name-defined]
            return LATE  # type: ignore[name-defined, no-any-return]


class ClassAttribute(Net):
    tables: dict[int, Tensor] = {}  # noqa: RUF012 - the point
    last = None

    def kept(self, length: int) -> Tensor:
        kind = type(self)
        if length not in kind.tables:
            kind.tables[length] = kind.last = ramp(length)
        return kind.tables[length]


class Helper:
    """No module: its class keeps the tensor."""

    table: Tensor | None = None

    @classmethod
    def get(cls, length: int) -> Tensor:
        if cls.table is None:
            cls.table = ramp(length)
        return cls.table


class HelperClass(Net):
    def kept(self, length: int) -> Tensor:
        return Helper.get(length)


def _closed_over() -> Any:
    table = None

    def get(length: int) -> Tensor:
        nonlocal table
        if table is None:
            table = ramp(length)
        return table

    return get


closed_over = _closed_over()


class Closure(Net):
    def kept(self, length: int) -> Tensor:
        tensor: Tensor = closed_over(length)
        return tensor


def with_default(length: int, memory: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 - the point
    if length not in memory:
        memory[length] = ramp(length)
    return memory[length]


class DefaultArgument(Net):
    def kept(self, length: int) -> Tensor:
        return with_default(length)


def with_attribute(length: int) -> Any:
    if not hasattr(with_attribute, "table"):
        with_attribute.table = ramp(length)  # type: ignore[attr-defined]
    return with_attribute.table  # type: ignore[attr-defined]


class FunctionAttribute(Net):
    def kept(self, length: int) -> Tensor:
        tensor: Tensor = with_attribute(length)
        return tensor


class Positions:
    @functools.cached_property
    def table(self) -> Tensor:
        return ramp(8)


POSITIONS = Positions()


class CachedProperty(Net):
    def kept(self, length: int) -> Tensor:
        return POSITIONS.table


class Slotted:
    __slots__ = ("calls", "table")

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.calls = 0


SLOTTED = Slotted()


class Slots(Net):
    def kept(self, length: int) -> Tensor:
        SLOTTED.calls += 1
        if SLOTTED.table is None:
            SLOTTED.table = ramp(length)
        return SLOTTED.table


@dataclass
class Entry:
    tensor: Tensor
    shapes: list[int] = field(default_factory=list)


ENTRIES: list[Entry] = []


class ListOfDataclasses(Net):
    def kept(self, length: int) -> Tensor:
        if not ENTRIES:
            ENTRIES.append(Entry(ramp(length), [length]))
        return ENTRIES[0].tensor


WEAK: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()


class WeakKeys(Net):
    def kept(self, length: int) -> Tensor:
        if self not in WEAK:
            WEAK[self] = ramp(length)
        return WEAK[self]


LOCAL = threading.local()


class ThreadLocal(Net):
    def kept(self, length: int) -> Tensor:
        if not hasattr(LOCAL, "table"):
            LOCAL.table = ramp(length)
        tensor: Tensor = LOCAL.table
        return tensor


VARIABLE: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("VARIABLE", default=None)


class ContextVariable(Net):
    def kept(self, length: int) -> Tensor:
        table = VARIABLE.get()
        if table is None:
            table = ramp(length)
            VARIABLE.set(table)
        return table


class Rope(nn.Module):
    """Belongs to no model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, length: int) -> Tensor:
        if self.table is None:
            self.table = ramp(length)
        tensor: Tensor = self.table
        return tensor


ROPE = Rope()


class GlobalModule(Net):
    def kept(self, length: int) -> Tensor:
        tensor: Tensor = ROPE(length)
        return tensor


class InAList(Net):
    """A module in a plain list, where PyTorch does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [Rope()]

    def kept(self, length: int) -> Tensor:
        tensor: Tensor = self.others[0](length)
        return tensor


STATE = SimpleNamespace(steps=0, table=None)
NUMBERS = itertools.count()
LOG: list[int] = []


class Counters(Net):
    def kept(self, length: int) -> Tensor:
        STATE.steps += 1
        LOG.append(next(NUMBERS))
        if STATE.table is None:
            STATE.table = ramp(length)
        tensor: Tensor = STATE.table
        return tensor


class OnParameter(Net):
    def kept(self, length: int) -> Tensor:
        weight: Any = self.blocks[0][0].weight
        if not hasattr(weight, "table"):
            weight.table = ramp(length)
        tensor: Tensor = weight.table
        return tensor


class Evil:
    """Odd in every way that a program may ask an object about."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not to be asked")


class OddObjects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.odd = [Evil(), weakref.proxy(self), weakref.ref(self)]
        self.table: dict[str, Any] = {"evil": Evil()}

    def kept(self, length: int) -> Tensor:
        if "table" not in self.table:
            self.table["table"] = ramp(length)
        tensor: Tensor = self.table["table"]
        return tensor


def hidden() -> dict[str, Any]:
    """Globals under names that no code of the nets below shows."""
    return globals()


HIDDEN_DICT: dict[int, Tensor] = {}
HIDDEN_NAME = None


class HiddenDict(Net):
    def kept(self, length: int) -> Tensor:
        tensor: Tensor = hidden()["HIDDEN" + "_DICT"].setdefault(length, ramp(length))
        return tensor


class HiddenName(Net):
    def kept(self, length: int) -> Tensor:
        name = "HIDDEN" + "_NAME"
        if hidden()[name] is None:
            hidden()[name] = ramp(length)
        tensor: Tensor = hidden()[name]
        return tensor


KINDS = [
    LruCache, Cache, CachedMethod, GlobalDict, NestedDict, GlobalFlag, Unbound, ClassAttribute, HelperClass,
    Closure, DefaultArgument, FunctionAttribute, CachedProperty, Slots, ListOfDataclasses, WeakKeys,
    ThreadLocal, ContextVariable, GlobalModule, InAList, Counters, OnParameter, OddObjects,
]  # fmt: skip
"""Nets that are restored from an image. Nobody but the nets below fills what these fill."""

SEARCHED = [
    LruCache, Cache, CachedMethod, GlobalDict, NestedDict, ClassAttribute, DefaultArgument, FunctionAttribute,
    CachedProperty, ListOfDataclasses, WeakKeys, HiddenDict,
]  # fmt: skip
"""Nets whose leftovers can be removed without an image."""
