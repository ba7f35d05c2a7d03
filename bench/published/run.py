#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicted against published: figures that others measured on their cards, predicted here without one.

Set "liger": peaks of single operators with forward and backward, as plain PyTorch programs. A prediction
counts as exact if it is the published number at the precision that it was published with (float32, MiB).
Set "runs": peaks of whole training runs, rebuilt with random weights, in the terms of their source
(allocated, reserved or device-used; GB, GiB or MiB).

Rows are listed by name whether they are predicted or not, and why not. --on cuda runs the very same
programs on the present card instead of predicting them: that tells a wrong program from a wrong prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import torch  # noqa: E402
from common import Table, median  # noqa: E402
from liger_programs import INFERRED, OpRow, program_of  # noqa: E402
from liger_programs import reason_against as reason_against_op  # noqa: E402
from predicting import measured, predicted  # noqa: E402
from recipes import reason_against, recipe_of  # noqa: E402
from trace_program import CudaMeter, trace_program  # noqa: E402

from memscale.hardware.target import Target  # noqa: E402
from memscale.observability.tensor_peak import quiet  # noqa: E402

MEASUREMENTS = HERE / "measurements.csv"
CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "3090": (8, 6), "4090": (8, 9)}
QUICK_LIMIT = 2**31
"""Bytes of a published peak up to which --quick predicts a row of the set "liger"."""

MISS_PCT = 5.0
"""Error above which a row is a miss that needs its reason."""

COLUMNS = ("set", "row", "unit", "published", "predicted", "error_pct", "exact", "remark")


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        set: of the measurements.
        row: names it: program or model, size, technique.
        unit: of both figures.
        published: what the source printed; None where it printed "out of memory".
        predicted: the same here; None for a row that cannot be expressed.
        exact: equal at the precision of the source.
        decision: of a row that was published as "out of memory": whether it is here too.
        partial: rebuilt without something that the run had; not counted.
        remark: why it cannot be expressed, what is left out, or what the table did not say.
    """

    set: str
    row: str
    unit: str
    published: float | None
    predicted: float | None = None
    exact: bool = False
    decision: bool | None = None
    partial: bool = False
    remark: str = ""

    @property
    def error_pct(self) -> float | None:
        """Signed, of the published figure."""
        if self.predicted is None or self.published is None:
            return None
        return (self.predicted / self.published - 1) * 100


def rows_of(name: str) -> list[dict[str, str]]:
    """Rows of the set "liger", or of all whole runs."""
    with MEASUREMENTS.open(newline="") as file:
        return [row for row in csv.DictReader(file) if (row["set"] == "liger_op") == (name == "liger")]


# ---- operators -----------------------------------------------------------------------------------------


def op_row(row: dict[str, str]) -> OpRow:
    """The row of an operator benchmark."""
    provider = row["technique"].split()[0].removeprefix("provider=")
    return OpRow(row["model"], provider, int(row["seq"].split("=")[1]), json.loads(row["notes"]))


def capability_of(gpu: str) -> tuple[int, int]:
    """Compute capability of a row's card."""
    return next(capability for name, capability in CAPABILITIES.items() if name in gpu)


def as_float32(value: float) -> float:
    """Rounded to the precision that the operator benchmark publishes with."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def run_op(row: dict[str, str], on_card: bool) -> Result:
    """Predicts, or on a card measures, a row of an operator benchmark."""
    op = op_row(row)
    sizes = ",".join(f"{key}={value}" for key, value in op.config.items() if key in ("T", "D", "dtype"))
    name = f"{op.kernel} {op.provider} {row['seq']} {sizes}".strip()
    published = float(row["value"])
    program = program_of(op)
    if program is None:
        return Result("liger", name, "MiB", published, remark=reason_against_op(op))
    if on_card:
        meter = CudaMeter()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # every row is a process of its own
        torch.cuda.empty_cache()
        program(meter)
        peaks = meter.readings
    else:
        peaks = trace_program(program, Target.cuda(capability_of(row["gpu"]))).peaks()
    value = as_float32(median(peaks) / 2**20)
    return Result(
        "liger", name, "MiB", published, value, value == published, remark=INFERRED.get(op.kernel, "")
    )


# ---- whole runs ----------------------------------------------------------------------------------------


def run_recipe(row: dict[str, str], on_card: bool) -> Result:
    """Predicts, or on a card measures, a whole run."""
    words = (row["set"], row["model"], f"batch {row['batch']}", row["optimizer"], row["technique"])
    name = " ".join(word for word in words if word.split()[-1:] != ["batch"] and word)
    published = float(row["value"]) if row["value"] else None
    recipe = recipe_of(row)
    if recipe is None:
        return Result("runs", name, row["unit"], published, remark=reason_against(row))
    peaks = (measured if on_card else predicted)(recipe)
    value = peaks.of(recipe)
    remark = recipe.gap or recipe.remark
    if published is None:
        unit = "GB" if recipe.unit == 10**9 else "GiB"
        return Result("runs", name, unit, None, value, decision=not peaks.fit(recipe), remark=remark)
    digits = len(row["value"].partition(".")[2])
    exact = round(value, digits) == published
    partial = bool(recipe.gap)
    return Result("runs", name, row["unit"], published, value, exact, partial=partial, remark=remark)


# ---- the table -----------------------------------------------------------------------------------------


def results(name: str, quick: bool, on_card: bool) -> Iterator[Result]:
    """Row after row of a set, with progress on the error stream."""
    run: Callable[[dict[str, str], bool], Result] = run_op if name == "liger" else run_recipe
    rows = rows_of(name)
    if quick:
        rows = quick_rows(name, rows)
    if on_card:
        rows = [row for row in rows if not expressible(row) or is_present(row)]
    for number, row in enumerate(rows, 1):
        if sys.stderr.isatty():
            print(f"\r{name} {number}/{len(rows)} ", end="", file=sys.stderr, flush=True)
        with quiet():
            result = run(row, on_card)
        yield result


def expressible(row: dict[str, str]) -> bool:
    """Whether there is a program or recipe for a row."""
    return (program_of(op_row(row)) if row["set"] == "liger_op" else recipe_of(row)) is not None


def is_present(row: dict[str, str]) -> bool:
    """Whether the present card has the compute capability of the row's."""
    recipe = None if row["set"] == "liger_op" else recipe_of(row)
    wanted = capability_of(row["gpu"]) if recipe is None else recipe.capability
    return torch.cuda.get_device_capability() == wanted


