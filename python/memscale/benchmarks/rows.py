# SPDX-License-Identifier: Apache-2.0
"""Rows: what was measured, beside what it is compared with. Written as they come, as CSV and as JSON.

The CSV file only ever grows, a row at a time, flushed to the disk. The JSON file has the same rows and what
does not fit into a cell: losses, and the bytes of a prediction by category. It is replaced whole, so that it
can be read at any moment.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from memscale.benchmarks.job import Job
from memscale.benchmarks.machine import PROVENANCE, provenance
from memscale.errors import MemScaleError

__all__ = ["COLUMNS", "Rows", "make_row", "reference_of"]

COLUMNS: Final = (
    *PROVENANCE, "suite", "model", "scale", "batch", "length", "precision", "way", "budget_bytes", "status",
    "reason", "allocated_bytes", "reserved_bytes", "outside_bytes", "start_bytes", "resident_bytes",
    "resident_base_bytes", "predicted_bytes", "predicted_reserved_bytes", "predicted_off_percent", "fits",
    "step_ms", "step_low_ms", "step_high_ms", "steps", "prepare_s", "of_plain_memory", "of_plain_time",
    "of_bf16_time", "loss_off_percent", "losses_equal", "gradients_equal", "exact", "techniques",
    "peer_version", "documentation",
)  # fmt: skip
"""Of the CSV file. `predicted_off_percent` is positive where more was predicted than measured; both
`of_plain` columns compare with plain FP32; losses and gradients with the plain run of the same precision.
`loss_off_percent` is the worst of all steps. Low and high are quartiles. "outside" is what a card says is in
use beyond the allocator: contexts, libraries. Empty: not known."""

_MEASURED: Final = (
    "allocated_bytes", "reserved_bytes", "outside_bytes", "start_bytes", "resident_bytes",
    "resident_base_bytes", "predicted_bytes", "predicted_reserved_bytes", "fits", "step_ms", "step_low_ms",
    "step_high_ms", "prepare_s", "exact",
)  # fmt: skip
_BESIDE: Final = ("losses", "gradients", "peak_categories", "smallest_bytes")
_KEY: Final = ("model", "scale", "batch", "length", "precision", "way")

Row = dict[str, Any]


def reference_of(rows: Iterable[Row], job: Job, precision: str) -> Row | None:
    """The plain run of the same work in a precision, if it was measured."""
    key = (*job.key[:4], precision, "plain-fp32" if precision == "fp32" else "plain-bf16")
    return next((row for row in rows if _key(row) == key and row["status"] == "ok"), None)


def make_row(job: Job, found: Mapping[str, Any], rows: Iterable[Row], **more: Any) -> Row:
    """The row of a result.

    Args:
        job: what was measured.
        found: the result.
        rows: what has been measured before.
        more: further columns.
    """
    rows = list(rows)
    row: Row = {
        **provenance(), "suite": job.suite, "model": job.model, "scale": job.scale, "batch": job.shape.batch,
        "length": job.shape.length, "precision": job.precision, "way": job.way,
        "budget_bytes": job.budget_bytes, "steps": job.steps - job.warm_up,
        "status": found["status"], "reason": found.get("reason", ""),
    }  # fmt: skip
    row.update({name: found.get(name) for name in _MEASURED})
    row.update({name: found[name] for name in _BESIDE if name in found})
    row["techniques"] = " ".join(found.get("techniques", ()))
    row["shape"] = job.shape.to_dict()
    plain, bf16 = reference_of(rows, job, "fp32"), reference_of(rows, job, "bf16-amp")
    in_bf16 = job.precision == "bf16-amp" or "autocast" in found.get("techniques", ())
    same = bf16 if in_bf16 else plain
    if found.get("predicted_bytes") and found.get("allocated_bytes"):
        row["predicted_off_percent"] = 100 * (found["predicted_bytes"] / found["allocated_bytes"] - 1)
    row["of_plain_memory"] = _ratio(row, plain, "allocated_bytes")
    row["of_plain_time"] = _ratio(row, plain, "step_ms")
    row["of_bf16_time"] = _ratio(row, bf16, "step_ms")
    if same is not None and "losses" in found:
        pairs = list(zip(found["losses"], same["losses"], strict=False))
        row["loss_off_percent"] = 100 * max((abs(a / b - 1) for a, b in pairs if b), default=0.0)
        row["losses_equal"] = all(a == b for a, b in pairs)
        if found.get("gradients"):
            row["gradients_equal"] = found["gradients"] == same.get("gradients")
    return row | more


def _ratio(row: Row, other: Row | None, name: str) -> float | None:
    if other is None or not other.get(name) or not row.get(name):
        return None
    return float(row[name] / other[name])


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in _KEY)


class Rows:
    """The rows of a run, on the disk as soon as they are there.

    Args:
        csv_path: rows are appended; a file with other columns is refused.
        json_path: replaced at every row.
        resume: begin with the rows of `json_path`, if it is there.

    Raises:
        MemScaleError: `csv_path` has other columns.
    """

    def __init__(self, csv_path: Path, json_path: Path, resume: bool = False) -> None:
        self.csv_path, self.json_path = csv_path, json_path
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {}
        for path in (csv_path, json_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if resume and json_path.exists():
            self.rows = list(json.loads(json_path.read_text(encoding="utf-8"))["rows"])
        if not csv_path.exists():
            with csv_path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
        with csv_path.open(newline="", encoding="utf-8") as file:
            if tuple(next(csv.reader(file), ())) != COLUMNS:
                raise MemScaleError(f"{csv_path} has other columns than these benchmarks write: move it away")

    def has(self, job: Job) -> bool:
        """Whether a good row for this job is there already."""
        return any(
            _key(row) == job.key and row["suite"] == job.suite and row["status"] in ("ok", "skipped")
            for row in self.rows
        )

    def add(self, row: Row) -> None:
        """Adds a row, here and on the disk. A failure that it takes the place of stays in the CSV file."""
        same = (row["suite"], *_key(row))
        self.rows[:] = [
            old for old in self.rows if old["status"] == "ok" or (old["suite"], *_key(old)) != same
        ]
        self.rows.append(row)
        with self.csv_path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([_text(row.get(name)) for name in COLUMNS])
            file.flush()
            os.fsync(file.fileno())
        self.save()

    def save(self, **about: Any) -> None:
        """Writes the JSON file; `about` says more about the run as a whole."""
        self.about.update(about)
        beside = self.json_path.with_name(self.json_path.name + ".new")
        beside.write_text(json.dumps(self.document(), indent=1), encoding="utf-8")
        os.replace(beside, self.json_path)

    def document(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {"format": "memscale-benchmarks", "version": 1, **self.about, "rows": self.rows}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
