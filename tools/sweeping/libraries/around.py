# SPDX-License-Identifier: Apache-2.0
"""What real loops and libraries do around models: `situation/model/budget`, plain and wrapped, bit by bit.

Budgets: "1" is one that nothing meets, so that the smallest plan is attached; "60" is 60 % of the plain peak.
With "1" the model is planned when it is wrapped, where that is possible, with "60" in the first step.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from sweeping import digests, remains
from sweeping.libraries import around_contexts, around_loops, around_losses, around_modules, torchvision_ops
from sweeping.libraries.around_loop import SITUATIONS, Loop, Situation
from sweeping.libraries.around_models import KINDS, Kind
from sweeping.peaks import peak_bytes
from sweeping.trial import Plain, Planned, one_line

if torchvision_ops.is_installed():
    torchvision_ops.declare()  # transformers imports it

DISTRIBUTIONS = ("torch", "transformers", "peft")

TABLES = (around_contexts, around_loops, around_losses, around_modules)
"""The modules whose functions are the situations."""

_BUDGETS = ("1", "60")


def names() -> list[str]:
    return [
        f"{item.name}/{kind}/{budget}"
        for item in SITUATIONS.values()
        for kind in item.kinds
        for budget in _BUDGETS
    ]


def _found(name: str) -> tuple[Situation, Kind, str]:
    situation, kind, budget = name.split("/")
    return SITUATIONS[situation], KINDS[kind], budget


def plain(name: str) -> dict[str, Any]:
    """In place of `trial.plain`."""
    situation, kind, _ = _found(name)
    found = Plain(recipe={})
    if situation.needs and importlib.util.find_spec(situation.needs) is None:
        found.recipe, found.reason = None, f"needs {situation.needs}"
        return asdict(found)
    try:
        for run in range(2):
            loop = Loop(kind, lambda model: None)
            situation.run(loop)
            if run == 0:
                found.steps = loop.steps
            for expected, got in zip(found.steps, loop.steps, strict=True):
                found.unrepeatable += digests.different(expected, got)
        del loop
        found.peak = peak_bytes(lambda: situation.run(Loop(kind, lambda model: None)))
    except Exception as error:
        found.recipe, found.reason = None, one_line(error)
    return asdict(found)


def planned(name: str, recipe: Any, peak: int, share: float) -> dict[str, Any]:
    """In place of `trial.planned`."""
    import memscale

    situation, kind, budget = _found(name)
    found = Planned(budget=1 if budget == "1" else int(peak * share), deferred=budget != "1")
    config = memscale.Config(memory_budget=found.budget, enable_logging=False)
    wrapped: list[nn.Module] = []

    def wrap(model: nn.Module) -> None:
        start = time.perf_counter()
        sample = None if found.deferred else kind.batch(0)[:1]
        memscale.wrap(model, config, sample_input=sample)
        found.plan_seconds = time.perf_counter() - start
        wrapped.append(model)

    before = remains.of_process()
    loop = Loop(kind, wrap)
    try:
        situation.run(loop)
    except Exception as error:
        found.errors.append((f"after {len(loop.steps)} records", one_line(error)))
    found.steps = loop.steps
    for model in wrapped:
        plan = getattr(memscale.executor_of(model), "plan", None)
        if plan is not None:
            found.fits, found.method, found.active = plan.fits, plan.profile, len(plan.active)
        try:
            memscale.detach(model)
        except Exception as error:
            found.errors.append(("detach", one_line(error)))
    found.left = [("detach", line) for line in remains.changed(before, remains.of_process())]
    found.left += [("detach", line) for model in wrapped for line in _marks(model)]
    torch.autograd.set_detect_anomaly(False)
    found.fakes = [("detach", where) for where in remains.fakes()]
    return asdict(found)


def _marks(model: nn.Module) -> list[str]:
    """Attributes of ours that are still there."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "memscale" in name or "memscale" in str(getattr(type(value), "__module__", ""))
    ]
