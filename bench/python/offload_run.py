# SPDX-License-Identifier: Apache-2.0
"""Whole runs with offload to a file on the CPU: predicted and measured peak, bytes away, and time.

    python offload_run.py [--directory FOLDER] [--budgets PERCENT,...] [--rate MB_S] [--rounds N] [MODEL ...]

Each model is measured plain; then under budgets in percent of that peak, in two ways: "offload" (no
checkpoints) and "both" (the plan chooses). For each, in one process:

    peak    highest number of live tensor bytes in building the model and two steps, beside the highest peak
            that the plans of these steps predicted. Held: at least 90 % of the prediction, and nothing above
            it but scalars and random states
    time    steps in turn with the plain run and with checkpoints at the same budget; medians of the ratios.
            The budget that checkpoints are given is the same; where they cannot meet it, theirs is the
            smallest plan, and the column `checkpoint_fits` says so

A run whose losses differ from the plain run's, or whose peak is above its prediction or its budget, is an
error: exit status 1. What the disk does is in the times, so its rates are in each row, as MemScale has
measured them. Over a fast disk the plans move saved tensors only; `--rate 150` shows plans with checkpoints
whose boundaries leave.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from architectures import ZOO, Entry, gpt2, images, text
from common import Table, calibrate, measure_peak, median, parser
from contest import Run, alternate
from torch import nn
from truth_workloads import WORKLOADS

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.offload import limits

COLUMNS = (
    "model",
    "way",
    "share_pct",
    "budget_bytes",
    "predicted_bytes",
    "measured_bytes",
    "ratio",
    "fits",
    "offloaded",
    "boundaries",
    "checkpointed",
    "moved_bytes",
    "away_bytes",
    "held_bytes",
    "plain_bytes",
    "plain_ms",
    "ms",
    "to_plain",
    "to_checkpoint",
    "checkpoint_fits",
    "predicted_to_plain",
    "out_mb_s",
    "in_mb_s",
    "rounds",
)

SHARES = (80, 65, 50, 35)
LEAST = 0.9
"""Of the measured peak, in units of the predicted one."""

SMALL = 1 << 14
"""Bytes of scalars and random states, which predictions of steps without offload miss, too."""

_STEPS = 2


def _larger(entry: Entry, times: int) -> Entry:
    """The same with a larger batch: what a budget acts on are activations, and small storages stay."""

    def batch() -> Any:
        made = entry.batch()
        if isinstance(made, dict):
            return {name: value.repeat(times, *[1] * (value.dim() - 1)) for name, value in made.items()}
        return tuple(value.repeat(times, *[1] * (value.dim() - 1)) for value in made)

    return replace(entry, batch=batch)


MODELS: dict[str, Entry] = {
    "gpt2": Entry(gpt2(4, 256, 4), text(12, 256)),
    "llama": _larger(ZOO["llama"], 3),
    "bert": _larger(ZOO["bert"], 3),
    "vit": _larger(ZOO["vit"], 4),
    "t5": _larger(ZOO["t5"], 3),
    "whisper": _larger(WORKLOADS["whisper"].entry, 4),
    "convnet": replace(ZOO["convnet"], batch=images(16, 64)),
    "unet": replace(ZOO["unet"], batch=images(16, 64)),
    "gru": _larger(ZOO["gru"], 16),
    "lstm": _larger(ZOO["lstm"], 8),
    "mlp": _larger(ZOO["mlp"], 2),
}


def config(way: str, budget: int, directory: str) -> Config:
    """One of the ways to meet a budget: "offload", "checkpoint" or "both"."""
    away = AsyncOffloadConfig(tiers=("file",), directory=directory)
    return Config(
        memory_budget=budget,
        enable_logging=False,
        enable_checkpointing=way != "offload",
        **({} if way == "checkpoint" else {"async_config": away}),
    )


@dataclass(frozen=True)
class Peak:
    """Two steps of a run.

    Attributes:
        measured_bytes: highest number of live tensor bytes.
        plans: in force, in each step.
        held_bytes: most that the file held at once.
        losses: of the steps.
    """

    measured_bytes: int
    plans: tuple[Any, ...]
    held_bytes: int
    losses: tuple[float, ...]

    @property
    def plan(self) -> Any:
        """That with the highest peak."""
        return max(self.plans, key=lambda plan: plan.predicted.allocated_peak_bytes)


def peak(entry: Entry, settings: Config | None) -> Peak:
    """Builds and trains for two steps under the profiler."""
    plans: list[Any] = []
    kept: list[Any] = []

    def train() -> None:
        run = Run(entry, lambda model: prepare(model, settings))
        for _ in range(_STEPS):
            run.step()
            plans.append(run.plan)
        kept.append((tuple(run.losses), held(run.model)))

    measured = measure_peak(train)
    return Peak(measured, tuple(plans), kept[0][1], kept[0][0])


def prepare(model: nn.Module, settings: Config | None) -> None:
    """Wraps a model, or leaves it alone."""
    if settings is not None:
        memscale.wrap(model, settings)


def held(model: nn.Module) -> int:
    """Most bytes that the model's engine has had in its file."""
    executor = memscale.executor_of(model)
    offload = None if executor is None else executor.in_force.offload
    return 0 if offload is None else offload.counters().get("held_peak_bytes_file", 0)


