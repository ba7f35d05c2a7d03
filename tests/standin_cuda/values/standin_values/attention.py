# SPDX-License-Identifier: Apache-2.0
"""Fused attention, which the CPU has no operator for with CUDA's arguments: written out, in single precision.

The forward puts the seed of its dropout mask where the card's kernel puts its Philox seed, and the backward
takes it from there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LSE_STEP = 32
"""The efficient kernel's log-sum-exp has rows of whole multiples of this (kAlignLSE in kernel_forward.h)."""


class _Scores:
    """Softmax of the scores, and the mask of its dropout: the same in forward and backward."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
    ) -> None:
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * self.scale
        if bias is not None:
            scores = scores + bias.float()
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        self.log_sum = scores.logsumexp(-1)
        self.shares = (scores - self.log_sum.unsqueeze(-1)).exp().nan_to_num(0.0)

    def mask(self, dropout: float, seed: int) -> Tensor | float:
        """What a share is multiplied with."""
        if dropout == 0:
            return 1.0
        drawn = torch.rand(self.shares.shape, generator=torch.Generator().manual_seed(seed))
        return (drawn >= dropout).float() / (1 - dropout)


def _per_head(query: Tensor, other: Tensor) -> Tensor:
    """Keys or values in single precision, one for each head of the queries."""
    return other.float().repeat_interleave(query.shape[1] // other.shape[1], 1)


def _per_group(gradient: Tensor, other: Tensor) -> Tensor:
    """Back from one for each head to one for each group of heads."""
    batch, heads, length, width = gradient.shape
    return gradient.view(batch, other.shape[1], heads // other.shape[1], length, width).sum(2).to(other.dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, int]:
    seed = torch.default_generator.initial_seed()
    scores = _Scores(query.float(), _per_head(query, key), bias, causal, scale)
    out = (scores.shares * scores.mask(dropout, seed)) @ _per_head(query, value)
    return out.to(query.dtype), scores.log_sum, seed


def _backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    seed: Tensor,
    rule: tuple[float, bool, float | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropout, causal, scale = rule
    query, key, value = inputs[0].float(), _per_head(inputs[0], inputs[1]), _per_head(inputs[0], inputs[2])
    scores = _Scores(query, key, bias, causal, scale)
    mask = scores.mask(dropout, int(seed.flatten()[0]))
    d_value = (scores.shares * mask).transpose(-2, -1) @ gradient.float()
    d_share = gradient.float() @ value.transpose(-2, -1) * mask
    d_score = scores.shares * (d_share - (d_share * scores.shares).sum(-1, keepdim=True))
    d_query = d_score @ key * scores.scale
    d_key = d_score.transpose(-2, -1) @ query * scores.scale
    return d_query.to(inputs[0].dtype), _per_group(d_key, inputs[1]), _per_group(d_value, inputs[2]), d_score


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_scaled_dot_product_flash_attention"""
    out, log_sum, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    return out, log_sum, None, None, None, None, torch.tensor([seed, 0]), torch.tensor(0), None


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_scaled_dot_product_flash_attention_backward"""
    rule = (dropout_p, is_causal, scale)
    return _backward(grad_out, (query, key, value), None, philox_seed, rule)[:3]


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_scaled_dot_product_efficient_attention"""
    out, log_sum, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    pad = -log_sum.shape[-1] % _LSE_STEP
    padded = torch.nn.functional.pad(log_sum, (0, pad), value=math.inf) if compute_log_sumexp else None
    return out, padded, torch.tensor(seed), torch.tensor(0)


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_scaled_dot_product_efficient_attention_backward"""
    rule = (dropout_p, is_causal, scale)
    *made, d_bias = _backward(grad_out, (query, key, value), attn_bias, philox_seed, rule)
    if attn_bias is None or not grad_input_mask[3]:
        return *made, None
    return *made, d_bias.sum_to_size(attn_bias.shape).to(attn_bias.dtype)


FORMULAS = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
