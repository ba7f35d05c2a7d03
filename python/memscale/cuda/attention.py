# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention as a CUDA build runs it.

On a card, one of four implementations is taken: cuDNN's, flash attention, memory-efficient attention, or
plain products ("math"), which alone makes the whole score matrix. Which one follows from the card, the dtype,
the head size, the mask and what else `sdp_params` holds; the rules are those of
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h in PyTorch 2.11.

The fused operators have fake kernels that also accept CPU tensors, so the trace calls the one that a card
would run, and autograd saves what it would save there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memscale.cuda.card import CardFacts

_HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten


class Backend(Enum):
    """An implementation of attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True)
class Attention:
    """Arguments of one call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def needs_grad(self) -> bool:
        """Whether backward will run through query, key or value."""
        parts = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(part.requires_grad for part in parts)


# ---- which one --------------------------------------------------------------------------------------


def choose(call: Attention, card: CardFacts) -> Backend:
    """The implementation that a CUDA build takes on a card (`select_sdp_backend`)."""
    cuda = torch.backends.cuda
    if _shapes_allow(call):
        low = call.query.dtype in (_HALF if card.capability >= (8, 0) else (torch.float16,))
        if card.capability[0] in (9, 10) and cuda.cudnn_sdp_enabled() and low and _cudnn_allows(call):
            return Backend.CUDNN
        if cuda.flash_sdp_enabled() and low and _flash_allows(call, card):
            return Backend.FLASH
        if cuda.mem_efficient_sdp_enabled() and _efficient_allows(call, card):
            return Backend.EFFICIENT
    return Backend.MATH


def _shapes_allow(call: Attention) -> bool:
    """What every fused implementation asks for."""
    parts = (call.query, call.key, call.value)
    if any(part.dim() != 4 or part.dtype is not call.query.dtype for part in parts):
        return False
    if any(part.shape[-1] > 1 and part.stride(-1) != 1 for part in parts) or 0 in (
        call.query.shape[2],
        call.key.shape[2],
    ):
        return False
    mask = call.mask
    return mask is None or mask.shape[-1] == 1 or mask.stride(-1) == 1


def _same_heads(call: Attention) -> bool:
    return call.query.shape[:2] == call.key.shape[:2] == call.value.shape[:2]


def _grouped_heads(call: Attention) -> bool:
    """Equal batches, and query heads that are a multiple of the others, if that is asked for."""
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if query[0] != key[0] or key[0] != value[0]:
        return False
    if not call.grouped:
        return query[1] == key[1] == value[1]
    return key[1] == value[1] and query[1] % key[1] == 0


def _cudnn_allows(call: Attention) -> bool:
    if call.mask is not None and call.mask.requires_grad:
        return False
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return False
    sizes = (call.query.shape[3], call.value.shape[3])
    return (
        _grouped_heads(call)
        and all(size % 8 == 0 and size <= 256 for size in sizes)
        and call.key.shape[2] != 1
        and not (call.dropout > 0 and call.query.shape[2] == 1)
    )


def _flash_allows(call: Attention, card: CardFacts) -> bool:
    size = call.query.shape[3]
    if card.capability < (8, 0) or call.mask is not None or not _grouped_heads(call):
        return False
    if size != call.key.shape[3] or size != call.value.shape[3] or size > 256:
        return False
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        return False
    narrow = (8, 6) <= card.capability <= (8, 9) or card.capability[0] == 12
    if narrow and call.needs_grad and size > 192:
        return size > 224 and call.dropout == 0
    return True


def _efficient_allows(call: Attention, card: CardFacts) -> bool:
    dtype, size = call.query.dtype, call.query.shape[3]
    half = dtype in _HALF
    if (dtype is not torch.float32 and not half) or (dtype is torch.bfloat16 and card.capability < (8, 0)):
        return False
    tensor_cores = card.capability >= (8, 0) or half
    alignment = 4 if card.capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if half else 4)
    sizes = (size, call.value.shape[3])
    return _same_heads(call) and size == call.key.shape[3] and all(part % alignment == 0 for part in sizes)


# ---- the call ---------------------------------------------------------------------------------------


