# SPDX-License-Identifier: Apache-2.0
"""Peaks of a training under `DistributedDataParallel`, as measured and as a plan predicts them.

A measurement above the prediction is repeated, twice at most, and the least one counts: where gloo's own
thread is the last to drop a tensor, the profiler, which watches the threads of the training, does not see it
go.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memscale
from zoo.training import SMALLEST, peak_bytes, seed

if TYPE_CHECKING:
    from distributed_runs import Scenario

Parallel = nn.parallel.DistributedDataParallel
ROWS, WIDTH, CLASSES, DEPTH = 256, 128, 64, 3
STEPS = 3
SLACK = 64
"""Bytes of Python's numbers as tensors, which are not planned for."""


class Mixer(nn.Module):
    """Gradients are a third of what a step takes; a buffer; one layer that never runs, if asked for."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.never = nn.Linear(16, 16) if unused else None
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and scores."""
        for block in self.blocks:
            x = x + block(x * self.scale)
        scores = self.head(x)
        return nn.functional.cross_entropy(scores, labels), scores


def _on_any_rank(flag: bool) -> bool:
    """A training is one of all ranks: they repeat it together, or one would wait for the other."""
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def peaks(scenario: Scenario, options: dict[str, Any]) -> dict[str, list[int]]:
    """(measured, predicted) of the plain step and of the smallest plan, in bytes."""
    planned, plans = _measured(scenario, options, SMALLEST)
    plain, _ = _measured(scenario, options, None)
    predicted = max(plan.predicted.allocated_peak_bytes for plan in plans)
    predicted_plain = max(plan.plain.allocated_peak_bytes for plan in plans)
    for _ in range(2):
        if _on_any_rank(planned > predicted + SLACK):
            planned = min(planned, _measured(scenario, options, SMALLEST)[0])
        if _on_any_rank(plain > predicted_plain + SLACK):
            plain = min(plain, _measured(scenario, options, None)[0])
    return {"plain": [plain, predicted_plain], "planned": [planned, predicted]}


def _measured(
    scenario: Scenario, options: dict[str, Any], config: memscale.Config | None
) -> tuple[int, list[memscale.Plan]]:
    plans: list[memscale.Plan] = []
    if (
        "init_sync" in inspect.signature(Parallel.__init__).parameters
    ):  # its copies of all parameters are late to go
        options = {**options, "init_sync": False}
    accumulates = scenario.case == "accumulated"

    def work() -> None:
        seed()
        model = Mixer("find_unused_parameters" in options)
        run = Parallel(model, **options)
        owner = run if scenario.when == "after" else model
        if config is not None:
            memscale.wrap(owner, config)
        optimizer = torch.optim.AdamW(run.parameters())
        for _ in range(STEPS):
            for last in (False, True) if accumulates else (True,):
                batch = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
                with contextlib.nullcontext() if last else run.no_sync():
                    loss, scores = run(*batch)
                    loss.backward()
                del loss, scores
            optimizer.step()
            optimizer.zero_grad()
        if config is not None:
            plans.extend(memscale.executor_of(owner).plans)

    return peak_bytes(work), plans
