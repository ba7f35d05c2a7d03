# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a tile, whose gradients of weights are added up inside the product that makes them.

    autograd alone    grad.t() @ x  ──► a tensor as large as the weight ──► sum += it
    here              sum = sum + grad.t() @ x                              one call, no such tensor

Half of the cost of small tiles were those additions. It needs a product and a sum of one dtype, so under
autocast, and for weights in half precision, which are summed in float32, autograd's way is taken.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memscale.techniques.tiles.tile_parts import GradientSum, Sums
from memscale.torchkit.forward_slot import is_replaced

_DTYPES = (torch.float32, torch.float64)


class Hold(torch.autograd.Function):
    """Saves tensors before anything is computed from them.

    That is where a recompute ends, if nothing behind it is wanted.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *held: Tensor) -> Tensor:
        """Saves `held`, and returns what `held_by` finds it with; `anchor` needs a gradient."""
        ctx.save_for_backward(*held)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """There is nothing to pass on."""
        return (None,) * len(ctx.needs_input_grad)


def held_by(anchor: Tensor) -> tuple[Tensor, ...]:
    """What `Hold` has saved, by its result."""
    saved: tuple[Tensor, ...] = anchor.grad_fn.saved_tensors  # type: ignore[union-attr]
    return saved


class _Product(torch.autograd.Function):
    """x @ weight, or x @ weight.t(), plus bias, of whose weight no gradient leaves."""

    @staticmethod
    def forward(
        ctx: Any, sums: Sums, held: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, linear: bool
    ) -> Tensor:
        ctx.sums, ctx.held, ctx.linear, ctx.number = sums, held, linear, id(weight)
        ctx.save_for_backward(weight)
        rows = x.reshape(-1, x.shape[-1])
        factor = weight.t() if linear else weight
        made = torch.mm(rows, factor) if bias is None else torch.addmm(bias, rows, factor)
        # No view: what is written to it in place must not go through autograd's copies of views.
        result: Tensor = torch.ops.aten._unsafe_view.default(made, [*x.shape[:-1], made.shape[-1]])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        (x,) = held_by(ctx.held)
        (weight,) = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        total: GradientSum = ctx.sums.by_alias[ctx.number]
        total.add_product(*((grad.t(), rows) if ctx.linear else (rows.t(), grad)))
        of_x = None
        if ctx.needs_input_grad[2]:
            of_x = torch.mm(grad, weight if ctx.linear else weight.t()).view(x.shape)
        of_bias = grad.sum(0) if ctx.needs_input_grad[4] else None
        return None, None, of_x, None, of_bias, None


def layers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Layers among some modules that do nothing but such a product: `nn.Linear`, and GPT-2's `Conv1D`."""
    hugging_face = sys.modules.get("transformers.pytorch_utils")
    kinds = (nn.Linear, getattr(hugging_face, "Conv1D", nn.Linear))
    return [module for module in modules if type(module) in kinds]


@contextmanager
def summed_inside(layers: Sequence[nn.Module], weights: Set[int], sums: Sums) -> Iterator[None]:
    """Runs the block with `_Product` as the forward of some layers.

    Also while backward runs: checkpoints inside a tile run their part again then, and must save the same.

    Args:
        layers: as `layers_of` has found them. Those whose forward somebody has replaced are left alone.
        weights: ids of the tile's own weights, whose gradients are wanted.
        sums: has a sum for each of them while backward runs.
    """
    free = {layer: vars(layer).get("forward") for layer in layers if not is_replaced(layer)}
    try:
        for layer in free:
            layer.__dict__["forward"] = functools.partial(_forward, layer, weights, sums)
        yield
    finally:
        for layer, before in free.items():
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before


def _forward(layer: Any, weights: Set[int], sums: Sums, /, *args: Any, **kwargs: Any) -> Tensor:
    """What stands in for the forward of a layer."""
    weight, bias = layer.weight, layer.bias
    if id(weight) not in weights or len(args) != 1 or not _is_plain(args[0], weight, bias):
        plain: Tensor = type(layer).forward(layer, *args, **kwargs)
        return plain
    (x,) = args
    held = Hold.apply(weight, x)  # type: ignore[no-untyped-call]
    made: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        sums, held, x, weight, bias, isinstance(layer, nn.Linear)
    )
    return made


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is one of matrices of one dtype, in which sums are kept."""
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    return same and x.dtype in _DTYPES and x.dim() > 1 and not torch.is_autocast_enabled(x.device.type)