def run(call: Attention, card: CardFacts) -> Tensor:
    """The result of the call, on fakes, with the autograd graph that a card would have."""
    backend = choose(call, card)
    if backend is Backend.FLASH:
        return _flash(call)
    if backend is Backend.MATH:
        return _math(call)
    query, key, value = call.query, call.key, call.value
    mask = _additive(call.mask, query.dtype)
    out: Tensor
    if backend is Backend.CUDNN:
        out = _ATEN._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, call.needs_grad, call.dropout, call.causal, False, scale=call.scale
        )[0]
    else:
        out = _ATEN._scaled_dot_product_efficient_attention.default(
            query,
            key,
            value,
            _aligned(mask, call),
            call.needs_grad,
            call.dropout,
            call.causal,
            scale=call.scale,
        )[0]
    return out


def _flash(call: Attention) -> Tensor:
    size = call.query.shape[-1]
    padding = -size % 8
    parts = [F.pad(part, (0, padding)) if padding else part for part in (call.query, call.key, call.value)]
    scale = call.scale if call.scale is not None else 1 / math.sqrt(size)
    out: Tensor = _ATEN._scaled_dot_product_flash_attention.default(
        *parts, call.dropout, call.causal, False, scale=scale
    )[0]
    return out[..., :size] if padding else out


def _math(call: Attention) -> Tensor:
    """`_scaled_dot_product_attention_math`, with the mask added in place, as it is in training."""
    origin = call.query.dtype
    parts = (call.query, call.key, call.value)
    if origin in _HALF and _math_in_float32():
        parts = (call.query.float(), call.key.float(), call.value.float())
    scale = math.sqrt(abs(call.scale) if call.scale is not None else 1 / math.sqrt(call.query.shape[-1]))
    query = parts[0] * (-scale if call.scale is not None and call.scale < 0 else scale)
    mask = call.mask
    if call.causal:
        mask = torch.ones(query.shape[-2], parts[1].shape[-2], dtype=torch.bool, device=query.device).tril()
    mask = _additive(mask, query.dtype)
    key, value = parts[1:]
    if call.grouped:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * scale)
    if mask is not None:
        scores = scores.add_(mask)
    weights = getattr(torch, "_safe_softmax", torch.softmax)(scores, -1)  # PyTorch 2.4 has no safe one
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, True)
    out = torch.matmul(weights, value).to(origin)
    if weights.dtype is not origin:
        weights.to(origin)  # the second result of the operator, made and dropped
    return out


def _math_in_float32() -> bool:
    """Whether the math kernel computes half-precision attention in float32. PyTorch 2.4 never does."""
    allowed = getattr(torch.backends.cuda, "fp16_bf16_reduction_math_sdp_allowed", None)
    return allowed is not None and not allowed()


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask becomes one that is added to the scores (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    lowest = torch.scalar_tensor(-math.inf, dtype=dtype)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype), lowest)


def _aligned(mask: Tensor | None, call: Attention) -> Tensor | None:
    """The mask with rows of a multiple of eight elements, expanded to every head (`preprocess_mask`)."""
    if mask is None:
        return None
    width = mask.shape[-1]
    if width % 8:
        mask = F.pad(mask, (0, -width % 8))[..., :width]
    return mask.expand(call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])


# ---- scratch ----------------------------------------------------------------------------------------