def timed(entry: Entry, settings: Config, beside: Config, rounds: int) -> tuple[float, ...]:
    """Milliseconds of a plain step and of one so configured; the latter as ratio to plain and to `beside`."""
    gc.collect()
    choices = (None, settings, beside)
    runs = [Run(entry, lambda model, chosen=chosen: prepare(model, chosen)) for chosen in choices]
    alternate(runs, rounds)
    plain, ours, other = (run.seconds for run in runs)
    for run in runs[1:]:
        memscale.detach(run.model)
    ratios = [median([b / a for a, b in zip(base, ours, strict=True)]) for base in (plain, other)]
    return 1e3 * median(plain), 1e3 * median(ours), *ratios


def compare(name: str, given: Any, table: Table) -> list[str]:
    """Measures one model under every budget; returns what is wrong."""
    entry, wrong = MODELS[name], []
    plain = peak(entry, None)
    for share in given.budgets:
        budget = plain.measured_bytes * share // 100
        checkpoints = config("checkpoint", budget, given.directory)
        fits = peak(entry, checkpoints).plan.fits if given.rounds else ""
        for way in ("offload", "both"):
            settings = config(way, budget, given.directory)
            found = peak(entry, settings)
            plan = found.plan
            moves = [choice for choice in plan.active if choice.offloads]
            if not moves:
                print(f"# {name}, {way}, {share} %: the plan offloads nothing", file=sys.stderr)
                continue
            times = timed(entry, settings, checkpoints, given.rounds) if given.rounds else (0.0,) * 4
            predicted = plan.predicted.allocated_peak_bytes
            ratio = found.measured_bytes / predicted
            table.add(
                *(name, way, share, budget, predicted, found.measured_bytes, f"{ratio:.4f}", plan.fits),
                *counts(plan),
                *(sum(item.moved_bytes for item in moves), plan.away_peak_bytes, found.held_bytes),
                *(plain.measured_bytes, *times, fits, plan.slowdown, *rates(given.directory), given.rounds),
            )
            wrong += complaints(f"{name}, {way}, {share} %", found, plain, ratio)
    return wrong


def counts(plan: Any) -> tuple[int, int, int]:
    """Modules that are offloaded; boundaries that leave; modules that are checkpointed."""
    offloaded = sum("offload" in choice.techniques for choice in plan.active)
    return offloaded, sum(choice.boundary for choice in plan.active), len(plan.active) - offloaded


def complaints(what: str, found: Peak, plain: Peak, ratio: float) -> list[str]:
    """What is wrong with a run."""
    said = []
    beyond = found.measured_bytes - found.plan.predicted.allocated_peak_bytes
    if ratio < LEAST or beyond > SMALL:
        said.append(f"{what}: the measured peak is {ratio:.4f} of the predicted one, {beyond:+,} bytes")
    if found.plan.fits and found.measured_bytes > found.plan.budget_bytes:
        said.append(f"{what}: {found.measured_bytes:,} bytes, the budget is {found.plan.budget_bytes:,}")
    if found.losses != plain.losses:
        said.append(f"{what}: losses {found.losses}, plain {plain.losses}")
    return said


def rates(directory: str) -> tuple[int, int]:
    """MB/s to a file in the folder, and back, as the plans count with them."""
    from memscale.hardware.detect import detect

    cpu = torch.device("cpu")
    link = limits.link_for(config("offload", 1 << 40, directory).effective(), detect(cpu), cpu, 1 << 40)
    assert not isinstance(link, str), link
    return link.out_bytes_per_us, link.in_bytes_per_us


def numbers(given: str) -> Sequence[int]:
    """Such as "80,50"."""
    return [int(item) for item in given.split(",")]


def main() -> None:
    """Measures the chosen models."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)} (all)")
    options.add_argument("--directory", default="/var/tmp", help="folder of the file (/var/tmp)")
    options.add_argument("--budgets", type=numbers, default=SHARES, help="percent of the plain peak")
    options.add_argument("--rate", type=int, help="plan as if the file had so many MB/s, each way")
    options.add_argument("--rounds", type=int, default=5, help="timed steps of each run (5); 0: peaks only")
    given = options.parse_args()
    calibrate()
    if given.rate:
        limits._file_rates = lambda _: (given.rate, given.rate)
    table = Table("offload_run", COLUMNS, given.dry)
    wrong: list[str] = []
    names, began = given.models or list(MODELS), time.monotonic()
    for index, name in enumerate(names, 1):
        print(f"# {index}/{len(names)} {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        wrong += compare(name, given, table)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
