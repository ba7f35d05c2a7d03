# SPDX-License-Identifier: Apache-2.0
"""One workload of `budgets.py`, in a process of its own: planned and measured under each budget.

    python budgets_run.py NAME

prints one JSON object per line: a `Cell`'s fields, or `{"failed": ...}`.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import architectures
import torch
from common import calibrate, measure_peak, print_rows
from truth_run import highest, settings, train
from truth_workloads import WORKLOADS, Workload

import memscale

SHARES = (90, 75, 60, 50, 40, 30, 25)
"""Budgets, in percent of the plain step's measured peak; falling."""

LARGER = {
    "llama-bf16": 3,
    "mistral-accumulate": 2,
    "neox-bf16-adafactor": 3,
    "bert-frozen": 3,
    "bart-autocast": 6,
    "vit": 3,
    "hubert": 4,
    "whisper": 3,
    "mixtral": 6,
    "mamba": 2,
    "convnext-autocast": 3,
    "two-heads": 3,
    "lstm": 6,
    "gru": 8,
    "mlp-autocast": 8,
    "recommender": 4,
    "early-exit": 3,
}
"""Batches, in multiples of the workload's own: where weights make the peak, a budget has nothing to do."""


def workload(name: str) -> Workload:
    """A workload with a batch of the right size."""
    work, times = WORKLOADS[name], LARGER.get(name, 1)

    def batch() -> architectures.Batch:
        made = work.entry.batch()
        if isinstance(made, dict):
            return {key: value.repeat(times, *[1] * (value.dim() - 1)) for key, value in made.items()}
        return tuple(value.repeat(times, *[1] * (value.dim() - 1)) for value in made)

    return work if times == 1 else replace(work, entry=replace(work.entry, batch=batch))


@dataclass(frozen=True)
class Cell:
    """One workload under one budget.

    Attributes:
        workload: name.
        share: of the plain peak, in percent.
        budget_bytes: the same in bytes.
        fits: each step's plan says that the budget is met.
        measured_bytes: highest number of live tensor bytes in building and training.
        predicted_bytes: by the plan with the highest peak.
        smallest_bytes: what that plan says is the smallest peak that any plan reaches.
        plain_bytes: measured without MemScale.
        step_ns: the plan's step time.
        plain_step_ns: what the plan says of the plain step.
        checkpointed: modules whose forward runs twice as a whole.
        selective: modules of which a part runs twice.
        again: the plan is that of the cell before and was not measured a second time.
    """

    workload: str
    share: int
    budget_bytes: int
    fits: bool
    measured_bytes: int
    predicted_bytes: int
    smallest_bytes: int
    plain_bytes: int
    step_ns: int
    plain_step_ns: int
    checkpointed: int
    selective: int
    again: bool = False


def actions(plan: Any) -> tuple[Any, ...]:
    """What a plan does, whatever the budget was that it was made for."""
    return tuple(
        (choice.module, choice.techniques, getattr(choice, "kept", ()), getattr(choice, "joined", False))
        for choice in plan.active
    )


def first_plan(work: Workload, config: memscale.Config) -> Any:
    """What would be planned for the first step of a run."""
    torch.manual_seed(0)
    model, batch = work.build(), work.batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "autocast"):
        return memscale.plan(model, work.optimizer(work.trainable(model)), config, batch)


def cells(name: str) -> list[Cell]:
    """Measures one workload under every budget.

    A plan for a budget below a refused one is the smallest plan again. That is looked at, for the first step;
    then the peak is not measured a second time.
    """
    work = workload(name)
    calibrate()
    plain = measure_peak(lambda: train(work))
    made: list[Cell] = []
    seen: list[Any] = []
    for share in SHARES:
        config = settings(plain * share // 100)
        budget = plain * share // 100
        if seen and not any(planned.plan.fits for planned in seen):
            now = first_plan(work, config)
            if not now.fits and actions(now) == actions(seen[0].plan):
                made.append(replace(made[-1], share=share, budget_bytes=budget, again=True))
                continue
        seen = []
        measured = measure_peak(lambda: seen.extend(train(work, config)))  # noqa: B023 - runs here and now
        made.append(_cell(name, share, budget, plain, measured, seen))
        gc.collect()
    return made


def _cell(name: str, share: int, budget: int, plain: int, measured: int, seen: list[Any]) -> Cell:
    top = highest(seen).plan
    selective = sum("selective" in choice.techniques for choice in top.active)
    return Cell(
        name,
        share,
        budget,
        all(planned.plan.fits for planned in seen),
        measured,
        top.predicted.allocated_peak_bytes,
        top.smallest_peak_bytes,
        plain,
        top.predicted.step_time_ns,
        top.plain.step_time_ns,
        len(top.active) - selective,
        selective,
    )


if __name__ == "__main__":
    print_rows(lambda: [asdict(cell) for cell in cells(sys.argv[1])])
