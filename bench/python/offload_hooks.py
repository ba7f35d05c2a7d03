# SPDX-License-Identifier: Apache-2.0
"""What the offload engine's hooks cost: one save and one unpack, beside hooks in Python, in one run.

A chain of multiplications saves two tensors each. The same chain is run without hooks, with hooks that are
the identity in Python, and with the engine's: where all it does is decide (tensors below the least size
stay), and where it moves every storage. Times are those of the calling thread (the copies are the work of
other threads), medians over rounds in which the kinds take turns. What PyTorch itself takes for hooks is in
all of them; the identity in Python is the least that a hook in Python costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import Table, median, parser
from torch import Tensor

from memscale.offload.engine import Offload, OffloadSettings

COLUMNS = ("hooks", "save_ns", "unpack_ns", "save_beyond_python_ns", "unpack_beyond_python_ns", "rounds")

SAVES = 200
"""Multiplications in a chain: the engine's window is larger than all of them, so no copy is waited for."""

ELEMENTS = 512
"""2 KiB a tensor: the copies themselves, which other threads do, must not be what is measured."""

WARM_ROUNDS = 3

Context = Callable[[], AbstractContextManager[Any]]


def chain(x: Tensor) -> Tensor:
    """`SAVES` products, each of which saves its two factors, one of them new."""
    y = x
    for _ in range(SAVES):
        y = y * x
    return y


def python_identity(value: Any) -> Any:
    """A hook that does nothing."""
    return value


def timed(context: Context, x: Tensor) -> tuple[float, float]:
    """Seconds of this thread in forward and in backward."""
    began = time.thread_time()
    with context():
        y = chain(x)
    middle = time.thread_time()
    torch.autograd.grad(y.sum(), x)
    return middle - began, time.thread_time() - middle


def main() -> None:
    """Measures every kind of hooks."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15, help="chains of each kind that count (15)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    room = {"host_bytes": 256 << 20, "window_bytes": 128 << 20}
    moving = Offload(OffloadSettings(torch.device("cpu"), least_bytes=1, **room))
    keeping = Offload(OffloadSettings(torch.device("cpu"), least_bytes=1 << 30, **room))
    identity = torch.autograd.graph.saved_tensors_hooks
    kinds: dict[str, Context] = {
        "none": nullcontext,
        "identity in Python": lambda: identity(python_identity, python_identity),
        "engine, stays": lambda: identity(keeping.engine.pack, keeping.engine.unpack),
        "engine, leaves": lambda: identity(moving.engine.pack, moving.engine.unpack),
    }
    x = torch.rand(ELEMENTS, requires_grad=True)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(arguments.rounds + WARM_ROUNDS):
        for kind, context in kinds.items():
            times = timed(context, x)
            if turn >= WARM_ROUNDS:
                seconds[kind].append(times)
    each = {
        kind: [1e9 * median(times) / (2 * SAVES) for times in zip(*rows, strict=True)]
        for kind, rows in seconds.items()
    }
    save, unpack = each["identity in Python"]
    table = Table("offload_hooks", COLUMNS, arguments.dry)
    for kind, (mine, back) in each.items():
        table.add(kind, mine, back, mine - save, back - unpack, arguments.rounds)


if __name__ == "__main__":
    main()
