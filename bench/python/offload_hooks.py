# SPDX-License-Identifier: Apache-2.0
"""What the offload engine's hooks cost: one save and one unpack, beside hooks that do nothing, in one run.

Two chains of operations, each of which saves one tensor. In one every save is on a storage of its own; in the
other all are on one storage, as a residual stream's are, so that the engine copies once and hands out views.
Each chain is run without hooks; with the identity as a builtin, which is what PyTorch itself takes for hooks
and the least that any hook costs; with the identity in Python; and with the engine's: where it only decides
(tensors below the least size stay), and where everything leaves.

Times are those of the calling thread (the copies are the work of other threads), medians over rounds in which
the kinds take turns. They have in them what the hooks leave behind: objects to free, and Python's garbage
collector.

The last rows are no hooks: what PyTorch's own functions take, called from C, to make a tensor on memory that
is there, and to allocate the memory as well. A tensor that was away has to be made: no unpack is cheaper.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import Table, median, parser
from torch import Tensor

from memscale.offload.engine import Offload, OffloadSettings

COLUMNS = (
    "storages",
    "hooks",
    "save_ns",
    "unpack_ns",
    "save_beyond_builtin_ns",
    "unpack_beyond_builtin_ns",
    "save_beyond_python_ns",
    "unpack_beyond_python_ns",
    "rounds",
)

SAVES = 400
"""Operations in a chain: the engine's window is larger than all of them, so no copy is waited for."""

ELEMENTS = 512
"""2 KiB a tensor: the copies themselves, which other threads do, must not be what is measured."""

WARM_ROUNDS = 3

BUILTIN, PYTHON = "identity, builtin", "identity in Python"

Context = Callable[[], AbstractContextManager[Any]]


def own(x: Tensor) -> Tensor:
    """Each operation saves the result of the one before."""
    for _ in range(SAVES):
        x = x.sin()
    return x


def one(x: Tensor) -> Tensor:
    """Each operation saves the same tensor."""
    y = x
    total = x.exp()
    for _ in range(SAVES):
        total = total + y.sin()
    return total


def python_identity(value: Any) -> Any:
    """A hook that does nothing."""
    return value


def builtin_identity() -> Callable[[Any], Any]:
    """The same without Python code: what `typing` has for it, or a method that returns contiguous tensors."""
    try:
        found: Callable[[Any], Any] = importlib.import_module("_typing")._idfunc
    except (ImportError, AttributeError):
        found = Tensor.contiguous
    return found


def timed(context: Context, chain: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Nanoseconds of this thread in forward and in backward, per save."""
    began = time.thread_time_ns()
    with context():
        y = chain(x)
    middle = time.thread_time_ns()
    torch.autograd.grad(y.sum(), x)
    return (middle - began) / SAVES, (time.thread_time_ns() - middle) / SAVES


# ---- PyTorch's own functions -------------------------------------------------------------------------


class DLTensor(ctypes.Structure):
    """As in dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dim_count", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Making:
    """The functions of PyTorch's DLPack table that an unpack needs, called as in C but for the way there."""

    def __init__(self) -> None:
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype = ctypes.c_void_p
        pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
        capsule = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        table = pointer_of(capsule, b"dlpack_exchange_api")
        addresses = (ctypes.c_void_p * 5).from_address(table + 16)
        word = ctypes.c_void_p
        allocate, from_object, to_object, _, stream = (address or 0 for address in addresses)
        self._allocate = ctypes.PYFUNCTYPE(ctypes.c_int, word, word, word, word)(allocate)
        self._from_object = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, word)(from_object)
        self._to_object = ctypes.PYFUNCTYPE(ctypes.c_int, word, word)(to_object)
        self._nothing = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, word)(stream)
        release = ctypes.cast(ctypes.pythonapi.Py_DecRef, word).value or 0
        self._release = ctypes.PYFUNCTYPE(None, word)(release)
        self._sizes = (ctypes.c_int64 * 2)(4 * ELEMENTS, 1)
        sizes = ctypes.cast(self._sizes, ctypes.POINTER(ctypes.c_int64))
        byte = (ctypes.c_uint8 * 4)(1, 8, 1, 0)
        self._prototype = DLTensor(None, (ctypes.c_int32 * 2)(1, 0), 1, byte, sizes, sizes, 0)
        self._tensor = torch.zeros(ELEMENTS)
        self._managed = word()
        self._object = word()

    def three_calls(self) -> None:
        """What the way there costs: a function that does next to nothing, three times."""
        where = ctypes.byref(self._object)
        self._nothing(1, 0, where)
        self._nothing(1, 0, where)
        self._nothing(1, 0, where)

    def on_memory(self) -> None:
        """A tensor on another's memory."""
        self._from_object(self._tensor, ctypes.byref(self._managed))
        self._to_object(self._managed, ctypes.byref(self._object))
        self._release(self._object)

    def with_memory(self) -> None:
        """A tensor on memory of its own."""
        self._allocate(ctypes.byref(self._prototype), ctypes.byref(self._managed), None, None)
        self._to_object(self._managed, ctypes.byref(self._object))
        self._release(self._object)


def cost_ns(call: Callable[[], None], times: int = 2000) -> float:
    """Nanoseconds of this thread in one call."""
    began = time.thread_time_ns()
    for _ in range(times):
        call()
    return (time.thread_time_ns() - began) / times


# ---- the table ---------------------------------------------------------------------------------------


def measured(
    kinds: dict[str, Context], chain: Callable[[Tensor], Tensor], rounds: int
) -> dict[str, list[float]]:
    """Median nanoseconds of a save and of an unpack, by kind."""
    x = torch.rand(ELEMENTS, requires_grad=True)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(rounds + WARM_ROUNDS):
        for kind, context in kinds.items():
            pair = timed(context, chain, x)
            if turn >= WARM_ROUNDS:
                times[kind].append(pair)
    return {kind: [median(column) for column in zip(*rows, strict=True)] for kind, rows in times.items()}


def main() -> None:
    """Measures every kind of hooks."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=25, help="chains of each kind that count (25)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    room = {"host_bytes": 256 << 20, "window_bytes": 128 << 20}
    moving = Offload(OffloadSettings(torch.device("cpu"), least_bytes=1, **room))
    keeping = Offload(OffloadSettings(torch.device("cpu"), least_bytes=1 << 30, **room))
    identity = builtin_identity()
    hooks = torch.autograd.graph.saved_tensors_hooks
    kinds: dict[str, Context] = {
        "none": nullcontext,
        BUILTIN: lambda: hooks(identity, identity),
        PYTHON: lambda: hooks(python_identity, python_identity),
        "engine, stays": keeping.hooks,
        "engine, leaves": moving.hooks,
    }
    table = Table("offload_hooks", COLUMNS, arguments.dry)
    for name, chain in {"own": own, "one": one}.items():
        each = measured(kinds, chain, arguments.rounds)
        for kind, times in each.items():
            builtin, python = (
                [mine - its for mine, its in zip(times, each[base], strict=True)]
                for base in (BUILTIN, PYTHON)
            )
            table.add(name, kind, *times, *builtin, *python, arguments.rounds)
    if hasattr(Tensor, "__dlpack_c_exchange_api__"):
        making = Making()
        for name, call in (("one", making.on_memory), ("own", making.with_memory)):
            costs = [cost_ns(call) - cost_ns(making.three_calls) for _ in range(arguments.rounds)]
            table.add(name, "none: a tensor made", "", median(costs), "", "", "", "", arguments.rounds)


if __name__ == "__main__":
    main()