def _up(value: int, step: int) -> int:
    return -(-value // step)


def _is_transposed_dense(tensor: Tensor) -> bool:
    """Whether [batch, heads, length, size] lies in memory as [batch, length, heads, size]."""
    return tensor.transpose(1, 2).is_contiguous()


def _flash_splits(blocks: int, units: int, key_blocks: int) -> int:
    """How many parts the keys are split into to fill the card (`num_splits_heuristic`)."""
    if blocks >= 0.8 * units:
        return 1
    most = min(128, units, key_blocks)
    fits = [
        count == 1 or _up(key_blocks, count) != _up(key_blocks, count - 1) for count in range(1, most + 1)
    ]
    waves = [blocks * count / units for count in range(1, most + 1)]
    gains = [wave / math.ceil(wave) if fit else 0.0 for wave, fit in zip(waves, fits, strict=True)]
    best = max(gains, default=0.0)
    return next((n for n, gain in enumerate(gains, 1) if fits[n - 1] and gain >= 0.85 * best), 1)


def flash_scratch(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Partial results when the keys are split, and a seed that is replaced."""
    query, key = args[0], args[1]
    dropout = float(args[3]) if len(args) > 3 else 0.0
    if dropout > 0:
        return [16]
    batch, heads, length, size = query.shape
    tile = 256 if size <= 64 else 128 if size <= 128 else 64
    splits = _flash_splits(batch * heads * _up(length, 64), 2 * card.units, _up(key.shape[2], tile))
    if splits == 1:
        return []
    rows = 4 * splits * batch * heads * length
    return [rows, rows * (32 * _up(size, 32) if size <= 128 else 64 * _up(size, 64))]


def flash_backward_scratch(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Copies in another layout, row sums, query gradients in FP32, and gradients per query head."""
    grad, query, key, out = args[0], args[1], args[2], args[4]
    batch, heads, length, size = query.shape
    copies = [part.numel() * part.element_size() for part in (grad, out) if not _is_transposed_dense(part)]
    rows = 128 * _up(length, 128)
    padded = 32 * _up(size, 32) if size <= 128 else 64 * _up(size, 64)
    pieces = [*copies, 4 * batch * heads * rows, 4 * batch * rows * heads * padded]
    if key.shape[1] != heads:
        pieces += [batch * key.shape[2] * heads * size * key.element_size()] * 2
    return pieces


def efficient_scratch(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """The result in FP32 while it does not fit into registers."""
    value, size = args[2], int(args[2].shape[-1])
    batch, heads, length = args[0].shape[:3]
    return [4 * batch * heads * length * size] if value.dtype in _HALF and size > 128 else []


@dataclass(frozen=True)
class _Tiles:
    """Block sizes of a backward kernel (mem_eff_attention/kernels/cutlassB.h): queries, and gradient columns.

    `stages`: gradients of keys and values do not fit into registers and need memory of their own.
    """

    queries: int
    columns: int
    stages: bool


def _backward_tiles(size: int, half: bool, dropout: bool, card: CardFacts) -> _Tiles:
    """The kernel that is launched: the first whose head size and shared memory suffice."""
    roomy = card.shared_bytes > 160_000
    if size <= 64:
        return _Tiles(64, 64, stages=False)
    if not half:
        return _Tiles(128 if roomy else 64, 64, stages=False)
    if size > 128:
        return _Tiles(128, 64, stages=True)
    if roomy:
        return _Tiles(128, 128, stages=False)
    if size <= 96 and not dropout and (8, 6) <= card.capability <= (8, 9):
        return _Tiles(128, 64, stages=False)
    return _Tiles(64, 64, stages=True)


def efficient_backward_scratch(
    args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts
) -> list[tuple[int, int, int]]:
    """Copies, row sums and the kernel's workspace (mem_eff_attention/kernel_backward.h, `workspace_size`)."""
    grad, query, key, value = args[0], args[1], args[2], args[3]
    batch, heads, length, size = query.shape
    half, wide = query.dtype in _HALF, max(size, int(value.shape[-1]))
    copy = [] if _is_transposed_dense(grad) else [grad.numel() * grad.element_size()]
    tiles = _backward_tiles(wide, half, float(args[9]) > 0, card)
    tile_bytes = 16 + 4 * tiles.queries * tiles.columns
    elements = _up(length, tiles.queries) * _up(size, tiles.columns) * tile_bytes
    if tiles.stages:
        splits = max(min(_up(key.shape[2], 64), 200 // (batch * heads)), 1)
        width = tiles.queries * _up(size, tiles.queries) + tiles.queries * _up(value.shape[-1], tiles.queries)
        elements += 4 * 64 * splits * width
    workspace = batch * heads * elements
    rows = 4 * batch * heads * length
    kept = [(size, 0, 1) for size in (*copy, rows)]
    if half:
        return [*kept, (workspace, 0, 1)]
    # Row sums are computed by separate operations first; their temporaries are gone when the workspace is
    # taken.
    sums = [] if batch * heads == 1 else [(rows, 0, 0)]
    return [*kept, (4 * grad.numel(), 0, 0), *sums, (workspace, 1, 1)]
