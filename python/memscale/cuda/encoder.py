# SPDX-License-Identifier: Apache-2.0
"""Scratch of the fused encoder layer, the fast path of `nn.TransformerEncoderLayer` on CPU and card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def encoder_layer(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Of the fused forward of an encoder layer, by `transformer.cpp`: attention, then the two products."""
    source, width = args[0], int(args[1])
    hidden = int(args[14].shape[0])
    tokens: int = source.numel() // max(width, 1) * source.element_size()
    return max(_fused_attention(source, args[2], args[3], args[18:19]), tokens * (2 * hidden + 2 * width))


def native_attention(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Of the same attention alone."""
    return _fused_attention(args[0], args[4], args[5], args[9:10])


def _fused_attention(source: Tensor, heads: int, weight: Tensor, mask: Sequence[Any]) -> int:
    """Queries, keys, values twice, or once beside the scores of all heads; low precision packs operands."""
    size = source.nbytes
    batch, length = (int(source.shape[0]), int(source.shape[1])) if source.dim() == 3 else (1, 1)
    scores = batch * int(heads) * length * length * source.element_size()
    scores *= 2 if any(isinstance(item, Tensor) for item in mask) else 1
    packed = 2 * (weight.nbytes + size) if source.dtype in _HALF else 0
    return max(6 * size, 3 * size + scores) + packed
