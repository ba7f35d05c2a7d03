# SPDX-License-Identifier: Apache-2.0
"""One subject of `library_memory.py`, in a process of its own with `watch_malloc.c` before the allocator.

    LD_PRELOAD=.../watch_malloc.so python library_memory_run.py NAME THREADS BUDGET

prints one JSON object: a `Row`'s fields, or `{"failed": ...}`. NAME is one of `OPERATORS` or a workload of
`truth_workloads.py`. BUDGET, bytes: of the plan; 0: so large that the step stays plain.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import print_rows
from scratch_case import BF16, FP32, leaf, module_case, through
from torch import nn

OWNERS = ("tensors", "libraries", "code", "objects", "own")
"""In the order of `enum owner` in watch_malloc.c."""

_AMPLE = 1 << 44


@dataclass
class Row:
    """What a process had at once while a subject ran, bytes.

    Attributes:
        subject: an operator or a workload.
        threads: of PyTorch.
        budget_bytes: of the plan; 0 for a plain step.
        predicted_bytes: peak of tensors and engines by the plan; 0 for an operator.
        tensor_bytes: highest sum of tensors.
        own_bytes: the same of MemScale's engines.
        library_bytes: the same of what MKL, oneDNN and OpenMP asked for.
        code_bytes: the same of what oneDNN reserved for the code that it generates.
        touched_bytes: of the libraries' and the code, what was written to in the end, in whole pages.
        mkl_bytes: MKL's own account of its buffers in the end; -1 where PyTorch has no MKL.
        again_bytes: by how much libraries and code grow if an operator runs once more; -1 for a model.
        object_bytes: highest sum of C++ objects of PyTorch, beyond those of `import torch`.
    """

    subject: str
    threads: int
    budget_bytes: int
    predicted_bytes: int
    tensor_bytes: int
    own_bytes: int
    library_bytes: int
    code_bytes: int
    touched_bytes: int
    mkl_bytes: int
    again_bytes: int
    object_bytes: int


class _Totals(ctypes.Structure):
    _fields_ = (("live", ctypes.c_int64 * 5), ("peak", ctypes.c_int64 * 5), ("together", ctypes.c_int64))


class Watch:
    """What is allocated in this process, by owner.

    Raises:
        AttributeError: watch_malloc.so was not preloaded.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.watch_touched.restype = ctypes.c_uint64

    def live(self) -> dict[str, int]:
        """Bytes that are allocated now."""
        return self._read("live")

    def peak(self) -> dict[str, int]:
        """Most bytes since the last `reset`."""
        return self._read("peak")

    def _read(self, which: str) -> dict[str, int]:
        totals = _Totals()
        self._library.watch_read(ctypes.byref(totals))
        return dict(zip(OWNERS, getattr(totals, which), strict=True))

    def reset(self) -> None:
        """Peaks begin with what is there now."""
        self._library.watch_reset()

    def touched(self, *owners: str) -> int:
        """Bytes of live blocks that lie in memory."""
        return sum(self._library.watch_touched(OWNERS.index(owner)) for owner in owners)


