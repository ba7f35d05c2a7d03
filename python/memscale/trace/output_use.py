# SPDX-License-Identifier: Apache-2.0
"""The outputs of a model that a trace assumes its loss to go through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from memscale.techniques.step_facts import StepFacts
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.output_use import OutputUse, nodes_behind, reached
from memscale.trace.loss import cached_in, own_loss

if TYPE_CHECKING:
    from memscale.trace.recorder import GraphRecorder


def note_use(recorder: GraphRecorder, output: Any, loss: Tensor | None, step: StepFacts) -> None:
    """The recorder notes what this trace assumes of the outputs, and what another would."""
    if step.forwards > 1 or loss is None:
        return
    is_known = step.use is not None or step.loss is not None or step.loss_bytes is not None
    if not is_known and own_loss(output) is None:
        recorder.another_use = one_alone(output)
    recorder.use = OutputUse(reached(loss, tensors_of(output)))


def held_gradients(output: Any) -> list[Tensor]:
    """A list that will hold the gradients that backward makes for the outputs; its owner empties it.

    Of a model with a loss of its own that is the loss's: a loop has the other outputs for show.
    """
    held: list[Tensor] = []
    for one in output if isinstance(output, list) else [output]:
        own = own_loss(one)
        for leaf in tensors_of(one) if own is None else [own]:
            if leaf.requires_grad:
                leaf.register_hook(held.append)
    return held


_LEAST_SHARE = 0.1
"""Of a graph's nodes: outputs that have fewer for themselves are not worth another trace."""


def one_alone(output: Any) -> OutputUse | None:
    """The use of an output's first or last tensor alone that leaves most of the graph unused.

    None where it would leave little of it.
    """
    leaves, cached = tensors_of(output), cached_in(output)
    ends = [place for place, leaf in enumerate(leaves) if leaf.grad_fn is not None and id(leaf) not in cached]
    if len(ends) < 2:
        return None
    whole = len(nodes_behind(leaves))
    sizes = {place: len(nodes_behind([leaves[place]])) for place in (ends[0], ends[-1])}
    place = min(sizes, key=lambda end: sizes[end])
    if whole - sizes[place] < _LEAST_SHARE * whole:
        return None
    return OutputUse(reached(leaves[place], leaves))
