# SPDX-License-Identifier: Apache-2.0
"""Which CPU kernels are measured at plan time, and how much of a call that would compute for long.

The blocks of a matrix product stop growing with rows and columns early, so a large product runs with fewer of
them. `scratch_convolution` has the rules for convolutions, `scratch_run` the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memscale.ops import scratch_convolution
from memscale.ops.scratch import RULES
from memscale.ops.scratch_run import OPERAND_BYTES, SLOW_FLOPS, flop_limit, highest, line, peak
from memscale.torchkit.described_calls import Call, Shape, describe

_PRODUCT_FLOPS = 4_000_000_000
"""The same for recurrent layers, and for low-precision products where the processor has them."""

_LIGHT_BYTES = 16 << 20
"""The most that operands and outputs of an operator may take that is only measured when it is quick."""

_UNKNOWN_BYTES = 4 << 20
"""The same for an operator whose work may grow faster than its operands."""

SHRUNK_MARGIN_BYTES = 512 * 1024
"""Added per thread to what a product with fewer rows and columns took."""

_LEAST_CHANNELS = 4
"""Of an image, in a part that is measured: with one alone its layout does not show."""

_LEAST_BATCH = 4
"""Matrices that are left of a batched product; fewer may go to the threads in another way."""

_HALF = (torch.bfloat16, torch.float16)

Measure = Callable[[Call], "int | None"]
"""The peak of a call, outputs included, bytes; None: not measured."""


def product(call: Call, flops: int = _PRODUCT_FLOPS, slow: int = SLOW_FLOPS) -> int | None:
    """Only low precision takes scratch, unless FP32 products are set to be less precise.

    Args:
        call: whole.
        flops: of one run, at most.
        slow: the same where the processor has no instructions for the precision.
    """
    left, right = [value for value in call.args if isinstance(value, Shape)][-2:]
    if left.dtype not in _HALF and torch.get_float32_matmul_precision() == "highest":
        return call.outputs if _is_matrix(left) and _is_matrix(right) else _copied_product(call)
    whole = (*left.size[:-2], left.size[-2], right.size[-1])
    size = _fitting(whole, left.size[-1], left.dtype, flop_limit(left.dtype, flops, slow))
    if size is None:
        return None
    small = call
    for index, value in enumerate(call.args):
        if isinstance(value, Shape):
            dimensions = _product_dimensions(value is left, value is right, len(value.size))
            small = _cut_product(small, index, dimensions, whole, size)
    most = peak(small)
    if most is None or size == whole:
        return most
    margin = 0 if size[-2:] == whole[-2:] else SHRUNK_MARGIN_BYTES * torch.get_num_threads()
    return most - math.prod(size) * left.dtype.itemsize + call.outputs + margin


def _is_matrix(operand: Shape) -> bool:
    """Whether BLAS takes an operand as it lies: real numbers in rows or columns, no overlap."""
    if operand.dtype.is_complex:
        return False
    (rows, columns), (down, across) = operand.size[-2:], operand.stride[-2:]
    laid = (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
    whole = len(operand.size) < 3 or operand.stride[0] >= rows * columns
    return laid and whole


def _copied_product(call: Call) -> int:
    """Of operands that are copied before they are multiplied: measured, or all of them."""
    copies = sum(value.bytes for value in call.args if isinstance(value, Shape))
    return _anything(call) or call.outputs + copies


def _fitting(whole: Sequence[int], inner: int, dtype: torch.dtype, limit: int) -> tuple[int, ...] | None:
    """Output dimensions, halved until the product is quick and small; None if that does not help."""
    size = list(whole)

    def too_large() -> bool:
        *batch, rows, columns = size
        elements = math.prod(batch) * ((rows + columns) * inner + rows * columns)
        return 2 * math.prod(size) * inner > limit or elements * dtype.itemsize > OPERAND_BYTES

    while too_large():
        if len(size) == 3 and size[0] > _LEAST_BATCH:
            size[0] = max(size[0] // 2, _LEAST_BATCH)
            continue
        longest = -2 if size[-2] >= size[-1] else -1
        if size[longest] < 2:
            return None
        size[longest] //= 2
    return tuple(size)


def _product_dimensions(is_left: bool, is_right: bool, rank: int) -> dict[int, int]:
    """Dimension of an operand → dimension of the output, both counted from the end."""
    dimensions = {-2: -2} if is_left else {-1: -1} if is_right else {-1: -1, -2: -2}
    return {own: output for own, output in {**dimensions, -3: -3}.items() if -own <= rank}


def _cut_product(
    call: Call, index: int, dimensions: dict[int, int], whole: Sequence[int], size: Sequence[int]
) -> Call:
    """Cuts one operand to the output's dimensions; what is broadcast stays as it is."""
    rank = len(call.args[index].size)
    for own, output in dimensions.items():
        if -output <= len(whole) and call.args[index].size[own] == whole[output]:
            call = call.cut([(index, rank + own)], size[output])
    return call


def _recurrent(call: Call) -> int | None:
    """A layer of an LSTM. Not on a part of its steps: the workspace's size is fixed by the forward.

    Without gradients it has no workspace, and another kernel.
    """
    source, of_input, of_hidden = call.args[:3]
    flops = 4 * math.prod(source.size[:2]) * (math.prod(of_input.size) + math.prod(of_hidden.size))
    quick = flops <= flop_limit(source.dtype, _PRODUCT_FLOPS) and call.room <= OPERAND_BYTES
    return peak(call, torch.is_grad_enabled()) if quick else None


