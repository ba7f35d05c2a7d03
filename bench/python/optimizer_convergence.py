# SPDX-License-Identifier: Apache-2.0
"""The loss that is reached with 8-bit optimizer state, beside that of PyTorch's AdamW on FP32.

Every way trains the same models from the same weights on the same batches (`optimizer_tasks.py`), with
warm-up, cosine decay, weight decay and clipping. The loss at the end is that of the last 50 steps and of 20
batches that were held out, each the mean; a table's row is the mean over seeds, and `excess` how much more it
is than PyTorch's on FP32.

    torch fp32        AdamW, FP32 weights and moments: 12 bytes per parameter
    ours fp32 8-bit   FP32 weights, moments of 8 bits: 6 bytes and scales
    ours bf16 8-bit   BF16 weights, 8 bits of rest, moments of 8 bits: 5 bytes and scales
    torch bf16        AdamW on BF16 weights: what 6 bytes give without a master

Curves go to bench/results/optimizer_curves.csv: the loss over every 20 steps, each seed for itself.

Usage: python bench/python/optimizer_convergence.py [--seeds 0 1 2] [--tasks bytes shapes copy] [--dry]
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from common import RESULTS, Table, parser
from optimizer_tasks import TASKS, Task
from torch import nn

from memscale.optim import take_over

WAYS = ("torch fp32", "ours fp32 8-bit", "ours bf16 8-bit", "torch bf16")
_BAND, _LAST, _HELD_OUT = 20, 50, 20


@dataclass
class Run:
    """What one training gave.

    Attributes:
        losses: of every step.
        held_out: mean over batches that were not trained on.
        seconds: that training took.
    """

    losses: list[float]
    held_out: float
    seconds: float

    @property
    def end(self) -> float:
        """Mean loss of the last steps."""
        return sum(self.losses[-_LAST:]) / _LAST


def optimizer_of(way: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, with our state where the way says so."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05)
    if way.startswith("ours"):
        reason = take_over(optimizer)
        assert not reason, reason
    return optimizer


def train(task: Task, way: str, seed: int) -> Run:
    """One training from the beginning."""
    torch.manual_seed(seed)
    model = task.model()
    if "bf16" in way:
        model.bfloat16()
    optimizer = optimizer_of(way, model, task.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * at / task.steps))
    )
    batches = torch.Generator().manual_seed(1000 + seed)
    losses = []
    begin = time.perf_counter()
    for _ in range(task.steps):
        loss = task.loss(model, batches, False)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    model.eval()
    fresh = torch.Generator().manual_seed(2000 + seed)
    with torch.no_grad():
        held_out = sum(task.loss(model, fresh, True).item() for _ in range(_HELD_OUT)) / _HELD_OUT
    return Run(losses, held_out, seconds)


def bands(losses: list[float]) -> Iterator[tuple[int, float]]:
    """(steps done, mean loss of the latest of them)."""
    for end in range(_BAND, len(losses) + 1, _BAND):
        yield end, sum(losses[end - _BAND : end]) / _BAND


def main() -> None:
    """Trains all, and writes a row per task and way."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--tasks", nargs="+", default=None)
    options = arguments.parse_args()
    columns = (
        "task",
        "way",
        "parameters",
        "steps",
        "seeds",
        "end",
        "excess_pct",
        "held_out",
        "held_excess_pct",
    )
    table = Table("optimizer_convergence", (*columns, "seconds"), options.dry)
    curves = []
    for make in TASKS:
        task = make()
        if options.tasks is not None and task.name not in options.tasks:
            continue
        count = sum(value.numel() for value in task.model().parameters())
        reference: tuple[float, float] | None = None
        for way in WAYS:
            runs = [train(task, way, seed) for seed in options.seeds]
            curves += [
                (task.name, way, seed, step, f"{loss:.5f}")
                for seed, run in zip(options.seeds, runs, strict=True)
                for step, loss in bands(run.losses)
            ]
            mean = [
                sum(values) / len(runs) for values in zip(*((r.end, r.held_out) for r in runs), strict=True)
            ]
            reference = reference or (mean[0], mean[1])
            excess = [100 * (value / base - 1) for value, base in zip(mean, reference, strict=True)]
            took = sum(run.seconds for run in runs) / len(runs)
            table.add(
                *(task.name, way, count, task.steps, len(runs)), mean[0], excess[0], mean[1], excess[1], took
            )
    if not options.dry:
        with (RESULTS / "optimizer_curves.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("task", "way", "seed", "step", "loss"))
            writer.writerows(curves)


if __name__ == "__main__":
    main()
