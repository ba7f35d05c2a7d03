# SPDX-License-Identifier: Apache-2.0
"""GB/s of a fingerprint, by size: whole, sampled, of rows with gaps; beside PyTorch's sum of the same bytes.

Every size is read in turn by each way, round by round, so that a busy machine slows all of them. A way's time
is the shortest of the rounds; where a call is short, a round makes as many as take a millisecond. A tensor of
8 bytes shows what a call costs.

    sum       `tensor.view(torch.int64).sum()`, which reads the same bytes and does next to nothing with them
    whole     every byte
    sampled   1/16 of what is above 64 KiB; GB/s are of the whole tensor
    gaps      rows of 3 KiB in rows of 4, which are gathered on the way
    ratio     time of sum over that of whole

Usage: python bench/python/fingerprint.py [--threads 1 2] [--rounds 15] [--dry]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Table, parser
from torch import Tensor

from memscale._core import fingerprint

SIZES = [8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
ROUND_S = 1e-3


def ways(size: int) -> dict[str, Callable[[], object]]:
    """What reads a tensor of so many bytes; rows with gaps only where there are some."""
    whole = torch.arange(size // 8)
    made: dict[str, Callable[[], object]] = {
        "sum": lambda: whole.view(torch.int64).sum(),
        "whole": lambda: fingerprint(whole),
        "sampled": lambda: fingerprint(whole, True),
    }
    if size >= 4 << 10:
        rows: Tensor = torch.arange(size // 8 * 4 // 3 // 512 * 512 + 512).view(-1, 512)[: size // 3072, :384]
        made["gaps"] = lambda: fingerprint(rows)
    return made


def seconds(work: Callable[[], object], calls: int) -> float:
    """Time of one call, of so many."""
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def measure(size: int, rounds: int) -> dict[str, float]:
    """Shortest seconds of each way."""
    every = ways(size)
    calls = {name: max(1, int(ROUND_S / seconds(way, 3))) for name, way in every.items()}
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, way in every.items():
            times[name].append(seconds(way, calls[name]))
    return {name: min(taken) for name, taken in times.items()}


def main() -> None:
    """Measures, and writes a row per size and number of threads."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    columns = ("threads", "bytes", "whole_us", "whole_gb_s", "sampled_gb_s", "gaps_gb_s", "sum_gb_s", "ratio")
    table = Table("fingerprint", columns, options.dry)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for size in SIZES:
            best = measure(size, options.rounds)
            speed = {name: size / taken / 1e9 for name, taken in best.items()}
            gaps = speed.get("gaps", 0.0) * (size // 3072 * 3072 / size)
            table.add(
                threads,
                size,
                best["whole"] * 1e6,
                speed["whole"],
                speed["sampled"],
                gaps,
                speed["sum"],
                best["sum"] / best["whole"],
            )


if __name__ == "__main__":
    main()
