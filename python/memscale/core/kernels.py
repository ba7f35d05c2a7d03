# SPDX-License-Identifier: Apache-2.0
"""What an operation costs beyond its outputs: scratch memory, bytes moved, floating-point operations.

A fake-tensor trace sees the tensors that operations return. It does not see what a kernel allocates and
frees inside. On the CPU that is a large part of some operations: a convolution re-orders its operands, a
mixed-dtype addition casts one of them, fused attention keeps a tile per thread. The rules below were
measured with `torch.profiler` memory events, one operation at a time (`bench/python/scratch.py` repeats
the measurement), and are upper bounds: an under-estimate here would break a byte budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_KIB = 1024
_HALF = (torch.bfloat16, torch.float16)

Scratch = Callable[[Sequence[Any], Sequence[Tensor]], int]
"""Scratch bytes of an operation from its arguments and its output tensors."""


def nbytes(tensor: Tensor) -> int:
    """Bytes that the tensor's elements take when stored densely."""
    return tensor.numel() * tensor.element_size()


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def _matmul(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """oneDNN's low-precision product re-orders the smaller operand and accumulates in FP32."""
    operands = [tensor for tensor in _tensors(args) if tensor.dim() >= 2]
    if not operands or operands[0].dtype not in _HALF:
        return 0
    smaller = min(nbytes(tensor) for tensor in operands[-2:])
    return smaller + 4 * sum(tensor.numel() for tensor in outputs) + 48 * _KIB


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """oneDNN computes in a blocked layout: a re-ordered output and weight, padded to 16 channels."""
    source, weight = args[0], args[1]
    padded = nbytes(source) * 16 // source.shape[1] if source.shape[1] < 16 else 0
    return nbytes(outputs[0]) + 2 * nbytes(weight) + padded + 64 * _KIB


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad, source, weight = args[0], args[1], args[2]
    blocked = nbytes(grad) + nbytes(source)
    return blocked + (blocked // 2 if grad.dtype in _HALF else 0) + 2 * nbytes(weight) + 64 * _KIB


def _batch_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return nbytes(args[1]) + 16 * _KIB


def _mean(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """A low-precision mean sums an FP32 copy."""
    source = args[0]
    return 4 * source.numel() if source.dtype in _HALF else 0


def _cast_to_output(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Reductions and scans that accumulate in another dtype cast their input first."""
    source = args[0]
    return source.numel() * outputs[0].element_size() if source.dtype != outputs[0].dtype else 0


def _safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """One boolean per element says where the mask is −∞, one per row whether all of it is."""
    source = args[0]
    return int(source.numel() + source.numel() // max(source.shape[-1], 1) + 4 * _KIB)


def _layer_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Partial weight and bias gradients, one row per thread."""
    normalized = args[2]
    width = 1
    for size in normalized:
        width *= int(size)
    return 2 * torch.get_num_threads() * width * 4


def _embedding_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad = args[0]
    return 0 if grad.is_contiguous() else nbytes(grad)


def _rnn_layer(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Re-ordered weights and gates per time step; the workspace is an output and not counted here.

    The factors of this rule and the next are least-squares fits over eight shapes, rounded up.
    """
    return nbytes(args[1]) + nbytes(args[2]) + 41 * nbytes(outputs[0]) // 10 + 128 * _KIB


def _rnn_layer_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    half = args[0].dtype in _HALF
    of_input, of_hidden, of_output = (34, 30, 23) if half else (28, 20, 42)
    tenths = of_input * nbytes(args[1]) + of_hidden * nbytes(args[2]) + of_output * nbytes(args[7])
    return tenths // 10 + 96 * _KIB


def _attention_tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of the score tile that one thread holds (aten/native/cpu/FlashAttentionKernel.cpp)."""
    rows = query.shape[-2]
    tile = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(tile, rows), min(512, key.shape[-2])


def _attention(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    rows, columns = _attention_tile(args[0], args[1])
    scores = 4 * (rows * columns + 2 * rows + rows * args[0].shape[-1])
    reduced = 2 * rows * columns if args[0].dtype in _HALF else 0
    return int((scores + reduced) * torch.get_num_threads())


def _attention_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    rows, columns = _attention_tile(args[1], args[2])
    half = args[1].dtype in _HALF
    scores = 2 * (4 + (2 if half else 0)) * rows * columns + 8 * rows
    grads = 4 * (rows + 2 * columns) * args[1].shape[-1] if half else 0
    return int((scores + grads) * torch.get_num_threads()) + 4 * _KIB


_CPU_SCRATCH: dict[str, Scratch] = {
    "aten::mm": _matmul,
    "aten::addmm": _matmul,
    "aten::bmm": _matmul,
    "aten::baddbmm": _matmul,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::mean": _mean,
    "aten::cumsum": _cast_to_output,
    "aten::sum": _cast_to_output,
    "aten::_safe_softmax": _safe_softmax,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Arguments that an operator changes although its schema does not say so: running mean and variance."""


class OpFacts:
    """What does not depend on the arguments: one per operator overload, looked up once."""

    __slots__ = ("flops", "foreign", "is_view", "name", "pointwise", "random", "scratch", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.split("::")[-1] + ("" if not schema.overload_name else f".{schema.overload_name}")
        tags = getattr(func, "tags", ())
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.pointwise = torch.Tag.pointwise in tags
        self.scratch = _CPU_SCRATCH.get(schema.name)
        self.flops = _flop_formula(func)
        self.writes = [
            index for index, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
        ]
        self.writes += _UNDECLARED_WRITES.get(schema.name, ())
        self.foreign = not schema.name.startswith(("aten::", "prims::", "prim::"))
        returns = schema.returns
        self.is_view = bool(returns) and not self.writes and all(item.alias_info is not None for item in returns)


@lru_cache(maxsize=None)
def facts(func: Any) -> OpFacts:
    """Facts of an operator overload."""
    return OpFacts(func)


def run(func: Any, info: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation, mending fake results that lack what the real kernel returns."""
    result = func(*args, **kwargs)
    if info.name == "mkldnn_rnn_layer" and result[3].numel() == 0:
        source, hidden, biased = args[0], int(args[10]), bool(args[12])
        size = rnn_workspace_bytes(tuple(map(int, source.shape)), hidden, biased, source.dtype, bool(args[7]))
        workspace = torch.empty(size, dtype=torch.uint8, device=source.device)
        return (*result[:3], workspace)
    return result


def _flop_formula(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry

    formula: Callable[..., int] | None = flop_registry.get(getattr(func, "overloadpacket", None))
    return formula


def scratch_bytes(info: OpFacts, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Upper bound of what the operation's CPU kernel allocates and frees inside, bytes.

    Args:
        info: facts of the operator.
        args: positional arguments of the call.
        outputs: the tensors that it returned, in order.
    """
    if info.scratch is not None and outputs:
        return info.scratch(args, outputs)
    if info.pointwise and outputs:
        return _pointwise_casts(args, outputs)
    return 0


def _pointwise_casts(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """The CPU's element-wise kernels cast operands of another dtype into temporaries of the common one."""
    operands = _tensors(args)
    dtypes = {tensor.dtype for tensor in operands if tensor.dim() > 0}
    if len(dtypes) < 2:
        return 0
    common = max((dtype.itemsize for dtype in dtypes), default=0)
    casts = [tensor for tensor in operands if tensor.dim() > 0 and tensor.dtype.itemsize < common]
    into = [tensor for tensor in outputs if tensor.dtype.itemsize < common and tensor.dtype != torch.bool]
    return sum(tensor.numel() for tensor in casts + into) * common


def flops(info: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations by PyTorch's own counter's formulas; 0 where it has none."""
    if info.flops is None:
        return 0
    try:
        return int(info.flops(*args, **kwargs, out_val=result))
    except Exception:  # a formula that does not know this call form must not end a trace
        return 0


@lru_cache(maxsize=256)
def rnn_workspace_bytes(
    shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype, bidirectional_layer: bool
) -> int:
    """Bytes of the workspace that oneDNN's LSTM layer returns in training.

    Its size depends on the processor, and the fake kernel reports none. So the layer is run once, for real,
    on zeros of the given shape.

    Args:
        shape: (time, batch, features) of the input.
        hidden: hidden size.
        bias: whether the layer has biases.
        dtype: of input and weights.
        bidirectional_layer: whether this is the backward direction of a bidirectional layer.
    """
    with _disable_current_modes(), torch.enable_grad():  # without grad mode the layer makes no workspace
        steps, batch, width = shape
        source = torch.zeros(steps, batch, width, dtype=dtype)
        state = torch.zeros(batch, hidden, dtype=dtype)
        weights = [torch.zeros(4 * hidden, width, dtype=dtype), torch.zeros(4 * hidden, hidden, dtype=dtype)]
        biases = [torch.zeros(4 * hidden, dtype=dtype)] * 2
        result = torch.ops.aten.mkldnn_rnn_layer(
            source, *weights, *biases, state, state, bidirectional_layer, [], 2, hidden, 1, bias, False, False, True
        )
    return nbytes(result[3])