def quick_rows(name: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """What a test run can afford: small operators; of the runs, the smallest of each source."""
    if name == "liger":
        return [row for row in rows if float(row["value"]) * 2**20 <= QUICK_LIMIT]
    first: dict[str, dict[str, str]] = {}
    for row in rows:
        if expressible(row) and row["value"]:
            first.setdefault(row["set"], row)
    return list(first.values())


def summary(name: str, found: list[Result]) -> list[str]:
    """Lines that say how well it went, and on how much."""
    told = [row for row in found if row.predicted is not None]
    counted = [row for row in told if not row.partial and row.decision is None]
    decided = [row for row in told if row.decision is not None]
    lines = [f"{name}: {len(found)} rows, {len(told)} expressed, {len(found) - len(told)} not"]
    if counted:
        lines.append(f"{name}: {share_of(counted)} equal at the published precision")
    within = sum(abs(row.error_pct or 0.0) <= MISS_PCT for row in counted)
    lines.append(f"{name}: {within} of {len(counted)} within {MISS_PCT} %")
    if name == "liger" and any(row.remark for row in counted):
        alone = [row for row in counted if not row.remark]
        lines.append(f"{name}: of the rows that need nothing inferred about their process: {share_of(alone)}")
    errors = [(abs(row.error_pct), row) for row in counted if row.error_pct is not None]
    if errors:
        worst = max(errors, key=lambda item: item[0])
        middle = median([error for error, _ in errors])
        lines.append(
            f"{name}: median absolute error {middle:.4f} %, worst {worst[1].error_pct:+.4f} %: {worst[1].row}"
        )
    if decided:
        right = sum(row.decision is True for row in decided)
        lines.append(f"{name}: {right} of {len(decided)} rows that ran out of memory do so here")
    partial = sum(row.partial for row in told)
    if partial:
        lines.append(f"{name}: {partial} rows rebuilt in part are printed and not counted")
    reasons: dict[str, int] = {}
    for row in found:
        if row.predicted is None:
            reasons[row.remark] = reasons.get(row.remark, 0) + 1
    lines += [f"{name}: not expressed, {count} rows: {reason}" for reason, count in sorted(reasons.items())]
    return lines


def share_of(found: list[Result]) -> str:
    """Such as "84 of 85 (98.8 %)"."""
    exact = sum(row.exact for row in found)
    return f"{exact} of {len(found)} ({100 * exact / max(len(found), 1):.1f} %)"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("liger", "runs"), help="only this set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", action="store_true", help="append to bench/results/published.csv")
    parser.add_argument("--quick", action="store_true", help="small rows only, for tests")
    parser.add_argument(
        "--on", choices=("cpu", "cuda"), default="cpu", help="cuda: run the programs for real"
    )
    parser.add_argument("--all", action="store_true", help="also print rows that cannot be expressed")
    options = parser.parse_args()
    if options.on == "cuda":
        torch.backends.cudnn.enabled = False  # its workspaces are no part of the published programs
    began = time.monotonic()
    table = Table("published", COLUMNS, dry=not options.csv)
    lines, everything = [], []
    for name in ("liger", "runs") if options.set is None else (options.set,):
        found = []
        for result in results(name, options.quick, options.on == "cuda"):
            found.append(result)
            if result.predicted is not None or options.all:
                with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
                    table.add(*cells(result))
        lines += summary(name, found)
        everything += found
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in everything], "summary": lines}, indent=1))
        return 0
    print(*lines, f"{time.monotonic() - began:.0f} s", sep="\n")
    return 0


def cells(result: Result) -> tuple[object, ...]:
    """A result as the table's columns."""
    error = "" if result.error_pct is None else f"{result.error_pct:+.4f}"
    published = "OOM" if result.published is None else f"{result.published:.10g}"
    value = "" if result.predicted is None else f"{result.predicted:.10g}"
    kind = "partial" if result.partial else str(result.exact if result.decision is None else result.decision)
    return (result.set, result.row, result.unit, published, value, error, kind, result.remark)


if __name__ == "__main__":
    sys.exit(main())
