# SPDX-License-Identifier: Apache-2.0
"""The page of measured numbers: of each file in `bench/results` the latest row of every case."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from website.markdown import table

__all__ = ["FILES", "MOST_ROWS", "Benchmark", "latest_rows", "numbers_page", "read_rows"]

Row = dict[str, str]

MOST_ROWS: Final = 30
"""Rows of one table; the files have the rest."""


@dataclass(frozen=True)
class Benchmark:
    """A file of results.

    Attributes:
        title: what it measures.
        key: columns that say which case a row is of.
        shown: columns of the page beside them.
    """

    title: str
    key: tuple[str, ...]
    shown: tuple[str, ...]


def _of(title: str, key: str, shown: str) -> Benchmark:
    return Benchmark(title, tuple(key.split()), tuple(shown.split()))


FILES: Final[dict[str, Benchmark]] = {
    "truth": _of(
        "Predicted and measured peaks on the CPU",
        "model precision mode share_pct",
        "budget_bytes measured_bytes predicted_bytes error_pct fits",
    ),
    "budgets": _of(
        "Budgets on the CPU",
        "model share_pct",
        "budget_bytes measured_bytes predicted_bytes plain_bytes fits",
    ),
    "gpu_budget": _of(
        "Budgets on a card",
        "model precision share_pct",
        "budget_bytes allocated_bytes predicted_allocated_bytes reserved_bytes predicted_reserved_bytes fits",
    ),
    "benchmarks": _of(
        "Benchmarks (`memscale bench`)",
        "machine model scale batch length precision way budget_bytes",
        "status allocated_bytes of_plain_memory of_plain_time step_ms",
    ),
    "by_hand": _of(
        "Against checkpoints placed by hand, at the same peak",
        "model by_hand",
        "hand_peak_bytes memscale_peak_bytes hand_ms memscale_ms time_ratio",
    ),
    "sac_ilp": _of(
        "Against PyTorch's planner of selective checkpoints",
        "blocks share_pct tool",
        "plan_s predicted_bytes measured_bytes step_ms memscale_ratio",
    ),
    "selective": _of(
        "Selective checkpoints against whole ones",
        "model between_pct",
        "whole_peak_bytes selective_peak_bytes whole_ms selective_ms time_ratio",
    ),
    "published": _of("Published measurements", "set row", "unit published predicted error_pct exact"),
    "standin": _of(
        "Against PyTorch's CUDA build on a stand-in runtime",
        "case capability expandable",
        "allocated_bytes predicted_allocated_bytes reserved_bytes predicted_reserved_bytes",
    ),
    "evaluation": _of("Forwards without gradients", "model when", "measured_bytes predicted_bytes error_pct"),
    "step_time": _of(
        "Predicted and measured step times",
        "workload threads share_percent",
        "measured_ms calibrated_error table_error",
    ),
    "frontier": _of(
        "Plans from plain to smallest",
        "variant dropout",
        "measured_peak_bytes predicted_peak_bytes step_ms of_plain",
    ),
    "predict": _of(
        "Time and memory of a prediction", "model tool", "cpu_s wall_s start_mib peak_mib allocated_bytes"
    ),
    "startup": _of("Import and first call", "what", "median_ms least_ms target_ms"),
    "planning_share": _of(
        "Share of planning in a run", "loop", "steps planned planning_s run_s share median_ms"
    ),
    "checkpoint_overhead": _of(
        "Overhead of one checkpoint",
        "block",
        "plain_us ours_us torch_us ours_overhead_us torch_overhead_us ratio",
    ),
    "recompute_check": _of(
        "Comparing recomputes by value", "model way threads", "step_ms share looked_at_mib held_kib"
    ),
    "loss_tile": _of("Loss in tiles", "dtype way", "extra_mib extra_share time_ms time_share loss_error"),
    "mlp_tile": _of("MLPs in tiles", "block", "peak tiled_peak plain_ms checkpoint_ms tiled_ms time_ratio"),
    "attention_tile": _of(
        "Attention in tiles",
        "block tokens",
        "attention_peak attention_tiled_peak attention_ms attention_ratio",
    ),
    "offload_run": _of(
        "Offload over a file",
        "model way share_pct",
        "budget_bytes predicted_bytes measured_bytes moved_bytes to_plain to_checkpoint",
    ),
    "loop_losses": _of(
        "Losses that the loop makes", "loop way", "plain_bytes ample_error_pct tight_error_pct tight"
    ),
    "offload_hooks": _of("Hooks on saved tensors", "storages hooks", "save_ns unpack_ns"),
    "optimizer_step": _of("Optimizer steps", "threads way", "state_bytes seconds mparam_per_s ratio"),
    "optimizer_offload": _of(
        "Optimizer state and gradients in a file", "way", "beside share peak seconds ratio"
    ),
    "optimizer_convergence": _of(
        "Training with 8-bit state",
        "task way",
        "parameters steps seeds end excess_pct held_out held_excess_pct",
    ),
    "weight_stream": _of(
        "Weights in a file",
        "parameters",
        "weight_bytes budget_bytes predicted_bytes anon_bytes ms plain_ms to_plain",
    ),
    "small_budgets": _of(
        "Small budgets in control groups",
        "budget_bytes",
        "plain_bytes predicted_bytes group_bytes limit_bytes ms same",
    ),
    "library_memory": _of(
        "What math libraries keep",
        "subject threads budget_bytes",
        "tensor_bytes library_bytes code_bytes mkl_bytes",
    ),
    "survival": _of(
        "Memory that runs out, at every operation",
        "model accumulate precision optimizer part",
        "operations tried equal outside loud wrong",
    ),
    "survival_many": _of(
        "A thousand recoveries", "steps", "recoveries bits tensors_100 tensors resident_100 resident"
    ),
    "recording": _of("Recording a run", "state", "step_us added_us own_us share_of_50_ms record_ns exit_s"),
    "server": _of("memscale-server", "what case", "value unit bar"),
    "c": _of("The C library, as `bench/c` prints it", "bench case kind", "numbers"),
    "gpu_card": _of("What a card does, and what was assumed", "kind name", "measured assumed ratio"),
    "gpu_scratch": _of("Scratch memory of operators on a card", "call dtype layout part", "scratch"),
}
"""What each file of rows holds, in the order of the page."""

CURVES: Final = "optimizer_curves"
"""Losses by step, which docs/guide/optimizer.md draws: they have no machine of their own."""

_UNITS: Final = {"_ms": "ms", "_us": "µs", "_ns": "ns", "_s": "s", "_mib": "MiB", "_kib": "KiB", "_pct": "%"}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def latest_rows(rows: list[Row], key: tuple[str, ...]) -> list[Row]:
    """The last row of each case, in the order in which they were measured."""
    last = {tuple(row[name] for name in key): at for at, row in enumerate(rows)}
    return [rows[at] for at in sorted(last.values())]


def _heading(column: str) -> str:
    if column.endswith("_bytes"):
        return column.removesuffix("_bytes").replace("_", " ")
    for end, unit in _UNITS.items():
        if column.endswith(end):
            return f"{column.removesuffix(end).replace('_', ' ')}, {unit}"
    return column.replace("_", " ")


def _cell(column: str, value: str) -> str:
    if column.endswith("_bytes") and value.isdecimal():
        count = int(value)
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if count >= size:
                return f"{count / size:.2f} {unit}"
        return f"{count} B"
    return value


def _machines(rows: list[Row]) -> str:
    said = dict.fromkeys(_machine(row) for row in rows)
    return "; ".join(said)


def _machine(row: Row) -> str:
    name = row.get("machine") or row.get("judge", "")
    cores = f", {row['cores']} cores" if row.get("cores") else ""
    torch = f", PyTorch {row['torch']}" if row.get("torch") else ""
    return f"{name}{cores}{torch}"


def _section(name: str, benchmark: Benchmark, rows: list[Row]) -> str:
    latest = latest_rows(rows, benchmark.key)
    shown = latest[-MOST_ROWS:]
    columns = (*benchmark.key, *benchmark.shown)
    head = (*(_heading(column) for column in columns), "date", "commit")
    cells = [
        (*(_cell(column, row[column]) for column in columns), row["date"][:10], f"`{row['commit']}`")
        for row in shown
    ]
    which = f"The latest row of each of {len(latest)} cases"
    if len(shown) < len(latest):
        which = f"{which}; the {len(shown)} measured last"
    where = f"[{name}.csv](../../bench/results/{name}.csv)"
    about = f"{which}. {where}, {len(rows)} rows. {_machines(shown)}."
    return f"## {benchmark.title}\n\n{about}\n\n{table(head, cells)}"


def _sweep(path: Path) -> str:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    counts = Counter(str(row["status"]) for row in rows)
    commits = Counter(str(row["commit"]) for row in rows)
    said = [(status, str(count)) for status, count in counts.most_common()]
    return (
        "## Models of public libraries beside plain PyTorch\n\n"
        f"[sweep.jsonl](../../bench/results/sweep.jsonl), {len(rows)} rows of {len(commits)} commits, "
        f"most of `{commits.most_common(1)[0][0]}`. [Coverage](../guide/coverage.md) explains them.\n\n"
        f"{table(('status', 'rows'), said)}"
    )


def numbers_page(results: Path) -> str:
    """The whole page."""
    rows = {name: read_rows(results / f"{name}.csv") for name in FILES}
    overview = [
        (
            f"[{benchmark.title}](#{_slug(benchmark.title)})",
            str(len(rows[name])),
            rows[name][-1]["date"][:10],
            f"`{rows[name][-1]['commit']}`",
            _machine(rows[name][-1]),
        )
        for name, benchmark in FILES.items()
    ]
    return "\n".join(
        [
            "# Numbers\n",
            "<!-- Made of bench/results by tools/build_site.py. -->\n",
            "Every file of measurements: how many rows it has, and of its latest row the day, the commit and "
            "the machine. A `+` behind a commit: the tree had changes that were not committed. "
            "[Measured](../guide/measured.md) says what the numbers mean; "
            f"losses by step are in [{CURVES}.csv](../../bench/results/{CURVES}.csv).\n",
            table(("what", "rows", "day", "commit", "machine"), overview),
            *(_section(name, benchmark, rows[name]) for name, benchmark in FILES.items()),
            _sweep(results / "sweep.jsonl"),
        ]
    )


def _slug(title: str) -> str:
    kept = "".join(letter for letter in title.lower().replace("`", "") if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
