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

import time
from collections.abc import Callable
from typing import Any

import torch
from common import Table, measure_peak, median, parser
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
from zoo import gpt2

Prepare = Callable[[nn.Module], object]


def checkpoint_all(model: nn.Module) -> None:
    """Hugging Face's own: every block."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def checkpoint_half(model: nn.Module) -> None:
    """Every second block, by hand."""
    for block in list(model.transformer.h)[::2]:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *args, _inner=inner, **kwargs: checkpoint(
            _inner, *args, use_reentrant=False, **kwargs
        )


def wrapped(budget: int) -> Prepare:
    """MemScale under a budget."""
    return lambda model: memscale.wrap(model, memscale.Config(memory_budget=budget, enable_logging=False))


class Run:
    """One variant of the model, its optimizer and its batch."""

    def __init__(
        self, build: Callable[[], nn.Module], prepare: Prepare, shape: tuple[int, int], vocabulary: int
    ) -> None:
        torch.manual_seed(0)
        self.model = build().train()
        prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        ids = torch.randint(0, vocabulary, shape)
        self.batch = {"input_ids": ids, "labels": ids}
        self.seconds: list[float] = []

    def step(self) -> None:
        """One timed training step."""
        began = time.perf_counter()
        output = self.model(**self.batch)
        output.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)

    @property
    def plan(self) -> Any:
        """MemScale's plan, or None."""
        executor = getattr(self.model, "_memscale_executor", None)
        return None if executor is None else executor.plan


def compare(arguments: Any, dropout: float, table: Table) -> None:
    """All variants at one dropout."""
    shape = (arguments.batch, arguments.length)
    build = gpt2(
        arguments.layers,
        arguments.width,
        arguments.width // 64,
        arguments.vocabulary,
        dropout,
        arguments.length,
    )

    def make(prepare: Prepare) -> Run:
        return Run(build, prepare, shape, arguments.vocabulary)

    def peak(prepare: Prepare) -> int:
        def two_steps() -> None:
            run = make(prepare)
            run.step()
            run.step()

        return measure_peak(two_steps)

    variants: dict[str, Prepare] = {
        "plain": lambda model: None,
        "every block": checkpoint_all,
        "every second block": checkpoint_half,
    }
    peaks = {name: peak(prepare) for name, prepare in variants.items()}
    plain, smallest = peaks["plain"], peaks["every block"]
    budgets = {"memscale plain": plain + plain // 50}
    budgets |= {f"memscale {part}/4": smallest + (plain - smallest) * part // 4 for part in (3, 2, 1)}
    budgets["memscale every block"] = smallest
    for name, budget in budgets.items():
        variants[name] = wrapped(budget)
        peaks[name] = peak(variants[name])
    runs = {name: make(prepare) for name, prepare in variants.items()}
    for repetition in range(arguments.runs + 1):
        for run in runs.values():
            run.step()
            if not repetition:
                run.seconds.clear()  # warm-up, and where MemScale plans
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
    table = Table("frontier", columns, arguments.dry)
    for dropout in arguments.dropout or (0.0, 0.1):
        compare(arguments, dropout, table)


if __name__ == "__main__":
    main()
