# SPDX-License-Identifier: Apache-2.0
"""Gradients that are there before a traced step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from memscale import _core

if TYPE_CHECKING:
    from torch import nn

    from memscale.techniques.step_facts import StepFacts
    from memscale.trace.recorder import GraphRecorder


def those_present(
    step: StepFacts, trainable: list[nn.Parameter], with_gradient: Callable[[], set[int]]
) -> list[nn.Parameter]:
    """Of a model's trainable parameters, those whose gradients are there before the step.

    A training step that finds any has found those of an earlier one, and keeps all of them. What an
    evaluation finds is what there is.

    Args:
        step: is traced.
        trainable: in the trace.
        with_gradient: gives the ids of those whose gradients are in memory outside of it.
    """
    if step.gradients:
        return trainable if step.grads_present else []
    found = with_gradient()
    return [parameter for parameter in trainable if id(parameter) in found]


def make_gradients(recorder: GraphRecorder, parameters: list[nn.Parameter]) -> None:
    """Gives these parameters gradients that were there before the step."""
    recorder.paused = True
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            buffer = recorder.resident(parameter.grad, _core.CATEGORY_GRADIENT)
            recorder.label(buffer, parameter, recorder.names[id(parameter)])
    recorder.paused = False