def mkl_bytes() -> int:
    """What MKL says that it holds, buffers between calls included; -1: PyTorch has no MKL."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        ask = ctypes.CDLL(str(path)).mkl_serv_mem_stat
    except (OSError, AttributeError):
        return -1
    ask.restype = ctypes.c_int64
    return int(ask(ctypes.byref(ctypes.c_int())))


# ---- subjects ----------------------------------------------------------------------------------------------


def _linear(size: int, dtype: torch.dtype) -> Callable[[], object]:
    return module_case(nn.Linear(size, size), leaf(size, size, dtype=dtype), dtype=dtype)


def _batched(count: int, size: int, dtype: torch.dtype) -> Callable[[], object]:
    first, second = (leaf(count, size, size, dtype=dtype) for _ in range(2))
    return through(lambda: torch.bmm(first, second))


def _attention(dtype: torch.dtype) -> Callable[[], object]:
    query, key, value = (leaf(4, 8, 512, 64, dtype=dtype) for _ in range(3))
    attend = nn.functional.scaled_dot_product_attention
    return through(lambda: attend(query, key, value, is_causal=True))


def _of(module: Callable[[], nn.Module], *shape: int) -> Callable[[torch.dtype], Callable[[], object]]:
    return lambda dtype: module_case(module(), leaf(*shape, dtype=dtype), dtype=dtype)


def _embedding() -> Callable[[], object]:
    return module_case(nn.Embedding(5000, 512), torch.randint(0, 5000, (8, 512)))


_BOTH: dict[str, Callable[[torch.dtype], Callable[[], object]]] = {
    "linear 16": functools.partial(_linear, 16),
    "linear 64": functools.partial(_linear, 64),
    "linear 512": functools.partial(_linear, 512),
    "linear 2048": functools.partial(_linear, 2048),
    "bmm 32x64": functools.partial(_batched, 32, 64),
    "bmm 8x512": functools.partial(_batched, 8, 512),
    "attention": _attention,
    "conv1d": _of(lambda: nn.Conv1d(64, 64, 5), 8, 64, 512),
    "conv2d small": _of(lambda: nn.Conv2d(8, 8, 3), 2, 8, 16, 16),
    "conv2d": _of(lambda: nn.Conv2d(64, 128, 3), 8, 64, 64, 64),
    "conv2d 1x1": _of(lambda: nn.Conv2d(64, 128, 1), 8, 64, 64, 64),
    "conv2d grouped": _of(lambda: nn.Conv2d(64, 128, 3, groups=8), 8, 64, 64, 64),
    "conv2d depthwise": _of(lambda: nn.Conv2d(64, 64, 3, groups=64), 8, 64, 64, 64),
    "conv2d transposed": _of(lambda: nn.ConvTranspose2d(64, 32, 4, 2), 4, 64, 32, 32),
    "conv3d": _of(lambda: nn.Conv3d(16, 32, 3), 2, 16, 16, 32, 32),
    "lstm": _of(lambda: nn.LSTM(256, 256, 2, batch_first=True), 16, 64, 256),
    "gru": _of(lambda: nn.GRU(256, 256, 2, batch_first=True), 16, 64, 256),
    "layer norm": _of(lambda: nn.LayerNorm(1024), 64, 128, 1024),
    "batch norm": _of(lambda: nn.BatchNorm2d(64), 8, 64, 64, 64),
    "gelu": _of(nn.GELU, 64, 128, 1024),
}

OPERATORS: dict[str, Callable[[], Callable[[], object]]] = {
    **{
        f"{name} {word}": functools.partial(make, dtype)
        for name, make in _BOTH.items()
        for word, dtype in (("fp32", FP32), ("bf16", BF16))
    },
    "embedding": _embedding,
}
"""Forward and backward of one operator: what makes it ready, and with that what runs it."""


def _training(name: str, budget: int, seen: list[Any]) -> Callable[[], object]:
    """Two steps of a workload, which is built in them; the plans are added to `seen`."""
    from truth_run import settings, train  # transformers comes with it, and operators do without
    from truth_workloads import WORKLOADS

    config = settings(budget or _AMPLE)

    def run() -> None:
        seen.extend(planned.plan for planned in train(WORKLOADS[name], config))

    return run


# ---- one row -----------------------------------------------------------------------------------------------


def row(name: str, threads: int, budget: int) -> Row:
    """Measures one subject."""
    torch.set_num_threads(threads)
    watch, seen = Watch(), []
    run = OPERATORS[name]() if name in OPERATORS else _training(name, budget, seen)
    before, untouched = watch.live(), watch.touched("libraries", "code")
    watch.reset()
    run()
    peak, after = watch.peak(), watch.live()
    touched, mkl = watch.touched("libraries", "code") - untouched, mkl_bytes()
    again = -1
    if name in OPERATORS:
        run()
        again = sum(watch.live()[owner] - after[owner] for owner in ("libraries", "code"))
    most = {owner: peak[owner] - before[owner] for owner in OWNERS}
    return Row(
        subject=name,
        threads=threads,
        budget_bytes=budget,
        predicted_bytes=max((plan.predicted.device_used_peak_bytes for plan in seen), default=0),
        tensor_bytes=most["tensors"],
        own_bytes=most["own"],
        library_bytes=most["libraries"],
        code_bytes=most["code"],
        touched_bytes=touched,
        mkl_bytes=mkl,
        again_bytes=again,
        object_bytes=most["objects"],
    )


def main() -> None:
    """Measures the subject that is named."""
    name, threads, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def made() -> list[dict[str, Any]]:
        return [asdict(row(name, threads, budget))]

    print_rows(made)


if __name__ == "__main__":
    main()
