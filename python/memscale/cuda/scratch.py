# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of CUDA operators: what a call allocates and frees again, beside what it returns.

A rule gives blocks that are alive together, and together with the results. Where an operator has two phases,
a block says in which it is alive; where the results are made last, the first phase counts what it takes
beyond them. Each block is one allocation, since the allocator rounds each for itself. The formulas come from
PyTorch's sources (named at each rule, below aten/src/ATen/native/cuda) and were compared, block by block,
with the allocations of the CUDA build of PyTorch 2.11 (`bench/standin/operators.py`). What cub asks for its
sorts and scans depends on tuning tables; where a rule says "bound" it is an upper bound of a few KiB and not
the exact number.

The stand-in has no cuDNN: the rules for convolutions and recurrent layers follow what an H100 took, by
`bench/gpu/scratch.py`.

An operator without a rule takes nothing, which holds for element-wise kernels, copies, losses without
reduction, softmax, log-softmax, dropout, pooling and gathering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memscale.cuda import attention, encoder, matrix
from memscale.cuda.card import CardFacts
from memscale.cuda.reduce import reduction

Pieces = Callable[[Sequence[Any], Sequence[Tensor], CardFacts], list[int]]
"""Blocks of scratch memory, bytes, from an operator's arguments, its outputs and the card."""

Block = tuple[int, int, int]
"""A block of scratch memory: bytes, first and last phase of the operator in which it is alive."""

Phases = Callable[[Sequence[Any], Sequence[Tensor], CardFacts], list[Block]]
"""The same for operators with two phases."""

_HALF = (torch.float16, torch.bfloat16)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dims(value: Any) -> list[int]:
    """A dimension argument: a number, a list, or nothing for all."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [value]
    return [int(dim) for dim in value] if isinstance(value, (list, tuple)) else []


# ---- reductions (Reduce.cuh) ------------------------------------------------------------------------


def _reduce(partial_bytes: int, dims_at: int | None = 1) -> Pieces:
    """A reduction with partial results of a size; the dimensions are argument `dims_at`."""

    def rule(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
        source = args[0]
        dims = _dims(args[dims_at]) if dims_at is not None and len(args) > dims_at else []
        size = partial_bytes if source.is_floating_point() else max(partial_bytes, 8)
        return reduction(source.shape, source.stride(), dims, size, card)

    return rule


def _extremum(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """`max` and `min` of everything; along a dimension, a block handles whole rows."""
    return _reduce(4, dims_at=None)(args, outputs, card) if len(args) == 1 else []


def _logical(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """`any` and `all` keep partial results in the input's type."""
    source = args[0]
    dims = _dims(args[1]) if len(args) > 1 else []
    if source.dim() == 0:
        return [1]
    return reduction(source.shape, source.stride(), dims, source.element_size(), card)


def _dense_reduction(tensor: Tensor, card: CardFacts) -> list[int]:
    """All elements of a fresh tensor of that many elements."""
    return reduction((tensor.numel(),), (1,), (), 4, card)


