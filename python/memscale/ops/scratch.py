# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of CPU kernels: what an operation allocates and frees inside, beyond its outputs.

A fake-tensor trace sees the tensors that operations return, not what a kernel uses meanwhile. On the CPU
that is a large part of some operations: a convolution re-orders its operands, a mixed-dtype addition casts
one of them, fused attention keeps a tile per thread. The rules below were fitted to `torch.profiler` memory
events, one operation at a time over hundreds of shapes, and are upper bounds: an under-estimate here would
break a byte budget. `bench/python/scratch.py` repeats the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memscale.cuda.encoder import encoder_layer, native_attention
from memscale.ops.scratch_recurrent import lstm_layer, lstm_layer_backward

_KIB = 1024
_HALF = (torch.bfloat16, torch.float16)
_OF_MAXIMA = 2
"""Mode of an embedding bag."""

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
    """OneDNN's low-precision product packs its operands and accumulates in FP32, in tiles per thread."""
    operands = _tensors(args)[-2:]
    if not operands or operands[0].dtype not in _HALF:
        return 0
    threads = torch.get_num_threads()
    packed = sum(map(nbytes, operands)) + 4 * sum(tensor.numel() for tensor in outputs)
    return min(packed, 1792 * _KIB * threads) + 200 * _KIB * threads


