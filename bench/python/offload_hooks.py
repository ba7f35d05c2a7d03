# SPDX-License-Identifier: Apache-2.0
"""What the offload engine's hooks cost: one save and one unpack, beside hooks that do nothing, in one run.

Two chains of operations, each of which saves one tensor. In one every save is on a storage of its own; in the
other all are on one storage, as a residual stream's are, so that the engine copies once and hands out views.
Each chain is run without hooks; with the identity as a builtin, which is what PyTorch itself takes for hooks
and the least that any hook costs; with the identity in Python; with PyTorch's own `detach` and `empty_like`,
which is the least that a hook costs that lets a tensor go and gives another back; and with the engine's:
where it only decides (tensors below the least size stay), and where everything leaves.

Times are those of the calling thread (the copies are the work of other threads), medians over rounds in which
the kinds take turns. They have in them what the hooks leave behind: objects to free, and Python's garbage
collector.

The last rows are no hooks: what the functions of PyTorch's library take that the hooks call for a storage of
its own, and that nothing can replace. A save makes a tensor that keeps the source until its copy is complete;
an unpack makes one on new memory, since what was away has to be made.
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

BUILTIN, PYTHON, MAKES = "identity, builtin", "identity in Python", "detach and empty_like, builtins"

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


class Words(ctypes.Structure):
    """What a C++ function returns in memory of its caller."""

    _fields_ = (("words", ctypes.c_void_p * 4),)


class Library:
    """The functions of PyTorch's library that the hooks call, in the hooks' order.

    Each is there twice: as it is, and with the address of a function that does nothing. The second takes what
    the way from Python to C takes.

    Raises:
        AttributeError: this PyTorch has no such functions.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(torch._C.__file__)
        nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
        word, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

        def twice(name: str, result: Any, *arguments: Any) -> tuple[Any, Any]:
            kind = ctypes.PYFUNCTYPE(result, *arguments)
            found = getattr(ctypes.pythonapi if name.startswith("Py") else library, name)
            return kind(ctypes.cast(found, word).value or 0), kind(nothing)

        self._empty = twice(
            "aoti_torch_empty_strided", number, whole, word, word, number, number, number, word
        )
        self._part = twice("aoti_torch__reinterpret_tensor", number, word, whole, word, word, whole, word)
        self._new = twice("aoti_torch_new_uninitialized_tensor", number, word)
        self._delete = twice("aoti_torch_delete_tensor_object", number, word)
        self._alias = twice("_ZNK2at10TensorBase11tensor_dataEv", Words, word)
        self._wrap = twice("_Z16THPVariable_WrapRKN2at10TensorBaseE", word, word)
        self._release = twice("Py_DecRef", None, word)
        self._tensor = torch.zeros(ELEMENTS)
        self._handle = word(self._tensor._cdata)
        self._sizes, self._strides = (whole * 1)(ELEMENTS), (whole * 1)(1)
        self._spare = (word * 4)()
        self._cells = word(), word(ctypes.addressof(self._spare))

    def alias(self, which: int) -> None:
        """A save: a tensor on the same memory is made, and let go."""
        cell = self._cells[which]
        self._new[which](ctypes.byref(cell))
        made = self._alias[which](ctypes.byref(self._handle))
        ctypes.c_void_p.from_address(cell.value or 0).value = made.words[0]
        self._delete[which](cell)

    def on_memory(self, which: int) -> None:
        """An unpack on memory that is there."""
        cell = self._cells[which]
        whole = ctypes.byref(self._handle)
        self._part[which](whole, 1, self._sizes, self._strides, 0, ctypes.byref(cell))
        self._show(which)

    def with_memory(self, which: int) -> None:
        """An unpack on memory of its own."""
        cell = self._cells[which]
        self._empty[which](1, self._sizes, self._strides, 6, 0, 0, ctypes.byref(cell))
        self._show(which)

    def _show(self, which: int) -> None:
        cell = self._cells[which]
        tensor = self._wrap[which](cell)
        self._delete[which](cell)
        self._release[which](tensor)


def cost_ns(call: Callable[[int], None], times: int = 2000) -> float:
    """Nanoseconds of this thread in one call's own functions."""
    spans = []
    for which in (0, 1):
        began = time.thread_time_ns()
        for _ in range(times):
            call(which)
        spans.append((time.thread_time_ns() - began) / times)
    return spans[0] - spans[1]


def own_rows(rounds: int) -> list[tuple[str, str, float | str, float | str]]:
    """Storages, name, save and unpack of what PyTorch itself takes; none where the hooks do not call it."""
    try:
        library = Library()
    except AttributeError:
        return []
    costs = [
        median([cost_ns(call) for _ in range(rounds)])
        for call in (library.on_memory, library.alias, library.with_memory)
    ]
    return [("one", "PyTorch's part", "", costs[0]), ("own", "PyTorch's part", costs[1], costs[2])]


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
        MAKES: lambda: hooks(Tensor.detach, torch.empty_like),
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
    for row in own_rows(arguments.rounds):
        table.add(*row, "", "", "", "", arguments.rounds)


if __name__ == "__main__":
    main()
