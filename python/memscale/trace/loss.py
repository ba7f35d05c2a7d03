# SPDX-License-Identifier: Apache-2.0
"""Finding the loss of a training step in a model's output.

Models from transformers return their loss. Other models leave the loss to the training loop, which a
profile cannot see. Then the profile assumes the loss that takes the most memory among the usual ones:
cross-entropy over the last dimension of every floating-point output; for pictures and volumes, with four
dimensions or more, a squared difference from a target of the same shape. No loss goes through what a model
returns in a key/value cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memscale.techniques.checkpoint.given_caches import is_cache
from memscale.torchkit.leaves import tensors_of

if TYPE_CHECKING:
    from memscale.torchkit.output_use import OutputUse


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model computed itself: `.loss`, `["loss"]`, or a scalar output."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor):
        loss = output
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(()) if loss.dim() else loss
    return None


def loss_of(output: Any, use: OutputUse | None = None) -> Tensor | None:
    """A scalar to run backward from, or None when nothing in the output requires a gradient.

    Args:
        output: of the model.
        use: which of its tensors the loop's loss goes through; None: all.
    """
    unused = unused_in(output, use)
    loss = own_loss(output)
    if loss is not None and not any(leaf is loss or leaf is loss._base for leaf in unused):
        return loss
    parts = [_assumed(leaf) for leaf in differentiable(output) if not any(leaf is one for one in unused)]
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def unused_in(output: Any, use: OutputUse | None) -> list[Tensor]:
    """The tensors of an output that the loop's loss does not go through."""
    leaves = tensors_of(output)
    if use is None or not use.fits(leaves):
        return []
    return [leaf for leaf, used in zip(leaves, use.used, strict=True) if not used]


def sum_of(losses: Iterable[Tensor | None]) -> Tensor | None:
    """The loss of several forwards; None where none has any."""
    total = None
    for loss in losses:
        if loss is not None:
            total = loss if total is None else total + loss
    return total


def cached_in(output: Any) -> set[int]:
    """Ids of the tensors of key/value caches in an output."""
    caches = filter(is_cache, tree_leaves(output))
    return {id(tensor) for cache in caches for tensor in tensors_of(cache)}


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of an output that a loss may go through."""
    cached = cached_in(output)
    found = [leaf for leaf in tensors_of(output) if leaf.requires_grad and id(leaf) not in cached]
    return [leaf for leaf in found if (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() > 0]


def _assumed(output: Tensor) -> Tensor:
    if output.is_complex():
        return output.abs().square().mean()
    if output.dim() < 2:
        return output.float().sum()
    if output.dim() >= 4:
        return F.mse_loss(output.float(), output.new_zeros(output.shape, dtype=torch.float32))
    rows = output.reshape(-1, output.shape[-1]).float()
    return F.cross_entropy(rows, rows.new_zeros(rows.shape[0], dtype=torch.long))
