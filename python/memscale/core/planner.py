# SPDX-License-Identifier: Apache-2.0
"""Hardware, profile, decision: everything of the pipeline that leaves the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memscale.core.config import Config
from memscale.core.decision_engine import DecisionEngine
from memscale.core.hardware import Hardware, budget_bytes, detect
from memscale.core.plan import Plan
from memscale.core.profiler import MemoryProfiler
from memscale.core.tracer import StepFacts, Trace
from memscale.techniques.use_cache import CacheSwitch


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from.

    Attributes:
        cache_off: the plan holds with the key/value cache switched off.
    """

    plan: Plan
    trace: Trace
    hardware: Hardware
    cache_off: bool


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are (its buffers, for a model without any; else the CPU)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


@dataclass(frozen=True)
class Planner:
    """Plans steps of one bare model, which is left as it was.

    Attributes:
        may_run: the model may be run for real, if it cannot be traced on fakes.
    """

    model: nn.Module
    config: Config
    step: StepFacts
    hardware: Hardware
    may_run: bool = True

    @cached_property
    def engine(self) -> DecisionEngine:
        """Decides under the configuration's budget."""
        return DecisionEngine(
            self.config.effective(), self.hardware, budget_bytes(self.config, self.hardware)
        )

    @property
    def switches_cache(self) -> bool:
        """Whether a plan would switch the model's key/value cache off."""
        return bool(CacheSwitch(self.model).configs) and self.engine.config.enable_checkpointing

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], cache_off: bool) -> Trace:
        """Traces one step.

        Raises:
            Exception: the model rejects the batch.
        """
        step = replace(self.step, target=self.hardware.target)
        profiler = MemoryProfiler(self.engine.config)
        with _without_cache(self.model) if cache_off else nullcontext():
            return profiler.profile(self.model, args, kwargs, step, self.may_run)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The plan for a batch, with as few traces as will do."""
        cache_off = self.switches_cache
        trace = self.trace(args, kwargs, cache_off)
        planned = Planned(self.engine.decide(trace), trace, self.hardware, cache_off)
        if not cache_off or planned.plan.active or not planned.plan.fits:
            return planned
        # Nothing to do without the cache. If the step fits with it too, the model is not touched at all.
        trace = self.trace(args, kwargs, cache_off=False)
        with_cache = self.engine.decide(trace)
        if with_cache.active:
            return planned
        return Planned(with_cache, trace, self.hardware, cache_off=False)

    def plan_and_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The same plan; its `plain` is the step of the untouched model, its cache included."""
        as_is = self.trace(args, kwargs, cache_off=False)
        plan = self.engine.decide(as_is)
        if not self.switches_cache or (plan.fits and not plan.active):
            return Planned(plan, as_is, self.hardware, cache_off=False)
        trace = self.trace(args, kwargs, cache_off=True)
        return Planned(self.engine.decide(trace, as_is), trace, self.hardware, cache_off=True)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    switch = CacheSwitch(model)
    switch.attach()
    try:
        yield
    finally:
        switch.undo()


def make_plan(
    model: nn.Module, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepFacts
) -> Planned:
    """Plans one training step of a bare model on its own device. The model is left as it was.

    Raises:
        Exception: the model rejects the batch, or the device is not one that MemScale knows.
    """
    return Planner(model, config, step, detect(device_of(model))).plan(args, kwargs)
