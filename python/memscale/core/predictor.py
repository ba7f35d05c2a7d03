# SPDX-License-Identifier: Apache-2.0
"""Implements `memscale.predict`: a step of any model on any device, as a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from memscale.core.advice import advice_of
from memscale.core.planner import Planner
from memscale.core.profiler import normalize_sample
from memscale.core.scaling import Scaling
from memscale.core.wrapping import executor_of
from memscale.trace.static import has_data
from memscale.weights.placement import device_of_use

if TYPE_CHECKING:
    from torch import nn

    from memscale.config.config import Config
    from memscale.hardware.detect import Hardware
    from memscale.plans.plan import Prediction
    from memscale.techniques.step_facts import StepFacts


def predict_step(
    model: nn.Module,
    config: Config,
    sample: Any,
    step: StepFacts,
    hardware: Hardware,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Prediction:
    """The prediction of one training step under the plan of a configuration.

    Args:
        model: wrapped or not; left as it was.
        config: its plan is predicted, under its budget.
        sample: one training batch, as `normalize_sample` takes it.
        step: what else decides the step.
        hardware: what it is to run on.
        around: what every trace is made in, those of other sizes included.

    Raises:
        ProfileError: the model has no data and cannot be traced without.
        Exception: the model rejects the sample.
    """
    batch = normalize_sample(sample)
    planner = Planner(model, config, step, hardware, may_run=may_run(model, batch))
    with around(), bare(model):
        plan = planner.plan_and_plain(*batch).plan
    return replace(
        plan.predicted,
        advice=advice_of(plan),
        plan=plan,
        plain=plan.plain,
        scaling=Scaling(
            replace(planner, may_run=False), sample, batch, plan, lambda: _both(around(), bare(model))
        ),
    )


def evaluation_step(model: nn.Module, step: StepFacts, here: bool) -> StepFacts:
    """A forward without gradients, after `model.eval()`.

    Args:
        model: wrapped or not.
        step: has the optimizer whose state counts.
        here: on the model's own device, where a wrapped model has what its plan has made of it.
    """
    step = replace(step, training=False, gradients=False)
    executor = executor_of(model)
    if not here or executor is None or executor.planned is None:
        return step
    return executor.in_force.as_traced(executor.planned, step)


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def bare(model: nn.Module) -> AbstractContextManager[None]:
    """Takes the techniques of a wrapped model off for a block."""
    executor = executor_of(model)
    return nullcontext() if executor is None else executor.bare()


def may_run(model: nn.Module, batch: Any) -> bool:
    """Whether a real step would touch nothing but this machine's memory."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return all(has_data(tensor) and device_of_use(tensor).type == "cpu" for tensor in tensors)
