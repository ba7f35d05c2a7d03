# SPDX-License-Identifier: Apache-2.0
"""What the watch for running out of memory needs of an executor: its facts, and a tighter plan on demand."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from memscale.core.decision_engine import DecisionEngine
from memscale.core.planner import Planned, device_of
from memscale.hardware.detect import Budget
from memscale.plans.budget import budget_for
from memscale.survival.facts import Facts
from memscale.survival.watch import OomWatch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memscale.config.config import Config
    from memscale.core.in_force import InForce
    from memscale.plans.plan import Plan


class _Executor(Protocol):
    """The part of `Executor` that is used here."""

    config: Config
    planned: Planned | None
    in_force: InForce

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]: ...

    def tighten(self, planned: Planned) -> None: ...


def oom_watch(executor: _Executor) -> OomWatch:
    """The watch of a wrapped model. It holds the executor weakly, which owns it."""
    ref = weakref.ref(executor)
    survives = executor.config.on_oom == "survive"
    guarded, snapshots = executor.config.guard, executor.config.oom_snapshot
    return OomWatch(
        executor.model, survives, guarded, snapshots, partial(_facts, ref), partial(_tighten, ref)
    )


def _facts(ref: weakref.ref[_Executor]) -> Facts:
    executor = ref()
    if executor is None:
        raise ReferenceError("the wrapped model no longer exists")
    planned = executor.planned
    return Facts(
        None if planned is None else planned.plan,
        None if planned is None else planned.trace,
        [item.name for item in executor.in_force.path],
        executor.optimizers,
        device_of(executor.model),
        executor.in_force.own_step is not None,
    )


def _tighten(ref: weakref.ref[_Executor], wanted_bytes: int) -> Plan | None:
    """Attaches the fastest plan for the step at hand whose predicted peak is at most this.

    It is decided on the trace that the present plan has, so nothing is run, and no memory taken.

    Returns:
        The plan; None where there is none that takes less than the present one.
    """
    executor = ref()
    if executor is None or executor.planned is None:
        return None
    planned = executor.planned
    budget = Budget(budget_for(wanted_bytes), "what was left when a step ran out of memory")
    link = None if planned.link is None else planned.link.for_decision
    engine = DecisionEngine(executor.config.effective(), planned.hardware, budget, link=link)
    plan = engine.decide(planned.trace)
    if plan.predicted.device_used_peak_bytes >= planned.plan.predicted.device_used_peak_bytes:
        return None
    plan = replace(plan, steps=planned.plan.steps, plain=planned.plan.plain, notes=planned.plan.notes)
    executor.tighten(replace(planned, plan=plan))
    return plan
