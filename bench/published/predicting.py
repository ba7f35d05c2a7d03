# SPDX-License-Identifier: Apache-2.0
"""A recipe's peak: predicted without a card, or measured on one.

Prediction is `memscale.predict` wherever its arguments can say what the run does. Two things they cannot
say: gradients that are there before forward, and "every block is checkpointed" instead of "fit this
budget". Those recipes go one door further in, through the planner's own trace and the core's replay.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import torch
from recipes import Recipe
from torch import nn

import memscale
from memscale import _core
from memscale.core.devices import resolve_device
from memscale.core.planner import Planner
from memscale.techniques.step_facts import StepFacts
from memscale.trace.step import Trace


@dataclass(frozen=True)
class Peaks:
    """Peaks of one run, bytes; `reserved` and `device_used` as PyTorch and nvidia-smi count."""

    allocated: int
    reserved: int
    device_used: int

    def of(self, recipe: Recipe) -> float:
        """The figure that the source printed, in its unit."""
        return float(getattr(self, recipe.metric) / recipe.unit)

    def fit(self, recipe: Recipe) -> bool:
        """Whether the run fits its card."""
        return self.device_used <= resolve_device(recipe.device).total_bytes


def predicted(recipe: Recipe) -> Peaks:
    """The peaks of a recipe, from a model on "meta"."""
    with torch.device("meta"):
        model = recipe.build().train()
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad])
    sample = recipe.sample("meta")
    if recipe.blocks is None and not recipe.keeps_gradients:
        config = memscale.Config(enable_checkpointing=False, enable_offloading=False)
        made = memscale.predict(model, optimizer, config, sample, recipe.device)
        plain = made.plain or made
        context = recipe.context_bytes or plain.context_bytes
        return Peaks(
            plain.allocated_peak_bytes, plain.reserved_peak_bytes, plain.reserved_peak_bytes + context
        )
    step = StepFacts(optimizer=optimizer, grads_present=recipe.keeps_gradients)
    hardware = resolve_device(recipe.device)
    planner = Planner(model, memscale.Config(), step, hardware, may_run=False)
    trace = planner.trace((), sample, cache_off=recipe.blocks is not None)
    plan = None if recipe.blocks is None else _every_block(trace, recipe.blocks)
    replay = _core.replay(trace.graph, plan, sim={"kind": "cuda"})
    reserved = replay["stats"]["reserved_peak_bytes"]
    context = recipe.context_bytes or hardware.context_bytes
    return Peaks(replay["stats"]["allocated_peak_bytes"], reserved, reserved + context)


def _every_block(trace: Trace, kind: str) -> _core.Plan:
    """The plan that checkpoints every module of a class."""
    modules = [number for number, (_, name) in enumerate(trace.modules) if name == kind]
    choices = [(number, "checkpoint", "chosen", 1, 0, 0) for number in modules]
    return _core.Plan.build(choices, {"graph_digest": trace.graph.digest})


def measured(recipe: Recipe, steps: int = 2) -> Peaks:
    """The peaks of a recipe that really runs on the present CUDA device, with PyTorch's own checkpointing."""
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = recipe.build().train()
    if recipe.blocks is not None:
        _checkpoint_blocks(model, recipe.blocks)
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cuda", enabled=recipe.half is torch.float16)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        for _ in range(recipe.accumulate):
            _pass(model, recipe, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not recipe.keeps_gradients)
    stats = torch.cuda.memory_stats()
    reserved = stats["reserved_bytes.all.peak"]
    return Peaks(stats["allocated_bytes.all.peak"], reserved, reserved + recipe.context_bytes)


def _pass(model: nn.Module, recipe: Recipe, scaler: Any) -> None:
    output = model(**recipe.sample("cuda"))
    loss = output["loss"] if isinstance(output, dict) else output.loss
    scaler.scale(loss / recipe.accumulate).backward()


def _checkpoint_blocks(model: nn.Module, kind: str) -> None:
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        if type(module).__name__ == kind:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
