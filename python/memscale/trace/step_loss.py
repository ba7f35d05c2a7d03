# SPDX-License-Identifier: Apache-2.0
"""The loss of a traced step, and what the loop holds beside it as backward begins.

What a loop has shown counts first (`LossBytes`), then the caller's own function, then the loss that
`trace.loss` assumes. All of them give a scalar that backward begins at; a trace needs to know nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memscale.errors import ProfileError, add_note
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.output_use import LossBytes, nodes_behind
from memscale.trace.loss import differentiable, loss_of, own_loss, sum_of, unused_in

if TYPE_CHECKING:
    from memscale.techniques.step_facts import StepFacts


_SCALAR_BYTES = 4
"""Of the loss, and of its gradient: a measured loss has its own."""


class LossError(ProfileError):
    """The caller's function gives no loss."""


def step_loss(output: Any, step: StepFacts) -> tuple[Tensor | None, Any]:
    """The loss of a step, and what of it and of the output lives until the step is over.

    Args:
        output: of the model; with several forwards, a list of theirs.
        step: what else decides it.
    """
    outputs = output if step.forwards > 1 else [output]
    if step.loss_bytes is not None:
        return _as_measured(outputs, step, step.loss_bytes)
    if step.loss is not None and step.forwards == 1:
        return _given(step.loss, output)
    loss = loss_of(output, step.use) if step.forwards == 1 else sum_of(map(loss_of, outputs))
    held = _held(output, step)
    if step.differentiates_twice and loss is not None:
        penalty, gradients = _penalty(loss)
        return loss + penalty, (held, gradients)
    return loss, held


def _held(output: Any, step: StepFacts) -> Any:
    """What the loop holds of the output."""
    if step.held is not None and step.forwards == 1:
        leaves = tensors_of(output)
        if len(leaves) == len(step.held):
            return [leaf for leaf, is_held in zip(leaves, step.held, strict=True) if is_held]
    held = None if step.drops_output else output
    if step.beside and own_loss(output) is None:
        leaves = tensors_of(output)
        size = int(step.beside * sum(leaf.numel() * leaf.element_size() for leaf in leaves))
        return held, torch.empty(size, dtype=torch.uint8, device=leaves[0].device)
    return held


def _penalty(loss: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """On the norm of its gradients, and those: of the batch where that needs any, else of the weights."""
    found = {node.variable for node in nodes_behind([loss]) if hasattr(node, "variable")}
    batch = [leaf for leaf in found if not isinstance(leaf, nn.Parameter)]
    leaves = sorted(batch or found, key=torch.numel)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    total = torch.zeros((), device=loss.device)
    for gradient in gradients:
        if gradient is not None:
            rows = (
                gradient.reshape(len(gradient), -1)
                if batch and gradient.dim() > 1
                else gradient.reshape(1, -1)
            )
            total = total + (rows.norm(dim=1) - 1).square().mean()
    return total, gradients


def _given(function: Callable[[Any], Any], output: Any) -> tuple[Tensor, Any]:
    """What the caller's function makes of the output. The loop holds that, too, unless it says otherwise."""
    try:
        made = function(output)
    except Exception as error:
        add_note(error, f"memscale: loss has raised this, given the model's output ({_outline(output)})")
        raise
    loss, held = made if isinstance(made, tuple) and len(made) == 2 else (made, output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError(
            f"loss has returned {_described(loss)}; allowed: a tensor of one element that requires a "
            "gradient, or a pair of that and what the loop holds besides as backward begins (None: nothing)"
        )
    return loss, held


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return form if value.requires_grad else f"{form} without a gradient"


def _outline(output: Any) -> str:
    forms = ", ".join(map(_described, tensors_of(output)[:4]))
    return forms if isinstance(output, Tensor) else f"{type(output).__name__} of {forms}"


def _as_measured(outputs: Sequence[Any], step: StepFacts, taken: LossBytes) -> tuple[Tensor | None, Any]:
    """A loss that takes what the loop's own has taken."""
    leaves = [leaf for output in outputs for leaf in tensors_of(output)]
    used = [leaf for output in outputs for leaf in differentiable(output)]
    use = step.use or taken.use
    unused = [leaf for output in outputs for leaf in unused_in(output, use)]
    used = [leaf for leaf in used if not any(leaf is one for one in unused)]
    if not used:
        return None, None
    flags = taken.dense * len(outputs)
    flags = flags if len(flags) == len(leaves) else (True,) * len(leaves)
    dense = [any(leaf is one and flag for one, flag in zip(leaves, flags, strict=True)) for leaf in used]
    gradients = sum(
        leaf.numel() * leaf.element_size() for leaf, flag in zip(used, dense, strict=True) if flag
    )
    stays = max(taken.left - gradients - 2 * _SCALAR_BYTES, 0)
    held = torch.empty(stays, dtype=torch.uint8, device=used[0].device)
    passing = max(taken.peak - gradients - stays - _SCALAR_BYTES, 0)
    loss: Tensor = _Measured.apply(passing, dense, taken.drops_output, *used)  # type: ignore[no-untyped-call]
    return loss, held if taken.drops_output else (held, list(outputs))


class _Measured(torch.autograd.Function):
    """A loss of any numbers: it takes memory as measured, and gives each output a gradient."""

    @staticmethod
    def forward(ctx: Any, passing: int, dense: list[bool], saves: bool, *outputs: Tensor) -> Tensor:
        """Args: bytes that go again, which gradients are dense, whether it saves the outputs, those."""
        ctx.gradients = [
            torch.empty_like(leaf) if flag else leaf.new_zeros(()).expand(leaf.shape)
            for leaf, flag in zip(outputs, dense, strict=True)
        ]
        ctx.save_for_backward(*(outputs if saves else ()))
        loss = outputs[0].new_zeros((), dtype=torch.float32)
        torch.empty(passing, dtype=torch.uint8, device=loss.device)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradients that were there all along."""
        made, ctx.gradients = ctx.gradients, []
        return (None, None, None, *made)


def note_reached(output: Any, graph: Any, at: list[int]) -> None:
    """Has the first operation after backward has come to the outputs noted.

    Args:
        output: of the model, of any structure.
        graph: is recorded into.
        at: gets the operation's number.
    """

    def note(gradients: tuple[Tensor | None, ...]) -> None:
        if not at:
            at.append(graph.op_count)

    for node in {leaf.grad_fn for leaf in tensors_of(output) if leaf.grad_fn is not None}:
        node.register_prehook(note)
