# SPDX-License-Identifier: Apache-2.0
"""What limits an operator: its class of work, the bytes it moves, and formulas that PyTorch lacks.

The classes are those between which measurements on hosts differ: elements per second of an addition, of
`exp`, of `tanh` and of a dropout's mask lie a factor of ten apart each. An operator that no list below names
is a `MOVE` if PyTorch calls it pointwise, and `OTHER` if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memscale import _core

_MATRIX = (
    "mm addmm mv addmv addr dot vdot linear linear_backward _addmm_activation _scaled_mm _grouped_mm "
    "_int_mm _linear_pointwise mkldnn_linear mkldnn_linear_backward_input mkldnn_linear_backward_weights "
    "_mkl_linear"
)
_BATCH = "bmm baddbmm addbmm"
_CONVOLUTION = (
    "convolution convolution_backward _convolution convolution_overrideable cudnn_convolution "
    "mkldnn_convolution convolution_backward_overrideable cudnn_convolution_transpose _slow_conv2d_forward "
    "_slow_conv2d_backward slow_conv3d_forward conv_depthwise3d _conv_depthwise2d"
)
_RECURRENT = "mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn"
_REDUCE = (
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward _softmax _softmax_backward_data _log_softmax "
    "_log_softmax_backward_data sum mean amax amin max min logsumexp norm linalg_vector_norm all any prod "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward _foreach_norm cumsum"
)
_CHANNEL = (
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training cudnn_batch_norm cudnn_batch_norm_backward batch_norm_with_update "
    "batch_norm_backward batch_norm_stats batch_norm_elemt batch_norm_backward_reduce "
    "batch_norm_backward_elemt var var_mean std std_mean"
)
_SELECT = "_safe_softmax where masked_fill masked_fill_ masked_scatter"
_WINDOW = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices "
    "max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward "
    "adaptive_max_pool2d adaptive_max_pool2d_backward im2col col2im grid_sampler_2d "
    "grid_sampler_2d_backward"
)
_GATHER = (
    "embedding embedding_dense_backward _embedding_bag _embedding_bag_dense_backward index index_put "
    "index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put index_select index_add index_add_ gather "
    "scatter scatter_ scatter_add scatter_add_ take sort topk nonzero bincount repeat_interleave "
    "unfold_backward _embedding_bag_backward"
)
_MATH = (
    "exp exp_ expm1 log log1p log2 log10 sin cos erf erfc sqrt sqrt_ sigmoid sigmoid_ sigmoid_backward silu "
    "silu_ silu_backward gelu gelu_backward softplus softplus_backward log_sigmoid_forward "
    "log_sigmoid_backward mish mish_backward elu elu_backward hardswish _foreach_sqrt _foreach_sqrt_ "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell gt lt ge le eq ne logical_and logical_or logical_not "
    "binary_cross_entropy binary_cross_entropy_with_logits"
)
_SLOW_MATH = "tanh tanh_ atan atan2 tan sinh cosh acos asin pow pow_ _foreach_pow digamma lgamma"
_MOVE = (
    "clone copy_ _to_copy cat stack zeros zeros_like ones ones_like full full_like fill fill_ zero_ "
    "new_zeros new_ones new_full tril triu slice_backward select_backward diagonal_backward constant_pad_nd "
    "roll repeat arange flip slice_scatter select_scatter _fused_adam_ _fused_adamw_ _fused_sgd_ "
    "reflection_pad2d replication_pad2d mse_loss mse_loss_backward"
)

_CLASSES: Final[dict[str, int]] = {
    name: work
    for names, work in (
        (_MATRIX, _core.WORK_MATRIX),
        (_BATCH, _core.WORK_BATCH),
        (_CONVOLUTION, _core.WORK_CONVOLUTION),
        (_RECURRENT, _core.WORK_RECURRENT),
        (_REDUCE, _core.WORK_REDUCE),
        (_CHANNEL, _core.WORK_CHANNEL),
        (_SELECT, _core.WORK_SELECT),
        (_WINDOW, _core.WORK_WINDOW),
        (_GATHER, _core.WORK_GATHER),
        (_MATH, _core.WORK_MATH),
        (_SLOW_MATH, _core.WORK_SLOW_MATH),
        (_MOVE, _core.WORK_MOVE),
    )
    for name in names.split()
}

_FEW_CHANNELS: Final = 8
"""A convolution with fewer input channels per group than this is limited by memory and overhead."""

_QUICK_POWERS: Final = frozenset((0, 0.5, 1, 2, 3, -0.5, -1, -2))
"""Exponents that kernels replace by products and roots."""

_OVERWRITES: Final = frozenset(
    ("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "exponential_", "random_")
)
"""In-place operators that do not read what they write to."""

_WRITES_NOTHING: Final = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)


def static_class(name: str, tags: Iterable[Any]) -> int:
    """The class of an operator as far as its arguments do not matter.

    Args:
        name: of its schema, such as "aten::mm".
        tags: of its overload.
    """
    short = name.split("::")[-1]
    known = _CLASSES.get(short)
    if known is not None:
        return known
    if "attention" in short:
        return _core.WORK_ATTENTION
    if short.startswith("upsample_"):
        return _core.WORK_WINDOW
    if torch.Tag.nondeterministic_seeded in tags:
        return _core.WORK_RANDOM
    if torch.Tag.pointwise in tags or short.startswith("_foreach_"):
        return _core.WORK_MOVE
    return _core.WORK_OTHER


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], index: int) -> int:
    """`index`: of the weight among the arguments; a gradient has the output's gradient before its input."""
    weight = args[index] if len(args) > index else kwargs.get("weight")
    if not isinstance(weight, Tensor) or weight.dim() < 2 or weight.shape[1] >= _FEW_CHANNELS:
        return _core.WORK_CONVOLUTION
    in_groups = weight.shape[0] > 1 and (args[-1] if index == 1 else args[-2]) not in (0, 1)
    return _core.WORK_GROUPED_GRADIENT if index == 2 and in_groups else _core.WORK_GROUPED


