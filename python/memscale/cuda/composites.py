# SPDX-License-Identifier: Apache-2.0
"""Operators that PyTorch takes apart in one way on a CPU and in another on CUDA.

| operator | CPU | CUDA |
|---|---|---|
| dropout | a noise tensor of the input's type, and a product | `native_dropout`: one byte per element |
| attention | flash for CPU, math with dropout | see `cuda/attention` |
| linear of a strided input | the bias is added to fakes out of place | in place |
| softmax of FP16 into FP32 | a cast, then softmax | one kernel; the cast copy does not exist |

Sources: aten/src/ATen/native/Dropout.cpp, Linear.cpp, SoftMax.cpp, transformers/attention.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memscale.cuda import attention as cuda_attention
from memscale.cuda.attention import Attention
from memscale.cuda.card import CardFacts
from memscale.cuda.overrides import Overrides, operator, plain

_ATEN = torch.ops.aten


def composites(card: CardFacts) -> Overrides:
    """CUDA's way with composite operators, for tensors that are on the CPU."""
    overrides = Overrides("AutogradCPU")

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return cuda_attention.run(call, card)

    own: dict[str, Callable[..., Any]] = {
        "aten::dropout": _dropout,
        "aten::linear": _linear,
        "aten::scaled_dot_product_attention": attention,
    }
    own |= {"aten::softmax.int": _softmax, "aten::log_softmax.int": _log_softmax}
    for name, run in own.items():
        overload = operator(name)
        if overload is not None:
            overrides.add(name, run, plain(overload))
    return overrides


def _dropout(source: Tensor, p: float, train: bool) -> Tensor:
    result: Tensor
    if not train or p == 0 or p == 1 or source.numel() == 0:
        result = plain(_ATEN.dropout.default)(source, p, train)
    else:
        result = _ATEN.native_dropout.default(source, p, train)[0]
    return result


def _linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor
    if bias is None or source.dim() <= 2 or source.is_contiguous():
        result = plain(_ATEN.linear.default)(source, weight, bias)
    else:
        result = torch.matmul(source, weight.t()).add_(bias)
    return result


def _is_widening(source: Tensor, dtype: torch.dtype | None) -> bool:
    return source.dtype is torch.float16 and dtype is torch.float32


def _softmax(source: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if _is_widening(source, dtype):
        return _ATEN._softmax.default(source, dim, True)
    return plain(_ATEN.softmax.int)(source, dim, dtype)


def _log_softmax(source: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if _is_widening(source, dtype):
        return _ATEN._log_softmax.default(source, dim, True)
    return plain(_ATEN.log_softmax.int)(source, dim, dtype)
