# SPDX-License-Identifier: Apache-2.0
"""Hardware, profile, decision: everything of the pipeline that leaves the model alone."""

from __future__ import annotations

from dataclasses import dataclass
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


def make_plan(
    model: nn.Module, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepFacts
) -> Planned:
    """Plans one training step of a bare model, which is left as it was.

    Raises:
        Exception: the model rejects the batch, or the device is not one that MemScale knows.
    """
    effective = config.effective()
    hardware = detect(device_of(model))
    engine = DecisionEngine(effective, hardware, budget_bytes(config, hardware))
    profiler = MemoryProfiler(effective)
    switch = CacheSwitch(model)
    if not switch.configs or not effective.enable_checkpointing:
        trace = profiler.profile(model, args, kwargs, step)
        return Planned(engine.decide(trace), trace, hardware, cache_off=False)
    switch.attach()
    try:
        trace = profiler.profile(model, args, kwargs, step)
    finally:
        switch.undo()
    planned = Planned(engine.decide(trace), trace, hardware, cache_off=True)
    if planned.plan.active or not planned.plan.fits:
        return planned
    # Nothing to do without the cache. If the step fits with it too, the model is not touched at all.
    trace = profiler.profile(model, args, kwargs, step)
    with_cache = engine.decide(trace)
    return planned if with_cache.active else Planned(with_cache, trace, hardware, cache_off=False)
