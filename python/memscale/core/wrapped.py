# SPDX-License-Identifier: Apache-2.0
"""A wrapped model, as the executor's helpers and observers see it: the part of `Executor` that they use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memscale.config.config import Config
    from memscale.core.planner import Planned
    from memscale.offload.figures import OffloadFigures
    from memscale.plans.plan import Plan
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.callers import Callers
    from memscale.torchkit.open_graph import OpenGraphs

EXECUTOR: Final = "_memscale_executor"
"""The attribute of a wrapped model that has its executor."""


class Wrapped(Protocol):
    """A wrapped model. See `Executor` for what each member is."""

    config: Config
    planned: Planned | None
    idle: bool
    planning_seconds: float
    open: OpenGraphs
    callers: Callers

    @property
    def model(self) -> nn.Module:
        """The module."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""

    @property
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Those that step it."""

    @property
    def switched_off(self) -> list[str]:
        """What the model does on its own and has been switched off."""

    def bare(self, keep: Collection[str] = ()) -> AbstractContextManager[None]:
        """Runs a block on the model without techniques."""

    def facts_of_evaluation(self, forward: Callable[..., Any]) -> StepFacts:
        """What a forward without gradients is traced with."""

    def offload_figures(self, events: bool = True) -> OffloadFigures | None:
        """What the plan's engine has done."""


class Observer(Protocol):
    """Sees models that are wrapped and detached."""

    def attach(self, executor: Wrapped) -> None:
        """A model is wrapped from now on."""

    def detach(self, executor: Wrapped) -> None:
        """It is no more."""


class ForwardObserver(Protocol):
    """Sees forwards with gradients of wrapped models."""

    def starts(self, executor: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One is about to run, under the plan for it."""

    def returned(self, executor: Wrapped, output: Any) -> None:
        """It has run."""


OBSERVERS: Final[list[Observer]] = []
"""Those of this process, in the order in which they see a model."""

FORWARD_OBSERVERS: Final[list[ForwardObserver]] = []
"""Likewise, of forwards. Empty unless a run is recorded."""

PLAN_OBSERVERS: Final[list[Callable[[Wrapped], None]]] = []
"""Called when a plan has been attached to a model. They raise nothing."""


def plan_attached(executor: Wrapped) -> None:
    """A plan is in force, the first one or another."""
    for observer in PLAN_OBSERVERS:
        observer(executor)
