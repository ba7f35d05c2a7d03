# SPDX-License-Identifier: Apache-2.0
"""Goals of the project, and a check of rows against them.

Full sizes on a card: the registry's figures, and the resident one within 1.10 of the step time of plain BF16.
Reduced sizes: shares of plain FP32, and the resident one within 1.5 of its step time. Every peer that ran is
to be beaten in memory and time at once; the sweep is to take 85 % off the median point.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from memscale.benchmarks.registry import BENCHMARK_MODELS
from memscale.benchmarks.rows import Row, taken_bytes
from memscale.benchmarks.table import beaten, not_finite, reductions
from memscale.benchmarks.ways import is_ours

__all__ = ["goals"]

SHARES: Final = {"resident": 0.30, "smallest": 0.20}
MOST_OF_PLAIN_TIME: Final = 1.5
MOST_OF_BF16_TIME: Final = 1.10
SWEEP_MEDIAN: Final = 0.85


def goals(rows: Sequence[Row], scale: str) -> list[str]:
    """A line for each goal that these rows say something about; none at tiny sizes."""
    if scale == "tiny":
        return []
    return [*_registry(rows, scale), *_peers(rows), *_sweep(rows)]


def _registry(rows: Sequence[Row], scale: str) -> Iterator[str]:
    for way, share in SHARES.items():
        mine = [row for row in rows if row["suite"] == "registry" and row["way"] == way]
        missed = [f"{row['model']} ({why})" for row in mine if (why := _missed(row, scale))]
        if mine:
            what = f"≤ {share:.0%} of the plain peak" if scale == "reduced" else "≤ the registry's bytes"
            if way == "resident":
                time = (
                    f"{MOST_OF_PLAIN_TIME} × plain" if scale == "reduced" else f"{MOST_OF_BF16_TIME} × BF16"
                )
                what += f", step time ≤ {time}"
            yield _line(f"{way}: {what}", len(mine), missed)


def _missed(row: Row, scale: str) -> str:
    """Why a row misses its goal; "" if it does not."""
    if row["status"] != "ok":
        return str(row["status"])
    if not_finite(row):
        return "losses not finite"
    found = []
    memory, time = row["of_plain_memory"], row["of_plain_time" if scale == "reduced" else "of_bf16_time"]
    most = MOST_OF_PLAIN_TIME if scale == "reduced" else MOST_OF_BF16_TIME
    if scale == "full":
        model = next(model for model in BENCHMARK_MODELS if model.name == row["model"])
        most_bytes = model.resident_bytes if row["way"] == "resident" else model.smallest_bytes
        if taken_bytes(row) > most_bytes:
            found.append(f"{taken_bytes(row) / 1e9:.2f} GB")
    elif memory is None:
        return "no plain run"
    elif memory > SHARES[row["way"]]:
        found.append(f"{memory:.1%} of the peak")
    if row["way"] == "resident" and time is None:
        found.append("no plain run to compare its time with")
    elif row["way"] == "resident" and time > most:
        found.append(f"{time:.2f} of the time")
    return " at ".join(found)


def _peers(rows: Sequence[Row]) -> Iterator[str]:
    theirs = [
        row for row in rows if row["suite"] == "peers" and row["status"] == "ok" and not is_ours(row["way"])
    ]
    missed = [f"{row['way']} on {row['model']}" for row in theirs if not beaten(row, rows)]
    if theirs:
        yield _line("every peer: less memory and less time at once", len(theirs), missed)


def _sweep(rows: Sequence[Row]) -> Iterator[str]:
    found = [0.0 if not_finite(ours) else gone for _, ours, gone in reductions(rows)]
    # A point that MemScale failed at is one that it saved nothing at.
    ours = [row for row in rows if row["suite"] == "sweep" and is_ours(row["way"])]
    found += [0.0 for row in ours if row["status"] not in ("ok", "skipped")]
    if found:
        median = statistics.median(found)
        missed = [] if median >= SWEEP_MEDIAN else [f"{median:.1%}"]
        yield _line(f"sweep: median reduction ≥ {SWEEP_MEDIAN:.0%}", 1, missed)


def _line(what: str, count: int, missed: Sequence[str]) -> str:
    words = f"met {count - len(missed)} of {count}"
    return f"{what}: {words}" + (f"; not: {', '.join(missed)}" if missed else "")
