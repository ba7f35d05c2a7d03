# SPDX-License-Identifier: Apache-2.0
"""Rows: measurements and what they are compared with, written one by one as CSV and JSON.

The CSV file only ever grows, a row at a time, flushed to the disk. The JSON file has the same rows and what
does not fit into a cell: losses, and the bytes of a prediction by category. It is replaced whole, so that it
can be read at any moment.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from memscale.benchmarks.job import Job
from memscale.benchmarks.machine import PROVENANCE, provenance
from memscale.errors import MemScaleError

__all__ = ["COLUMNS", "Rows", "make_row", "reference_of", "result_of", "taken_bytes"]

COLUMNS: Final = (
    *PROVENANCE, "suite", "model", "scale", "device", "batch", "length", "precision", "way", "total_steps",
    "budget_bytes", "status",
    "reason", "allocated_bytes", "engine_bytes", "reserved_bytes", "outside_bytes", "start_bytes",
    "resident_bytes", "resident_base_bytes", "predicted_bytes", "predicted_reserved_bytes",
    "predicted_off_percent", "fits",
    "step_ms", "step_low_ms", "step_high_ms", "steps", "prepare_s", "of_plain_memory", "of_plain_time",
    "of_bf16_time", "loss_off_percent", "losses_equal", "gradients_equal", "exact", "techniques",
    "peer_version", "documentation",
)  # fmt: skip
"""Of the CSV file. `predicted_off_percent` is positive where more was predicted than measured; both
`of_plain` columns compare with plain FP32; losses and gradients with the plain run of the same precision.
`loss_off_percent` is the worst of all steps, "inf" where one is not finite. `engine_bytes` is host memory of
the offload engine; on a CPU host `of_plain_memory` has it too. `steps` is `total_steps` less the warm-up. Low
and high are quartiles. "outside" is what a card says is in use beyond the allocator: contexts, libraries.
Empty: not known."""

_MEASURED: Final = (
    "allocated_bytes", "engine_bytes", "reserved_bytes", "outside_bytes", "start_bytes", "resident_bytes",
    "resident_base_bytes", "predicted_bytes", "predicted_reserved_bytes", "fits", "step_ms", "step_low_ms",
    "step_high_ms", "prepare_s", "exact",
)  # fmt: skip
_BESIDE: Final = ("losses", "gradients", "peak_categories", "smallest_bytes")
_WORK: Final = ("model", "scale", "batch", "length", "precision", "way", "device", "total_steps")
_KEY: Final = (*_WORK, "budget_bytes")

Row = dict[str, Any]


def reference_of(rows: Iterable[Row], job: Job, precision: str) -> Row | None:
    """The plain run of the same work in a precision, if it was measured."""
    way = "plain-fp32" if precision == "fp32" else "plain-bf16"
    wanted = (*job.key[:4], precision, way, job.device)
    found = (row for row in rows if row["status"] == "ok" and _here(row))
    return next((row for row in found if _key(row)[:7] == wanted), None)  # of however many steps


def result_of(rows: Iterable[Row], job: Job) -> Row | None:
    """What a job gave on this machine, good or not."""
    mine = (row for row in rows if row["suite"] == job.suite and _here(row))
    return next((row for row in mine if _key(row) == job.key), None)


def taken_bytes(row: Row) -> int:
    """What is compared: tensors, and on a CPU host what the engine has in the same memory."""
    beside: int = row.get("engine_bytes") or 0
    peak: int = row["allocated_bytes"]
    return peak + beside if row.get("device") == "cpu" else peak


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
        "length": job.shape.length, "device": job.device, "precision": job.precision, "way": job.way,
        "total_steps": job.steps, "budget_bytes": job.budget_bytes, "steps": job.steps - job.warm_up,
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
        row["predicted_off_percent"] = 100 * (found["predicted_bytes"] / taken_bytes(row) - 1)
    if plain is not None and plain.get("allocated_bytes") and row.get("allocated_bytes"):
        row["of_plain_memory"] = taken_bytes(row) / taken_bytes(plain)
    else:
        row["of_plain_memory"] = None
    row["of_plain_time"] = _ratio(row, plain, "step_ms")
    row["of_bf16_time"] = _ratio(row, bf16, "step_ms")
    if not all(math.isfinite(loss) for loss in found.get("losses", ())):
        row["loss_off_percent"] = math.inf
    if same is not None and "losses" in found:
        pairs = list(zip(found["losses"], map(float, same["losses"]), strict=False))
        row.setdefault("loss_off_percent", _loss_off(pairs))
        row["losses_equal"] = all(a == b for a, b in pairs)
        if found.get("gradients"):
            row["gradients_equal"] = found["gradients"] == same.get("gradients")
    return row | more


def _loss_off(pairs: list[tuple[float, float]]) -> float:
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf  # max() would pass over "not a number"
    return 100 * max((abs(a / b - 1) for a, b in pairs if b), default=0.0)


def _ratio(row: Row, other: Row | None, name: str) -> float | None:
    if other is None or not other.get(name) or not row.get(name):
        return None
    return float(row[name] / other[name])


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in _KEY)


def _here(row: Row) -> bool:
    """Whether it was measured on this machine."""
    return bool(row.get("machine") == provenance()["machine"])


class Rows:
    """The rows of a run, on the disk as soon as they are there.

    Args:
        csv_path: rows are appended; a file with other columns is refused.
        json_path: replaced at every row. One of a run before is kept under another name.
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
        if not csv_path.exists():
            with csv_path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
        with csv_path.open(newline="", encoding="utf-8") as file:
            if tuple(next(csv.reader(file), ())) != COLUMNS:
                raise MemScaleError(f"{csv_path} has other columns than these benchmarks write: move it")
        if resume and json_path.exists():
            self.rows = list(json.loads(json_path.read_text(encoding="utf-8"))["rows"])
        elif json_path.exists():
            _keep(json_path)

    def has(self, job: Job) -> bool:
        """Whether a good row for this job is there already."""
        row = result_of(self.rows, job)
        return row is not None and row["status"] == "ok"

    def of(self, scale: str, device: str) -> list[Row]:
        """Those that may stand in one table: of these sizes, this device and this machine."""
        return [
            row for row in self.rows if row["scale"] == scale and row.get("device") == device and _here(row)
        ]

    def add(self, row: Row) -> None:
        """Adds a row, here and on the disk.

        What it takes the place of, such as a failure or another budget, stays in the CSV file.
        """
        work = ("suite", "machine", *_WORK)
        self.rows[:] = [old for old in self.rows if any(old.get(name) != row.get(name) for name in work)]
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
        beside.write_text(self.text(), encoding="utf-8")
        os.replace(beside, self.json_path)

    def document(self) -> dict[str, Any]:
        """All of it, as plain data: numbers that JSON does not have are text."""
        whole = {"format": "memscale-benchmarks", "version": 1, **self.about, "rows": self.rows}
        return {name: _plain(value) for name, value in whole.items()}

    def text(self) -> str:
        """The same as JSON."""
        return json.dumps(self.document(), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _keep(path: Path) -> None:
    """Gives a file of a run before another name."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(name for name in names if not name.exists()))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
