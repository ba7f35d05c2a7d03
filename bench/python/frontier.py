# SPDX-License-Identifier: Apache-2.0
"""Memory against time: MemScale at several budgets beside the usual ways of checkpointing.

A model like GPT-2. Variants: plain; MemScale with the plain peak as its budget, and at 3/4, 1/2 and 1/4 of
the way from "every block checkpointed" up to plain; Hugging Face's `gradient_checkpointing_enable()`, which
checkpoints every block; and `torch.utils.checkpoint` on every second block. Steps of all variants
alternate, so that a machine that slows down slows all of them down; the median counts. Peaks come from the
profiler, in runs of their own.

The claim to check: half-way between, MemScale is clearly faster than checkpointing every block.
"""

from __future__ import annotations

from typing import Any

from architectures import Entry, gpt2, text
from common import Table, calibrate, median, parser
from contest import Prepare, Run, alternate, as_it_is, measure, under
from hand import every_second
from torch import nn


def checkpoint_all(model: nn.Module) -> None:
    """Hugging Face's own: every block."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def checkpoint_half(model: nn.Module) -> None:
    """Every second block, by hand."""
    every_second([[[block] for block in model.transformer.h]])  # type: ignore[union-attr]


def compare(arguments: Any, dropout: float, table: Table) -> None:
    """All variants at one dropout."""
    build = gpt2(
        arguments.layers,
        arguments.width,
        arguments.width // 64,
        arguments.vocabulary,
        dropout,
        arguments.length,
    )
    entry = Entry(build, text(arguments.batch, arguments.length, arguments.vocabulary))
    variants: dict[str, Prepare] = {
        "plain": as_it_is,
        "every block": checkpoint_all,
        "every second block": checkpoint_half,
    }
    peaks = {name: measure(entry, prepare).peak_bytes for name, prepare in variants.items()}
    plain, smallest = peaks["plain"], peaks["every block"]
    budgets = {"memscale plain": plain + plain // 50}
    budgets |= {f"memscale {part}/4": smallest + (plain - smallest) * part // 4 for part in (3, 2, 1)}
    budgets["memscale every block"] = smallest
    for name, budget in budgets.items():
        variants[name] = under(budget)
        peaks[name] = measure(entry, variants[name]).peak_bytes
    runs = {name: Run(entry, prepare) for name, prepare in variants.items()}
    alternate(runs.values(), arguments.runs)
    tabulate(table, runs, peaks, budgets, dropout)


def tabulate(
    table: Table, runs: dict[str, Run], peaks: dict[str, int], budgets: dict[str, int], dropout: float
) -> None:
    """One row per variant, and the claim's two numbers."""
    base = median(runs["plain"].seconds)
    for name, run in runs.items():
        plan = run.plan
        seconds = median(run.seconds)
        table.add(
            name,
            dropout,
            peaks[name],
            budgets.get(name, ""),
            "" if plan is None else plan.predicted.allocated_peak_bytes,
            len(run.seconds),
            1e3 * seconds,
            1e3 * min(run.seconds),
            seconds / base,
            "" if plan is None else plan.slowdown,
            "" if plan is None else len(plan.active),
        )
    half, every = median(runs["memscale 2/4"].seconds) / base, median(runs["every block"].seconds) / base
    share = 100 * (half - 1) / max(every - 1, 1e-9)
    print(
        f"# half-way budget: {half:.3f} of plain; every block: {every:.3f}; {share:.0f} % of its overhead\n"
    )


def main() -> None:
    """Runs the comparison without and with dropout."""
    options = parser(__doc__)
    for name, default in (
        ("layers", 8),
        ("width", 384),
        ("length", 512),
        ("batch", 4),
        ("vocabulary", 4096),
        ("runs", 9),
    ):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--dropout", type=float, action="append", help="0 and 0.1")
    arguments = options.parse_args()
    columns = (
        "variant",
        "dropout",
        "measured_peak_bytes",
        "budget_bytes",
        "predicted_peak_bytes",
        "runs",
        "step_ms",
        "least_ms",
        "of_plain",
        "predicted_of_plain",
        "checkpointed",
    )
    calibrate()
    table = Table("frontier", columns, arguments.dry)
    for dropout in arguments.dropout or (0.0, 0.1):
        compare(arguments, dropout, table)


if __name__ == "__main__":
    main()
