# SPDX-License-Identifier: Apache-2.0
"""The table of step techniques: one row each.

A step technique changes how a step computes. The planner attaches it before it traces, so that the trace has
its operations and its memory, and decides on checkpoints on top of it. See `core/variants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from memscale.techniques.base import StepAttachment, Surroundings
from memscale.techniques.optimizer import gradient_offload, state_offload, step_in_backward, weight_offload
from memscale.techniques.precision import bf16_weights, mixed_precision
from memscale.techniques.tiles import attention_tiles, loss_tiles, row_search, row_tiles

if TYPE_CHECKING:
    from memscale.config.config import EffectiveConfig

Find = Callable[[nn.Module, Surroundings], Sequence[StepAttachment]]
"""Places in a bare model where a technique could attach, in module order; cheap, and leaves it as it is."""

WhyNot = Callable[[nn.Module, Surroundings], str]
"""Why there is no such place, for the plan's notes; "" if there is nothing to say."""


@dataclass(frozen=True)
class StepTechnique:
    """One step technique.

    Attributes:
        name: as in `Choice` and `StepChoice`.
        what: what it does, for people.
        exact: loss and gradients keep every bit of plain PyTorch at the same precision.
        asked: it is attached because the user asked for it, whether or not memory is short.
        wanted: whether a configuration has it.
        find: where it could attach.
        why_not: why it found nothing.
        last: it is looked at only where nothing without it fits.
        even_resident: it takes less memory even where it leaves all parts as they are.
    """

    name: str
    what: str
    exact: bool
    asked: bool
    wanted: Callable[[EffectiveConfig], bool]
    find: Find
    why_not: WhyNot = lambda model, around: ""
    last: bool = False
    even_resident: bool = False


STEP_TECHNIQUES: tuple[StepTechnique, ...] = (
    StepTechnique(
        name="autocast",
        what="mixed precision: the forward runs under autocast",
        exact=True,
        asked=True,
        wanted=lambda config: config.use_mixed_precision,
        find=lambda model, around: mixed_precision.find(model, around.hardware),
        why_not=lambda model, around: mixed_precision.why_not(model, around.hardware),
    ),
    StepTechnique(
        name="loss_tile",
        what="loss tiles: a head's logits exist for some tokens at a time, gradients with them",
        exact=False,
        asked=False,
        wanted=lambda config: config.enable_tiling,
        find=lambda model, around: loss_tiles.find(model, around.left_out),
    ),
    StepTechnique(
        name=row_tiles.NAME,
        what="MLP tiles: parts that treat each token alone run on some tokens at a time",
        exact=False,
        asked=False,
        wanted=lambda config: config.enable_tiling,
        find=lambda model, around: row_search.find(model, around.left_out, around.known),
    ),
    StepTechnique(
        name=attention_tiles.NAME,
        what="attention tiles: scores that no fused kernel computes exist for some queries at a time",
        exact=False,
        asked=False,
        wanted=lambda config: config.enable_tiling,
        find=lambda model, around: attention_tiles.find(model, around.left_out),
    ),
    StepTechnique(
        name=bf16_weights.NAME,
        what="BF16 weights: their FP32 masters are weights and a rest in the optimizer's state",
        exact=False,
        asked=False,
        wanted=lambda config: config.use_mixed_precision,
        find=bf16_weights.find,
        why_not=bf16_weights.why_not,
    ),
    StepTechnique(
        name=weight_offload.NAME,
        what="offloaded weights: a forward and a backward have the blocks that they are at",
        exact=True,
        asked=False,
        wanted=lambda config: config.enable_offloading and config.async_offload,
        find=weight_offload.find,
        why_not=weight_offload.why_not,
        last=True,
    ),
    StepTechnique(
        name=state_offload.NAME,
        what="optimizer state in a file: a step reads and writes it piece by piece",
        exact=True,
        asked=False,
        wanted=lambda config: config.enable_offloading and config.async_offload,
        find=state_offload.find,
        why_not=state_offload.why_not,
        even_resident=True,  # it steps piece by piece all the same
    ),
    StepTechnique(
        name=step_in_backward.NAME,
        what="step in backward: a parameter is stepped when its gradient is complete, which goes at once",
        exact=True,
        asked=True,
        wanted=lambda config: config.step_in_backward,
        find=step_in_backward.find,
        why_not=step_in_backward.why_not,
    ),
    StepTechnique(
        name=gradient_offload.NAME,
        what="gradient release: a gradient leaves when it is complete, and comes back when it is used",
        exact=True,
        asked=False,
        wanted=lambda config: config.enable_offloading and config.async_offload,
        find=gradient_offload.find,
        why_not=gradient_offload.why_not,
    ),
)
"""In the order in which they are attached."""
