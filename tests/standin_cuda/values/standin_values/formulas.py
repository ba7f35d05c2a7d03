# SPDX-License-Identifier: Apache-2.0
"""Operators that only CUDA has, or that take there what the CPU's refuse, made of other operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """_thnn_fused_lstm_cell; the workspace has the gates after their functions."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    """_thnn_fused_lstm_cell_backward_impl"""
    i, f, g, o = workspace.chunk(4, 1)
    d_out = torch.zeros_like(cy) if grad_hy is None else grad_hy
    bent = cy.tanh()
    d_cell = d_out * o * (1 - bent * bent) + (0 if grad_cy is None else grad_cy)
    d_i, d_f = d_cell * g * i * (1 - i), d_cell * cx * f * (1 - f)
    d_g, d_o = d_cell * i * (1 - g * g), d_out * bent * o * (1 - o)
    gates = torch.cat((d_i, d_f, d_g, d_o), 1)
    return gates, d_cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    """_thnn_fused_gru_cell; the workspace: both gates, the new value, hx, the new value's hidden part."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    i_r, i_z, i_n = input_gates.chunk(3, 1)
    h_r, h_z, h_n = hidden_gates.chunk(3, 1)
    r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
    n = (i_n + r * h_n).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, h_n), 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """_thnn_fused_gru_cell_backward"""
    r, z, n, hx, h_n = workspace.chunk(5, 1)
    d_n = grad_hy * (1 - z) * (1 - n * n)
    d_z = grad_hy * (hx - n) * z * (1 - z)
    d_r = d_n * h_n * r * (1 - r)
    of_input, of_hidden = torch.cat((d_r, d_z, d_n), 1), torch.cat((d_r, d_z, d_n * r), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases


def softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """_softmax, which takes halves and gives single precision on CUDA only."""
    return _aten._softmax(self.float() if half_to_float else self, dim, False)


def log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """_log_softmax"""
    return _aten._log_softmax(self.float() if half_to_float else self, dim, False)


def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """_softmax_backward_data"""
    return _aten._softmax_backward_data(grad_output, output, dim, output.dtype).to(input_dtype)


def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """_log_softmax_backward_data"""
    return _aten._log_softmax_backward_data(grad_output, output, dim, output.dtype).to(input_dtype)


def log_sigmoid_backward(grad_output: Tensor, self: Tensor, buffer: Tensor) -> Tensor:
    """log_sigmoid_backward; the buffer is the CPU's alone."""
    return grad_output * self.neg().sigmoid()


def rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Any, mask: list[bool]
) -> tuple[Any, Any]:
    """_fused_rms_norm_backward"""
    over = tuple(range(-len(normalized_shape), 0))
    gradient, scaled = grad_out.float(), input.float() * rstd
    along = gradient if weight is None else gradient * weight.float()
    d_input = rstd * (along - scaled * (along * scaled).mean(over, keepdim=True))
    d_weight = None
    if weight is not None and mask[1]:
        d_weight = (gradient * scaled).sum_to_size(weight.shape).to(weight.dtype)
    return d_input.to(input.dtype) if mask[0] else None, d_weight


def _depthwise(
    self: Tensor, weight: Tensor, kernel_size: Any, bias: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    zeros = [0] * len(kernel_size)
    return _aten.convolution(self, weight, bias, stride, padding, dilation, False, zeros, self.shape[1])


def fused_dropout(self: Tensor, p: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """_fused_dropout; `p` is the share that stays."""
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * mask / p, mask


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """_masked_scale"""
    return self * mask * scale


def _product(name: str) -> Any:
    def product(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [value.float() if isinstance(value, Tensor) else value for value in args]
        dtype = next(value for value in tensors if isinstance(value, torch.dtype))
        rest = [value for value in tensors if value is not dtype]
        return getattr(_aten, name)(*rest, **kwargs).to(dtype)

    return product


FORMULAS = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_softmax": softmax,
    "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward,
    "log_sigmoid_backward": log_sigmoid_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_conv_depthwise2d": _depthwise,
    "conv_depthwise3d": _depthwise,
    "_fused_dropout": fused_dropout,
    "_masked_scale": masked_scale,
    "mm.dtype": _product("mm"),
    "bmm.dtype": _product("bmm"),
    "addmm.dtype": _product("addmm"),
    "baddbmm.dtype": _product("baddbmm"),
}