def _power(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], index: int) -> int:
    exponent = args[index] if len(args) > index else kwargs.get("exponent")
    return _core.WORK_MOVE if exponent in _QUICK_POWERS else _core.WORK_SLOW_MATH


def _gelu(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], index: int) -> int:
    how = kwargs.get("approximate", args[index] if len(args) > index else "none")
    return _core.WORK_SLOW_MATH if how == "tanh" else _core.WORK_MATH


def _copy(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], index: int) -> int:
    """A copy whose innermost dimension is another than its source's goes element by element."""
    source = args[index] if len(args) > index else None
    if isinstance(source, Tensor) and outputs and _is_reordered(source, outputs[0]):
        return _core.WORK_SELECT
    return _core.WORK_MOVE


def _is_reordered(source: Tensor, made: Tensor) -> bool:
    if source.shape != made.shape:
        return False  # what is broadcast stays in the cache
    inner = [step for size, step, there in zip(made.shape, source.stride(), made.stride(), strict=True)
             if there == 1 and size > 1]  # fmt: skip
    return bool(inner) and inner[-1] > 1


Refine = Callable[[Sequence[Any], dict[str, Any], Sequence[Tensor], int], int]

_REFINES: Final[dict[str, tuple[Refine, int]]] = {
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), (_convolution, 1)),
    **dict.fromkeys(("cudnn_convolution", "mkldnn_convolution", "_conv_depthwise2d"), (_convolution, 1)),
    "convolution_backward": (_convolution, 2),
    "convolution_backward_overrideable": (_convolution, 2),
    "pow": (_power, 1),
    "pow_": (_power, 1),
    "gelu": (_gelu, 1),
    "gelu_backward": (_gelu, 2),
    "clone": (_copy, 0),
    "_to_copy": (_copy, 0),
    "copy_": (_copy, 1),
}
"""Operators whose class depends on their arguments, and which argument decides."""


def refinement(name: str) -> tuple[Refine, int] | None:
    """How the class of an operator depends on its arguments; None if it does not."""
    return _REFINES.get(name.split("::")[-1])


def is_half(tensors: Iterable[Tensor]) -> bool:
    """Whether the first floating-point tensor among them is of half precision or less."""
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor.element_size() <= 2
    return False


def moved_bytes(name: str, work: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes that an operator reads and writes.

    What is broadcast is read once. Of what is picked from by an index, as much is read as is picked.

    Args:
        name: of its schema.
        work: its class.
        inputs: tensors among its arguments; of an in-place operator, the one that it changes too.
        outputs: tensors that it returned.
    """
    short = name.split("::")[-1]
    if short in _WRITES_NOTHING:
        return 0
    written = sum(map(_held, outputs))
    if short in _OVERWRITES:
        inputs = inputs[1:]
    if work == _core.WORK_GATHER:
        return written + sum(min(_held(tensor), written) for tensor in inputs)
    return written + sum(map(_held, inputs))


def _held(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, each place in memory once."""
    if 0 not in tensor.stride():
        return tensor.numel() * tensor.element_size()
    own = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return min(math.prod(own), tensor.numel()) * tensor.element_size()


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Scores and their product with the values: two matrix products per head."""
    batch, heads, rows, width = query.shape
    return 2 * int(batch * heads * rows * key.shape[2]) * int(width + value.shape[3])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Five products instead of two."""
    return _attention(query, key, value) * 5 // 2


def _convolution_backward(grad: Any, source: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """As many as forward for each gradient that is asked for. PyTorch's formula knows no groups."""
    transposed, mask = args[4], args[7]
    places = source if transposed else grad
    wanted = sum(map(bool, mask[:2]))
    return 2 * wanted * int(places.numel()) * (int(weight.numel()) // max(int(weight.shape[0]), 1))


def _recurrent(source: Any, *args: Any, **kwargs: Any) -> int:
    """A product of every step's input and state with the weights, which are the matrices that come next."""
    weights = args[0] if isinstance(args[0], (list, tuple)) else args[:4]
    size = sum(int(weight.numel()) for weight in weights if isinstance(weight, Tensor) and weight.dim() == 2)
    return 2 * int(source.numel() // max(int(source.shape[-1]), 1)) * size


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    """Gradients of inputs and of weights: twice the products."""
    return 2 * _recurrent(*args)


FLOPS: Final[dict[str, Callable[..., int]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::_cudnn_rnn": _recurrent,
}
"""Floating-point operations that `torch.utils.flop_counter` lacks or has without groups, by schema name."""
