# SPDX-License-Identifier: Apache-2.0
"""Wraps a model from checked arguments (`begin`), and finds what a wrapped one has (`executor_of`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale import log
from memscale.config.config import Config
from memscale.core.arguments import model_of
from memscale.core.executor import Executor
from memscale.core.profiler import normalize_sample
from memscale.core.wrapped import EXECUTOR
from memscale.techniques.left_out import require_matches
from memscale.techniques.precision.loss_scale import LossScale
from memscale.torchkit.replicas import refuse


def begin(
    model: nn.Module,
    config: Config,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None = None,
    grads_present: bool = False,
    drops_output: bool = False,
    method: str = "forward",
    numbered: bool = False,
    loss: Callable[[Any], Any] | None = None,
) -> Executor:
    """Wraps a model: the sample in one form, an old plan off, the log set up, a new executor started.

    Args:
        model: the module.
        config: what to do.
        sample_input: a training batch to plan for; None: the first one that the loop brings.
        optimizer: trains the model, as far as it is known.
        grads_present: steps find gradients of earlier ones.
        drops_output: the loop has the loss alone when backward begins.
        method: of the model, which the loop calls for a step: what is planned and watched.
        numbered: the last argument of that method is the number of the batch.
        loss: as in `StepFacts`.

    Raises:
        BaseException: as `Executor.start`. A plan that was there before is in force again.
    """
    refuse(model)
    require_matches(model, config)
    sample = None if sample_input is None else normalize_sample(sample_input)
    wrapped = executor_of(model)
    try:
        if wrapped is not None:
            wrapped.stop()
        log.setup(config)
        executor = Executor(model, config, optimizer)
        executor.drops_output, executor.in_force.method = drops_output, method
        executor.values.numbered, executor.loss = numbered, loss
        if wrapped is not None and isinstance(executor.loss_scale, LossScale):
            executor.loss_scale.take_over(wrapped.loss_scale)
        executor.start(sample, grads_present)
    except BaseException:
        if wrapped is not None and executor_of(model) is None:
            wrapped.resume()
        raise
    return executor


def executor_of(target: Any) -> Executor | None:
    """What trains a wrapped model: the plan in force, and figures of what it has done.

    Args:
        target: what was given to `wrap`.

    Returns:
        Its executor, whose `plan` is None until the plan has been made; None if the model is not wrapped.

    Raises:
        TypeError: `target` is no `nn.Module`, and no trainer.

    Example:
        >>> memscale.wrap(model, sample_input=batch)
        >>> print(memscale.executor_of(model).plan.explain())
    """
    found: Executor | None = model_of(target).__dict__.get(EXECUTOR)
    return found