def _padded(tensor: Tensor) -> int:
    """Bytes in oneDNN's blocked layout, whose channels come in sixteens."""
    channels = max(int(tensor.shape[1]), 1)
    return nbytes(tensor) * (-(-channels // 16) * 16) // channels


def _is_regular(weight: Tensor, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """An ordinary 2-D convolution, for which tighter rules hold."""
    return groups == 1 and weight.dim() == 4 and not transposed and all(step == 1 for step in dilation)


def _columns(weight: Tensor, output: Tensor) -> int:
    """Unfolded input of a convolution by matrix product (conv3d in FP32, large grouped kernels)."""
    taps = weight.numel() // max(int(weight.shape[0]), 1)
    return int(taps * output.numel() // max(int(output.shape[1]), 1) * 4)


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    source, weight, stride, dilation = args[0], args[1], args[3], args[5]
    transposed, groups = bool(args[6]), int(args[8])
    before, after, kernel = _padded(source), _padded(outputs[0]), 2 * nbytes(weight) + 64 * _KIB
    half = source.dtype in _HALF
    if transposed:
        return (4 if half else 2) * (before + after) + 4 * kernel
    total = after + kernel
    dense = source.shape[1] >= 16 and all(step == 1 for step in stride)
    if not dense or not _is_regular(weight, dilation, transposed, groups):
        total += before + kernel
    if half and all(size == 1 for size in weight.shape[2:]):
        total += 2 * after
    return total + (_columns(weight, outputs[0]) if weight.dim() == 5 and not half else 0)


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad, source, weight, dilation = args[0], args[1], args[2], args[6]
    transposed, groups = bool(args[7]), int(args[9])
    after, before, kernel = _padded(grad), _padded(source), 2 * nbytes(weight) + 64 * _KIB
    half = grad.dtype in _HALF
    if _is_regular(weight, dilation, transposed, groups):
        return (2 if half else 1) * (after + before + kernel)
    threads = torch.get_num_threads()
    partial = 4 * weight.numel() * threads * 4
    blocked = (5 if half else 2) * after + (3 if half else 2) * before
    return int(blocked + 4 * kernel + partial + _columns(weight, grad))


def _batch_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return nbytes(args[1]) + 16 * _KIB


def _mean(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """A low-precision mean sums an FP32 copy."""
    source = args[0]
    return 4 * (source.numel() + outputs[0].numel()) if source.dtype in _HALF else 0


def _cast_to_output(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Reductions and scans that accumulate in another dtype cast their input first."""
    source = args[0]
    return source.numel() * outputs[0].element_size() if source.dtype != outputs[0].dtype else 0


def _safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """One boolean per element says where the mask is −∞, one per row whether all of it is."""
    source = args[0]
    return int(source.numel() + source.numel() // max(source.shape[-1], 1) + 4 * _KIB)


def _copied(*indices: int) -> Scratch:
    """A rule for kernels that make these operands contiguous first."""

    def rule(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
        operands = [args[index] for index in indices if not args[index].is_contiguous()]
        return sum(map(nbytes, operands)) + max(map(_transposing, operands), default=0)

    return rule


_TRANSPOSED_BLOCK = 60 * 60
"""Elements that a copy of a transposed matrix turns at once (ATen/native/Copy.cpp)."""


def _transposing(operand: Tensor) -> int:
    """What a copy of this in its usual order takes beside the copy."""
    is_transposed = operand.dim() == 2 and operand.stride() == (1, operand.shape[0])
    small = operand.numel() < _TRANSPOSED_BLOCK
    return 0 if small or not is_transposed else _TRANSPOSED_BLOCK * operand.element_size()


def _layer_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Partial weight and bias gradients, one row per thread; both large operands are made contiguous."""
    normalized = args[2]
    width = 1
    for size in normalized:
        width *= int(size)
    copied = _copied(0, 1)(args, outputs)
    return copied + 2 * torch.get_num_threads() * width * 4


def _embedding_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad = args[0]
    return 0 if grad.is_contiguous() else nbytes(grad)


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
    copied = 0 if args[0].transpose(1, 2).is_contiguous() else nbytes(args[0])
    return int((scores + grads) * torch.get_num_threads()) + copied + 4 * _KIB


def _per_channel(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return 16 * int(args[0].shape[1]) if args[0].dim() > 1 else 0


def _group_norm(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    source = args[0]
    return 8 * int(source.shape[0]) * int(source.shape[1]) + 4 * _KIB


def _element_loss(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Losses that reduce after writing one value per element."""
    source = args[0]
    return int(source.numel() * (12 if source.dtype in _HALF else 8))


def _log_sum_exp(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return nbytes(args[0]) + 8 * sum(tensor.numel() for tensor in outputs) + 4 * _KIB


def _selection(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """A copy of the values and 64-bit positions."""
    return int(args[0].numel() * (args[0].element_size() + 8))


def _per_element(width: int) -> Scratch:
    """A rule of so many bytes per element of the first operand."""
    return lambda args, outputs: width * int(args[0].numel())


def _resampled(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Interpolation works on one memory format, with copies of what lies otherwise."""
    return 2 * max(nbytes(args[0]), *map(nbytes, outputs)) + 64 * _KIB


def _bag_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Of maxima: a second table, and the rows of the gradient, contiguous and again without empty bags."""
    if args[8] == _OF_MAXIMA:
        return sum(map(nbytes, outputs)) + 2 * nbytes(args[0]) + 8 * int(args[0].shape[0])
    return 24 * int(args[1].numel()) + 4 * _KIB


def _factored(times: int) -> Scratch:
    """A rule of so many copies of the first operand (linear algebra on copies in column order)."""
    return lambda args, outputs: times * nbytes(args[0]) + 4 * _KIB


def _scatter(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return 4 * args[0].numel() if args[0].dtype in _HALF else 0


def _masked_index(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """A boolean mask is turned into 64-bit positions, one row per dimension of the mask."""
    given = _tensors(args[1:2])
    masks = [tensor for tensor in given if tensor.dtype in (torch.bool, torch.uint8)]
    if len(given) == len(masks) == 1:
        return 8 * masks[0].dim() * _places(args, masks[0], outputs)
    return sum(16 * tensor.dim() * tensor.numel() for tensor in masks)


def _places(args: Sequence[Any], mask: Tensor, outputs: Sequence[Tensor]) -> int:
    """Places of a mask that are set: as many as there are values, where one is not for all of them."""
    values = args[2] if len(args) > 2 else outputs[0]
    at = next(place for place, index in enumerate(args[1]) if index is not None)
    is_each = values.dim() == 1 + args[0].dim() - mask.dim() and (len(args) == 2 or values.shape[at] > 1)
    return int(values.shape[at] if is_each else mask.numel())


RULES: dict[str, Scratch] = {
    "aten::mm": _matmul,
    "aten::addmm": _matmul,
    "aten::bmm": _matmul,
    "aten::baddbmm": _matmul,
    "aten::mv": _matmul,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_batch_norm": _per_channel,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm,
    "aten::mse_loss": _element_loss,
    "aten::smooth_l1_loss": _element_loss,
    "aten::huber_loss": _element_loss,
    "aten::binary_cross_entropy_with_logits": _element_loss,
    "aten::logsumexp": _log_sum_exp,
    "aten::kthvalue": _selection,
    "aten::median": _selection,
    "aten::sort": _selection,
    "aten::_unique2": _per_element(24),
    "aten::multinomial": _factored(2),
    "aten::masked_scatter_backward": _per_element(16),
    "aten::index_put": _masked_index,
    "aten::index_put_": _masked_index,
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::_pack_padded_sequence": lambda args, outputs: nbytes(outputs[0]),
    "aten::_sample_dirichlet": lambda args, outputs: 3 * nbytes(outputs[0]),
    "aten::col2im": lambda args, outputs: nbytes(args[0]),
    "aten::_log_softmax": _copied(0),
    "aten::_softmax": _copied(0),
    "aten::_log_softmax_backward_data": _copied(0, 1),
    "aten::_softmax_backward_data": _copied(0, 1),
    "aten::native_layer_norm": _copied(0),
    "aten::linalg_matrix_exp": _factored(10),
    "aten::linalg_inv_ex": _factored(2),
    "aten::_linalg_svd": _factored(2),
    "aten::_linalg_eigh": _factored(2),
    "aten::_linalg_det": _factored(1),
    "aten::_linalg_solve_ex": _factored(1),
    "aten::linalg_qr": _factored(1),
    "aten::_euclidean_dist": lambda args, outputs: 2 * (nbytes(args[0]) + nbytes(args[1])) + 4 * _KIB,
    **dict.fromkeys(
        (
            "aten::upsample_nearest2d",
            "aten::upsample_nearest2d_backward",
            "aten::_upsample_nearest_exact2d",
            "aten::_upsample_nearest_exact2d_backward",
            "aten::upsample_bilinear2d",
            "aten::upsample_bilinear2d_backward",
            "aten::_upsample_bilinear2d_aa",
            "aten::_upsample_bilinear2d_aa_backward",
            "aten::upsample_bicubic2d",
            "aten::upsample_bicubic2d_backward",
            "aten::_upsample_bicubic2d_aa",
            "aten::_upsample_bicubic2d_aa_backward",
        ),
        _resampled,
    ),
    "aten::scatter": _scatter,
    "aten::scatter_add": _scatter,
    "aten::scatter_add_": _scatter,
    "aten::gather": _scatter,
    "aten::scatter_reduce": _per_element(9),
    "aten::masked_select": _per_element(16),
    "aten::_ctc_loss_backward": lambda args, outputs: nbytes(args[6]),  # the same from behind
    "aten::im2col": lambda args, outputs: nbytes(args[0]),
    "aten::index": _masked_index,
    "aten::mean": _mean,
    "aten::cumsum": _cast_to_output,
    "aten::sum": _cast_to_output,
    "aten::_safe_softmax": _safe_softmax,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::mkldnn_rnn_layer": lstm_layer,
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "aten::_native_multi_head_attention": native_attention,
    "aten::mkldnn_rnn_layer_backward": lstm_layer_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


_MASKED = frozenset(("where", "masked_fill", "masked_fill_"))
"""Element-wise operators that read a boolean mask as it is."""


def scratch_bytes(
    name: str, rule: Scratch | None, pointwise: bool, args: Sequence[Any], outputs: Sequence[Tensor]
) -> int:
    """Upper bound of what an operation's CPU kernel allocates and frees inside, bytes.

    Args:
        name: the operator's, as the graph has it.
        rule: the operator's rule, if it has one.
        pointwise: the operator works element by element.
        args: positional arguments of the call.
        outputs: the tensors that it returned, in order.
    """
    if not outputs:
        return 0
    if rule is not None:
        return rule(args, outputs)
    return _pointwise_casts(name.split(".")[0], args, outputs) if pointwise else 0


def _pointwise_casts(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Element-wise kernels cast what has another dtype than the common one into temporaries.

    That holds for results too, which a kernel writes in the common dtype first; not for a comparison's.
    """
    operands = [tensor for tensor in _tensors(args) if tensor.dim() > 0]
    if name in _MASKED:
        operands = [tensor for tensor in operands if tensor.dtype != torch.bool]
    results = [tensor for tensor in outputs if tensor.dtype != torch.bool]
    involved = [*operands, *results]
    if not involved:
        return 0
    common = involved[0].dtype
    for tensor in involved[1:]:
        if (
            tensor.dtype is not common
        ):  # under a mode the question is an operation like others, and takes as long
            common = torch.promote_types(common, tensor.dtype)
    return sum(tensor.numel() for tensor in involved if tensor.dtype != common) * common.itemsize