def _encoder_layer(call: Call) -> int | None:
    """The fused forward of an encoder layer, or of attention, that PyTorch takes in evaluation."""
    source, shapes = call.args[0], [value for value in call.args if isinstance(value, Shape)]
    if len(source.size) != 3:
        return None
    batch, length, width = source.size
    places = [(index, 0) for index, value in enumerate(call.args) if value == source]
    # A mask, which has another shape, belongs to the whole batch.
    has_mask = any(len(shape.size) > 2 or shape.dtype is torch.bool for shape in shapes[len(places) :])
    weights = sum(math.prod(shape.size) for shape in shapes[len(places) :])
    flops = 2 * batch * length * (weights + 2 * length * width)
    parts = max(-(-flops // flop_limit(source.dtype, _PRODUCT_FLOPS)), -(-call.room // OPERAND_BYTES), 1)
    share = batch // parts
    if share < 1 or (has_mask and parts > 1):
        return None
    events = line(call, places, batch, share, gradients=False)
    return None if events is None else highest(events)


def light(call: Call) -> int | None:
    """Anything whose time is about that of reading its operands."""
    return peak(call) if call.room <= _LIGHT_BYTES else None


def _bag_backward(call: Call) -> int | None:
    """Not of maxima, whose places zeros do not tell."""
    return None if call.args[8] == 2 else light(call)


def _anything(call: Call) -> int | None:
    """An operator without a rule: whole where it is small, else two parts of its batch or channels."""
    most = peak(call) if call.room <= _UNKNOWN_BYTES else None
    shapes = [
        (place, value) for place, value in enumerate(call.args) if isinstance(value, Shape) and value.size
    ]
    if most is not None or not shapes or call.room <= _UNKNOWN_BYTES:
        return most
    are_images = all(len(value.size) > 2 and value.size[1] == shapes[0][1].size[1] for _, value in shapes)
    ways = ((0, 2, _UNKNOWN_BYTES), (1, _LEAST_CHANNELS, _LIGHT_BYTES))
    for dimension, least, limit in ways if are_images else ways[:1]:
        batch = shapes[0][1].size[dimension]
        share = batch * limit // call.room
        if share >= least:
            places = [(place, dimension) for place, value in shapes if value.size[dimension] == batch]
            events = line(call, places, batch, share)
            return None if events is None else highest(events)
    return None


MEASURES: dict[str, Measure] = {
    "aten::mm": product,
    "aten::addmm": product,
    "aten::bmm": product,
    "aten::baddbmm": product,
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::convolution": scratch_convolution.forward,
    "aten::convolution_backward": scratch_convolution.backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _encoder_layer,
    **dict.fromkeys(
        (
            "aten::_embedding_bag",
            "aten::_upsample_bicubic2d_aa",
            "aten::_upsample_bicubic2d_aa_backward",
            "aten::_upsample_bilinear2d_aa",
            "aten::_upsample_bilinear2d_aa_backward",
            "aten::_upsample_nearest_exact2d",
            "aten::_upsample_nearest_exact2d_backward",
            "aten::binary_cross_entropy_with_logits",
            "aten::col2im",
            "aten::embedding_dense_backward",
            "aten::huber_loss",
            "aten::im2col",
            "aten::index_add",
            "aten::kthvalue",
            "aten::logsumexp",
            "aten::mean",
            "aten::median",
            "aten::mse_loss",
            "aten::native_batch_norm",
            "aten::native_batch_norm_backward",
            "aten::native_group_norm",
            "aten::native_group_norm_backward",
            "aten::scatter_reduce",
            "aten::smooth_l1_loss",
            "aten::sort",
            "aten::unfold_backward",
            "aten::upsample_bicubic2d",
            "aten::upsample_bicubic2d_backward",
            "aten::upsample_bilinear2d",
            "aten::upsample_bilinear2d_backward",
            "aten::upsample_linear1d",
            "aten::upsample_linear1d_backward",
            "aten::upsample_nearest2d",
            "aten::upsample_nearest2d_backward",
            "aten::upsample_trilinear3d",
            "aten::upsample_trilinear3d_backward",
        ),
        light,
    ),
    **dict.fromkeys(
        (
            "aten::_euclidean_dist",
            "aten::_linalg_det",
            "aten::_linalg_eigh",
            "aten::_linalg_solve_ex",
            "aten::_linalg_svd",
            "aten::gelu",
            "aten::gelu_backward",
            "aten::linalg_inv_ex",
            "aten::linalg_matrix_exp",
            "aten::linalg_qr",
        ),
        _anything,
    ),
}
"""Operators that are measured. One that may take long, or that is not pure, has no place here."""

_NEVER = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
     torch.Tag.nondeterministic_seeded, torch.Tag.pointwise}
)  # fmt: skip
"""Tags of operators that are not run unasked: zeros would tell nothing, or a generator would move."""


def measure_of(func: Any) -> Measure | None:
    """How an operator is measured; None: it is not."""
    name = func._schema.name
    known = MEASURES.get(name)
    if known is not None or name in RULES or func.namespace != "aten" or not func._schema.returns:
        return known
    return _anything if _NEVER.isdisjoint(func.tags) else None


def measured_scratch(
    measure: Measure, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int
) -> int | None:
    """What a call allocates beyond its outputs, bytes; None where it is not measured.

    Args:
        measure: of the operator, from `MEASURES`.
        func: the operator overload.
        args: positional arguments; tensors may be fake.
        kwargs: keyword arguments.
        outputs: bytes of the storages that the graph counts as made by the call.
    """
    try:
        call = describe(func, args, kwargs, outputs)
    except (AttributeError, RuntimeError, TypeError):  # a size that is no number, as nested tensors have
        return None
    most = measure(call)
    return None if most is None else max(most - outputs, 0)
