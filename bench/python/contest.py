# SPDX-License-Identifier: Apache-2.0
"""Training runs of one model beside each other: what each takes at once, and how long each step lasts.

    peak    tensor bytes, in a run of its own that is built and trained for two steps, under the profiler
    time    steps of both runs in turn, A B, B A, A B, …: a machine that slows down slows both down. What
            counts is the median of the ratios within a round

Every run starts from the same seed, so that the losses of its first steps tell whether it computes the same.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from architectures import Entry, call
from common import measure_peak, median
from torch import nn

import memscale

Prepare = Callable[[nn.Module], object]
"""Changes a model that is about to be trained: checkpoints some of it, wraps it."""

_STEPS = 2
"""Of a measured run: the optimizer's state appears in the first."""


def as_it_is(model: nn.Module) -> None:
    """The plain model."""


def under(budget: int) -> Prepare:
    """MemScale with a budget in bytes."""
    return lambda model: memscale.wrap(model, memscale.Config(memory_budget=budget, enable_logging=False))


class Run:
    """One variant of a model, its optimizer and its batch.

    Args:
        entry: model, batch and loss.
        prepare: what makes the variant.
        around: what is in force while it steps.
    """

    def __init__(
        self,
        entry: Entry,
        prepare: Prepare = as_it_is,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        torch.manual_seed(0)
        self.entry = entry
        self.model = entry.build().train()
        prepare(self.model)
        self.around = around
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = entry.batch()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> float:
        """One timed training step; its seconds."""
        with self.around():
            began = time.perf_counter()
            output = call(self.model, self.batch)
            loss = output.loss if self.entry.loss is None else self.entry.loss(output)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss.detach()))
        return self.seconds[-1]

    def warm(self) -> None:
        """A step that does not count. MemScale plans for the first one, and anew if the second differs."""
        for _ in range(_STEPS):
            self.step()
        self.seconds.clear()

    @property
    def plan(self) -> Any:
        """MemScale's plan in force, or None."""
        executor = memscale.executor_of(self.model)
        return None if executor is None else executor.plan


@dataclass(frozen=True)
class Measured:
    """What a run took.

    Attributes:
        peak_bytes: highest number of live tensor bytes in building the model and two steps.
        losses: of the steps.
        plan: MemScale's, at the end, or None.
        seconds: of all of it.
    """

    peak_bytes: int
    losses: tuple[float, ...]
    plan: Any
    seconds: float


def measure(
    entry: Entry,
    prepare: Prepare = as_it_is,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Measured:
    """Builds a variant and trains it for two steps under the profiler."""
    losses: list[float] = []
    plans: list[Any] = []

    def train() -> None:
        run = Run(entry, prepare, around)
        for _ in range(_STEPS):
            run.step()
        losses.extend(run.losses)
        plans.append(run.plan)

    began = time.perf_counter()
    peak = measure_peak(train)
    return Measured(peak, tuple(losses), plans[0], time.perf_counter() - began)


@dataclass(frozen=True)
class Duel:
    """Seconds per step of two runs, and of the second in units of the first."""

    first: float
    second: float
    ratio: float


def duel(first: Run, second: Run, rounds: int) -> Duel:
    """Steps of two runs in turn; who begins alternates."""
    for run in (first, second):
        run.warm()
    gc.collect()
    for order in itertools.islice(itertools.cycle([(first, second), (second, first)]), rounds):
        for run in order:
            run.step()
    ratios = [b / a for a, b in zip(first.seconds, second.seconds, strict=True)]
    return Duel(median(first.seconds), median(second.seconds), median(ratios))


def alternate(runs: Iterable[Run], rounds: int) -> None:
    """Steps of any number of runs in turn, after a warm-up."""
    chosen = list(runs)
    for run in chosen:
        run.warm()
    for _ in range(rounds):
        for run in chosen:
            run.step()
