# SPDX-License-Identifier: Apache-2.0
"""Small budgets under a real limit: what offload engines take for themselves is part of them.

    python small_budgets.py [--directory FOLDER] [--mib N ...] [--steps N]

For each budget a model of twice that (a quarter weights, a quarter gradients, half AdamW's state; and
activations) trains with one call of `memscale.wrap`, what does not fit in a file; in a process of its own, in
a control group of the system that may have the budget and SLACK in all, pages of files among them. Where the
system lets nobody make such groups, RLIMIT_DATA has to do, which counts memory that nobody has touched as
well.

    engines     staging buffers and tables of all engines, as they say themselves
    predicted   peak of the plan, engines included
    anon        most resident memory without a file, beyond what was there before the model
    group_bytes most memory of all kinds in the control group
    uncounted   the same with buffers of 2 MiB whatever the budget is, and outside of it, as it was once

Losses are those of plain PyTorch. Exit status 1 where the limit was not held, or anything differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from common import Table, median, parser
from memory_group import MemoryGroup
from torch import Tensor, nn
from weight_stream import Watch, can_group

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.benchmarks.memory import engine_bytes
from memscale.offload import limits
from memscale.offload.engine import OffloadSettings

COLUMNS = (
    "budget_bytes",
    "plain_bytes",
    "predicted_bytes",
    "engine_bytes",
    "anon_bytes",
    "group_bytes",
    "limit_bytes",
    "techniques",
    "ms",
    "plain_ms",
    "same",
    "uncounted_bytes",
    "uncounted",
)

SLACK = 8 << 20
DEPTH = 16


class Layer(nn.Module):
    """Saves two tensors of the width of its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return nn.functional.gelu(self.linear(x))


def model_of(budget: int) -> tuple[nn.Module, Tensor]:
    """A model that takes twice a budget, and a batch."""
    torch.manual_seed(0)
    width = int((budget / 4 / 4 / DEPTH) ** 0.5) // 16 * 16
    rows = budget // (DEPTH * 2 * 4 * width)
    return nn.Sequential(*[Layer(width) for _ in range(DEPTH)]), torch.randn(rows, width)


def train(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[float], float]:
    """Losses, and the median time of a step but for the first, ms."""
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return losses, 1e3 * median(seconds[1:])


def wrapped(budget: int, directory: str) -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    """A model with a plan for a budget."""
    model, x = model_of(budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    away = AsyncOffloadConfig(tiers=("file",), directory=directory)
    config = Config(memory_budget=budget, enable_logging=False, enable_checkpointing=False, async_config=away)
    memscale.wrap(model, config, sample_input=x, optimizer=optimizer)
    return model, x, optimizer


def child(given: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    torch.set_num_threads(1)
    if given.run == "plain":
        model, x = model_of(given.budget)
        losses, ms = train(model, x, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), given.steps)
        return {"losses": losses, "ms": ms}
    if given.run == "uncounted":
        limits.chunk_bytes = lambda budget: 2 << 20
        OffloadSettings.own_bytes = lambda self, blocks=0: 0  # type: ignore[method-assign]
    model, x, optimizer = wrapped(given.budget, given.directory)  # once before: threads, heaps, compiled code
    train(model, x, optimizer, 2)
    memscale.detach(model)
    del model, x, optimizer
    gc.collect()
    watch, group, limit = Watch(), None, given.budget + SLACK
    if can_group():
        group = MemoryGroup(given.group)
        group.join(limit)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (watch.before["VmData"] + limit, resource.RLIM_INFINITY))
    model, x, optimizer = wrapped(given.budget, given.directory)
    losses, ms = train(model, x, optimizer, given.steps)
    executor: Any = memscale.executor_of(model)
    plan = executor.plan
    names = {step.technique for step in plan.steps} | {
        name for item in plan.active for name in item.techniques
    }
    return {
        "losses": losses,
        "ms": ms,
        "engine_bytes": engine_bytes(),
        **watch.end(),
        "group_bytes": 0 if group is None else group.lift(),
        "fits": plan.fits,
        "plain_bytes": plan.plain.device_used_peak_bytes,
        "predicted_bytes": plan.predicted.device_used_peak_bytes,
        "techniques": sorted(names),
    }


def run(given: argparse.Namespace, way: str, budget: int) -> dict[str, Any]:
    """One run, in a process of its own; what it said where it failed."""
    group = f"memscale-{os.getpid()}-{way}"
    words = [sys.executable, __file__, "--run", way, "--budget", str(budget), "--directory", given.directory]
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MEMSCALE_CALIBRATION": "off"}
    words += ["--steps", str(given.steps), "--group", group]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **heap})
    MemoryGroup(group, make=False).remove()
    if done.returncode:
        killed = done.returncode == -signal.SIGKILL
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": "killed by the system" if killed else lines[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(given: argparse.Namespace, budget: int, table: Table) -> list[str]:
    """Runs all of one budget, adds a row; returns what is wrong."""
    plain, ours, uncounted = (run(given, way, budget) for way in ("plain", "counted", "uncounted"))
    name = f"{budget >> 20} MiB"
    if "failed" in plain or "failed" in ours:
        return [f"{name}: {item['failed']}" for item in (plain, ours) if "failed" in item]
    row = {
        **ours,
        "budget_bytes": budget,
        "limit_bytes": budget + SLACK,
        "techniques": " ".join(ours["techniques"]),
        "plain_ms": plain["ms"],
        "same": ours["losses"] == plain["losses"],
        "uncounted_bytes": uncounted.get("group_bytes", ""),
        "uncounted": uncounted.get("failed", "trains"),
    }
    table.add(*(row[column] for column in COLUMNS))
    wrong = [] if row["same"] else [f"{name}: losses differ from plain PyTorch's"]
    wrong += [] if ours["fits"] else [f"{name}: the plan does not fit"]
    wrong += [] if ours["anon_bytes"] <= budget + SLACK else [f"{name}: more resident memory than the budget"]
    return wrong


def main() -> int:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--directory", default="")
    made.add_argument("--mib", type=int, nargs="+", default=[48, 64, 128])
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--run", choices=("plain", "counted", "uncounted"), help=argparse.SUPPRESS)
    made.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--group", default="", help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.run:
        print(json.dumps(child(given)))
        return 0
    table = Table("small_budgets", COLUMNS, given.dry)
    wrong = []
    with tempfile.TemporaryDirectory(dir=given.directory or None) as folder:
        given.directory = folder
        for mib in given.mib:
            wrong += compare(given, mib << 20, table)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