def _element_loss(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """One value per element, then their mean (Loss.cu, `reduction` 1 or 2)."""
    if len(args) > 2 and args[2] == 0:
        return []
    return [_bytes(args[0]), *_dense_reduction(args[0], card)]


def _logit_loss(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    if len(args) > 4 and args[4] == 0:
        return [_bytes(args[0])]
    return [_bytes(args[0])] * 2 + _dense_reduction(args[0], card)


def _own_loss(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """`binary_cross_entropy` reduces inside its own result."""
    return [] if len(args) > 3 and args[3] == 0 else [4, *_dense_reduction(args[0], card)]


def _log_sum_exp(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    return [_bytes(outputs[0]), _bytes(args[0])]


def _foreach_norm(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """One partial result per chunk of 65 536 elements, as many for each tensor (ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max((-(-tensor.numel() // 65536) for tensor in tensors), default=0)
    return [4 * len(tensors) * chunks]


# ---- normalisation ----------------------------------------------------------------------------------


def _layer_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Partial gradients of weight and bias, for many short rows (layer_norm_kernel.cu)."""
    grad, width = args[0], math.prod(int(size) for size in args[2])
    rows = grad.numel() // max(width, 1)
    if rows <= 64 * 1024 or width // 32 >= card.units // 2 or not isinstance(args[5], Tensor):
        return []
    parts = -(-rows // 32)
    size = args[5].element_size()
    pieces = [parts * width * size] * 2 + [width * size]
    return pieces + reduction((parts, width), (width, 1), (0,), 4, card)


def _group_norm(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Scale and shift per channel, in FP32 (group_norm_kernel.cu)."""
    return [4 * int(args[3]) * int(args[4])] * 2


def _group_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    channels, groups = 4 * int(args[5]) * int(args[6]), 4 * int(args[5]) * int(args[8])
    return [channels, channels, groups, groups, channels]


def _batch_norm_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Sums per channel, where the channels are the fastest dimension (Normalization.cu)."""
    source = args[1]
    fastest = source.dim() == 2 or (source.dim() > 2 and source.stride(1) == 1 and source.shape[1] > 1)
    return [4 * int(source.shape[1])] * 2 if fastest else []


def _softmax_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """The product of gradient and output (SoftMax.cu, `softmax_backward_cuda_out`)."""
    wide = torch.promote_types(args[0].dtype, args[1].dtype)
    return [args[0].numel() * wide.itemsize]


def _safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Which elements are masked, and which rows are as a whole (SoftMax.cpp)."""
    count = args[0].numel()
    return [count, count // max(int(args[0].shape[int(args[1])]), 1), 4]


# ---- sorting, scanning, indexing --------------------------------------------------------------------


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def sort_workspace(count: int, key_bytes: int, value_bytes: int, card: CardFacts, passes: int = 8) -> int:
    """Workspace of cub's radix sort of pairs: second buffers, digit counts per pass, and state per tile.

    Exact for keys and values of eight bytes, a bound otherwise.

    Args:
        count: pairs.
        key_bytes: size of a key.
        value_bytes: size of a value.
        card: where it runs.
        passes: digits of eight bits that are sorted by.
    """
    tile = 4608 if card.capability >= (9, 0) else 3840
    if key_bytes < 8:
        tile = 1536
    buffers = _aligned(count * key_bytes) + _aligned(count * value_bytes)
    return buffers + 2048 * passes + 511 + 1024 * -(-count // tile)


def _flat_copy(indices: Tensor) -> list[int]:
    """A copy of indices that are expanded or otherwise not one run of memory."""
    return [] if indices.is_contiguous() else [_bytes(indices)]


def _embedding(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    return _flat_copy(args[1]) if args[1].dim() > 1 else []


def _embedding_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[Block]:
    """Sorted indices, their segments, and one partial row per segment (EmbeddingBackwardKernel.cu)."""
    grad, indices, words = args[0], args[1], int(args[2])
    count = int(indices.numel())
    copies = [] if grad.is_contiguous() else [_bytes(grad)]
    copies += _flat_copy(indices)
    if count <= 3072 and not (len(args) > 4 and args[4]):
        return [(size, 0, 0) for size in copies]
    width = int(grad.shape[-1])
    column = 8 * count
    segments = min(count, words)
    partial = count // 10 + segments
    summing = [column, column, column, 8 * segments, 8 * segments, 8, 8, 8 * partial]
    summing.append(4 * partial * (-(-width // 32) * 32))
    sorting = 3 * _round(column) + _round(sort_workspace(count, 8, 8, card)) - _round(_bytes(outputs[0]))
    first = [(max(sorting, 0), 0, 0)]
    return [(size, 0, 1) for size in copies] + first + [(size, 1, 1) for size in summing]


def _round(size: int) -> int:
    return -(-size // 512) * 512


def _index_put(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Accumulating writes are sorted by their address first (Indexing.cu, `index_put_with_sort_kernel`)."""
    accumulate = bool(args[3]) if len(args) > 3 else False
    tensors = [index for index in args[1] if isinstance(index, Tensor)]
    if not accumulate or not tensors:
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    count = math.prod(shape)
    rows = math.prod(
        int(size)
        for size, index in zip(args[0].shape, [*args[1], *[None] * args[0].dim()], strict=False)
        if isinstance(index, Tensor)
    )
    passes = -(-max(rows, 2).bit_length() // 8)
    sort = 1 if count <= 2048 else sort_workspace(count, 8, 8, card, passes)
    return [8 * count] * 4 + [sort]


def _sort(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Positions, and beyond 4096 elements in a row a radix sort (Sort.cpp, SortStable.cu); a bound."""
    source = args[0]
    if source.numel() == 0 or source.dim() == 0:
        return []
    length = int(source.shape[-1])
    if length <= 4096:
        return [8 * length]
    count, size = source.numel(), source.element_size()
    sort = sort_workspace(count, size, 8, card)
    if count == length:
        return [8 * count, sort + (2 * count if size < 4 else 0)]
    return [8 * count, 8 * count, size * count, sort + (18 * count if size < 4 else 0), 66 << 10]


def _scan(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Casts to the result's type; a single row is scanned by cub, with state per tile (bound)."""
    source, result = args[0], outputs[0]
    cast = [_bytes(result)] if source.dtype is not result.dtype else []
    if source.dim() > 1 and source.numel() != source.shape[-1]:
        return cast
    state = 16 * -(-source.numel() // 896) + 1279
    return [*cast, state if source.numel() else 0]


def _top_k(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Digit counts per block for long rows (TensorTopK.cu); a bound."""
    return [512 << 10] if int(args[0].shape[-1]) >= 4096 else []


def _non_zero(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Counts and the workspace of cub's selection; a bound."""
    return [4, args[0].numel() // 4 + 1023]


def _bool_index(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Masks among the indices become positions first."""
    masks = [mask for mask in args[1] if isinstance(mask, Tensor) and mask.dtype is torch.bool]
    return [piece for mask in masks for piece in _non_zero((mask,), outputs, card)]


def _permutation(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    count = outputs[0].numel()
    return [8 * count, 4 * count, 4 * count, sort_workspace(count, 4, 8, card)]


# ---- the rest ---------------------------------------------------------------------------------------


def _where(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Operands of another type than the result's are cast (TensorCompare.cpp)."""
    result = outputs[0].dtype
    cast = [arg for arg in args[1:] if isinstance(arg, Tensor) and arg.dim() and arg.dtype is not result]
    return [arg.numel() * result.itemsize for arg in cast]


def _draw(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    return [_bytes(args[0])] * 3


def _input_copy(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    return [_bytes(args[0])]


# ---- cuDNN -------------------------------------------------------------------------------------------


_SPLIT_BYTES = 17 << 20
"""The most that parts of a result take, where several blocks of threads share the sums of an element."""

_SPLIT_SHARE = 6
_TILE = 128
_FEW_TILES = 200
_SPLIT_SHARE_OF_WEIGHT = 128
_LEAST_SPLIT_OF_WEIGHT = 2 << 20
_LEAST_POINTS = 256


def _convolution_bytes(
    source: Tensor, weight: Tensor, result: Tensor, groups: int, stride: Sequence[int], made: Tensor
) -> int:
    """The workspace of one pass, as an H100's cuDNN 9.19 asks for it; `bench/results/gpu_scratch.csv`.

    Its kernels want channels last, and a multiple of 16 bytes of them: other operands are copied. What it
    takes of operands that suit it are parts of sums. In a tenth of the measured calls cuDNN took another way,
    and more; on a card that is there, `cuda/probe` measures.

    Args:
        source: what goes in.
        weight: of the layer.
        result: what comes out.
        groups: of channels.
        stride: of the kernel.
        made: of the three, what the pass computes.
    """
    if 1 < groups == source.shape[1]:
        return 0  # PyTorch's own kernels
    per_line = 16 // source.element_size()
    is_last = source.is_contiguous(memory_format=torch.channels_last) and source.shape[1] > 1
    channels = made.shape[1]
    tiles = -(-made.numel() // max(channels, 1) // _TILE) * -(-channels // _TILE)
    split = min(_SPLIT_BYTES, _SPLIT_SHARE * made.numel() * 4) if tiles <= _FEW_TILES else 0
    if made is weight:
        split = min(_SPLIT_BYTES, max(_LEAST_SPLIT_OF_WEIGHT, _SPLIT_SHARE_OF_WEIGHT * _bytes(weight)))
    padded = [
        _bytes(part) // max(part.shape[1], 1) * (-(-part.shape[1] // per_line) * per_line)
        for part in (source, weight, result)
    ]
    is_aligned = source.shape[1] % per_line == 0 == result.shape[1] % per_line
    if is_last and is_aligned:
        return split
    if is_last and source.element_size() == 2 and result.shape[1] % per_line == 0:
        return padded[0] + padded[1] + split
    points = math.prod(source.shape[2:])
    if math.prod(weight.shape[2:]) == 1 == math.prod(stride) and points > _LEAST_POINTS and not is_last:
        return split if made is weight else 0
    return sum(padded) + (split if made is weight else 0)


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    return [_convolution_bytes(args[0], args[1], outputs[0], args[8], args[3], outputs[0])]


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[Block]:
    """The input's gradient first, then the weight's; each gives its workspace back."""
    result, source, weight, stride, groups, wanted = args[0], args[1], args[2], args[4], args[9], args[10]
    return [
        (_convolution_bytes(source, weight, result, groups, stride, made), phase, phase)
        for phase, made in enumerate((source, weight))
        if wanted[phase]
    ]


def _recurrent(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """The workspace of an H100's cuDNN 9.19, which is up to 8 % smaller; with several layers, up to 40 %."""
    return [recurrent_workspace(args[1], outputs[0], args[9], args[13])]


def _recurrent_backward(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[Block]:
    """The same for the input's gradient, and then for the weights'."""
    size = recurrent_workspace(args[1], args[6], args[13], args[17])
    return [(size, 0, 0), (size, 1, 1)]


def recurrent_workspace(weights: Sequence[Tensor], output: Tensor, layers: int, both: bool) -> int:
    """Most that cuDNN takes for a recurrent layer; `both`: of two directions."""
    return sum(map(_bytes, weights)) + layers * (1 + both) * (16 << 20) + 31 * _bytes(output) // 5


def _encoder_layer(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Bound, of transformers/cuda/attention.cu: the CPU's, which has the scores as a whole."""
    return [encoder.encoder_layer(args, outputs)]


def _native_attention(args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[int]:
    """Bound, of transformers/cuda/attention.cu, likewise."""
    return [encoder.native_attention(args, outputs)]


RULES: dict[str, Pieces] = {
    "aten::convolution": _convolution,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _native_attention,
    "aten::sum": _reduce(4),
    "aten::mean": _reduce(4),
    "aten::prod": _reduce(4),
    "aten::max": _extremum,
    "aten::min": _extremum,
    "aten::amax": _reduce(4),
    "aten::amin": _reduce(4),
    "aten::argmax": _reduce(16),
    "aten::argmin": _reduce(16),
    "aten::norm": _reduce(4, dims_at=2),
    "aten::linalg_vector_norm": _reduce(4, dims_at=2),
    "aten::var": _reduce(16),
    "aten::std": _reduce(16),
    "aten::var_mean": _reduce(16),
    "aten::any": _logical,
    "aten::all": _logical,
    "aten::_foreach_norm": _foreach_norm,
    "aten::logsumexp": _log_sum_exp,
    "aten::mse_loss": _element_loss,
    "aten::smooth_l1_loss": _element_loss,
    "aten::huber_loss": _element_loss,
    "aten::binary_cross_entropy": _own_loss,
    "aten::binary_cross_entropy_with_logits": _logit_loss,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::embedding": _embedding,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::index": _bool_index,
    "aten::nonzero": _non_zero,
    "aten::masked_select": lambda args, outputs, card: _non_zero(args[1:], outputs, card),
    "aten::sort": _sort,
    "aten::argsort": lambda args, outputs, card: [_bytes(args[0]), *_sort(args, outputs, card)],
    "aten::cumsum": _scan,
    "aten::cumprod": _scan,
    "aten::topk": _top_k,
    "aten::randperm": _permutation,
    "aten::multinomial": _draw,
    "aten::where": _where,
    "aten::im2col": _input_copy,
    "aten::mm": matrix.matrix_product,
    "aten::addmm": matrix.matrix_product,
    "aten::bmm": matrix.batched_product,
    "aten::baddbmm": matrix.batched_product,
    "aten::mv": matrix.matrix_vector,
    "aten::_scaled_dot_product_flash_attention": attention.flash_scratch,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward_scratch,
    "aten::_scaled_dot_product_efficient_attention": attention.efficient_scratch,
}


PHASES: dict[str, Phases] = {
    "aten::convolution_backward": _convolution_backward,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward_scratch,
}


def blocks(schema_name: str, args: Sequence[Any], outputs: Sequence[Tensor], card: CardFacts) -> list[Block]:
    """Blocks of scratch memory that an operator takes on a card.

    Args:
        schema_name: such as "aten::mm".
        args: positional arguments of the call.
        outputs: the tensors that it returned, in order.
        card: where it runs.
    """
    if not outputs:
        return []
    several, rule = PHASES.get(schema_name), RULES.get(schema_name)
    found = several(args, outputs, card) if several is not None else []
    if rule is not None:
        found = [(size, 0, 0) for size in rule(args, outputs, card)]
    return [block for block in found if block[0] > 0]


# ---- results ----------------------------------------------------------------------------------------


HOST_OUTPUTS: dict[str, tuple[int, ...]] = {
    "aten::_scaled_dot_product_efficient_attention": (2, 3),
    "aten::_efficient_attention_forward": (2, 3),
}
"""Outputs that lie in host memory on a CUDA build too: seed and offset of the random numbers."""


def mended(schema_name: str, args: Sequence[Any], result: Any) -> Any:
    """A fake CPU result as the CUDA kernel would return it, where the two differ in size."""
    mend = _MENDS.get(schema_name)
    return result if mend is None else mend(args, result)


def _full_statistics(args: Sequence[Any], result: Any) -> Any:
    """Mean and deviation are FP32 for half inputs."""
    return (result[0], *(_widened(part) for part in result[1:3]))


def _widened(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.float32) if tensor.dtype in _HALF else tensor


def _whole_loss(args: Sequence[Any], result: Any) -> Any:
    """The kernel writes one value per element into the result's storage, and then shrinks its shape only."""
    at = 3 if len(args) > 3 and isinstance(args[2], (Tensor, type(None))) else 2
    if (len(args) > at and args[at] == 0) or result.dim() > 0 or args[0].numel() == 0:
        return result
    return torch.empty(args[0].numel(), dtype=result.dtype, device=result.device)[0]


def folded_view(args: Sequence[Any], result: Any) -> Any:
    """The result of `col2im` is a view of a buffer as large as the input, on the CPU as on a card."""
    if args[0].numel() <= result.numel():
        return result
    base = torch.empty(args[0].numel(), dtype=result.dtype, device=result.device)
    return base.as_strided(result.shape, result.stride())


def _recurrent_reserve(args: Sequence[Any], result: Any) -> Any:
    """What an LSTM layer keeps for backward: four gates and the cell per step, as cuDNN is assumed to."""
    if result[3] is None or result[3].numel() > 0:
        return result
    size = 5 * result[0].numel() * result[0].element_size()
    return (*result[:3], torch.empty(size, dtype=torch.uint8, device=result[0].device))


_MENDS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "aten::mkldnn_rnn_layer": _recurrent_reserve,
    "aten::native_layer_norm": _full_statistics,
    "aten::native_batch_norm": _full_statistics,
    "aten::col2im": folded_view,
    "aten::mse_loss": _whole_loss,
    "aten::smooth_l1_loss": _whole_loss,
    "aten::binary_cross_entropy": _whole_loss,
}
