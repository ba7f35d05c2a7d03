# SPDX-License-Identifier: Apache-2.0
"""Layouts of results as the operators' own code decides them, not PyTorch's mode of fakes.

The mode of fakes has short ways for common operators and formulas in Python for others. For dimensions of one
element, and for operands that do not lie in the order of their dimensions, these come to other strides than
the operator. That matters: whether such a tensor counts as `channels_last` decides whether a convolution
copies it. Element-wise operators follow TensorIterator's rules here (aten/src/ATen/TensorIterator.cpp); for
others the operator's own code runs on "meta", without data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memscale.torchkit.extents import is_dense

_BY_BACKEND = frozenset({"aten::convolution", "aten::convolution_backward"})
"""Operators for which the mode of fakes asks PyTorch what the backend does, which "meta" cannot know."""

_WRAPPING = frozenset({"Scalar", "Scalar_Tensor", "Scalar_mode"})
"""Overloads that make a tensor of a number: operands are then not of one shape."""

_AS_FIRST = frozenset(
    f"aten::{name}"
    for name in ("clone", "empty_like", "flip", "full_like", "ones_like", "rand_like", "randn_like", "sort",
                 "zeros_like")
)  # fmt: skip
"""Operators whose results lie as the first operand does, if that has no gaps."""

_UNTAGGED = frozenset(
    f"aten::{name}"
    for name in ("gelu_backward", "hardswish", "hardswish_backward", "leaky_relu_backward",
                 "log_sigmoid_backward", "mish_backward", "silu_backward")
)  # fmt: skip
"""Element-wise operators without the tag."""

_LAST_FIRST = frozenset({"aten::leaky_relu_backward", "aten::threshold_backward"})
"""Element-wise operators that give TensorIterator their second operand first."""

_ROW_MAJOR = frozenset({"aten::masked_fill", "aten::roll"})
"""Operators whose results are contiguous; of images in channels_last, `roll` makes the same."""

Relaid = Callable[[Tensor, tuple[int, ...]], Tensor]
"""A result with other strides."""


def corrected(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, relaid: Relaid) -> Any:
    """The result of an operation on fakes, with the strides that its operator gives.

    Args:
        func: the operator overload.
        args: its arguments, strided fakes among them.
        kwargs: the others.
        result: what the mode of fakes returned.
        relaid: makes the same result with other strides.
    """
    name = func._schema.name
    if name in _BY_BACKEND or func._schema.is_mutable or not _may_differ((*args, *kwargs.values(), result)):
        return result
    if name in _AS_FIRST and not kwargs.get("memory_format"):
        return _each(result, [_as_first(args[0], one) for one in _listed(result)], relaid)
    if name in _ROW_MAJOR:
        keeps = name == "aten::roll" and not args[0].is_contiguous()
        format = suggest_memory_format(args[0]) if keeps else torch.contiguous_format
        return _each(result, [_strides_of(result, format)], relaid)
    tagged = torch.Tag.pointwise in func.tags or name in _UNTAGGED
    if tagged and isinstance(result, Tensor) and not kwargs.get("memory_format"):
        return _each(result, [_by_iterator(func, args, result)], relaid)
    on_meta = _listed(_on_meta(func, args, kwargs))
    made = _listed(result)
    return (
        _each(result, [_strides_on_meta(*pair) for pair in zip(made, on_meta, strict=True)], relaid)
        if on_meta
        else result
    )


def _may_differ(values: Iterable[Any]) -> bool:
    """Whether a tensor among them has a dimension of one element, or another order than its dimensions."""
    for value in values:
        if isinstance(value, Tensor):
            if 1 in value.shape or not value.is_contiguous():
                return True
        elif isinstance(value, (list, tuple)) and _may_differ(value):
            return True
    return False


def _listed(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (list, tuple)) else [result]


def _each(result: Any, strides: Sequence[tuple[int, ...] | None], relaid: Relaid) -> Any:
    """The results with these strides; None where they are right."""
    made = [
        one if stride is None or one.stride() == stride or 0 in one.shape else relaid(one, stride)
        for one, stride in zip(_listed(result), strides, strict=True)
    ]
    return type(result)(made) if type(result) in (list, tuple) else made[0]


# ---- by rules ------------------------------------------------------------------------------------------


def _as_first(first: Any, result: Any) -> tuple[int, ...] | None:
    if not isinstance(first, Tensor) or first.shape != result.shape or not is_dense(first):
        return None
    return first.stride()


def _by_iterator(func: Any, args: Sequence[Any], result: Tensor) -> tuple[int, ...] | None:
    """Strides that TensorIterator gives a result of its own."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not tensors:
        return None
    if func._schema.name in _LAST_FIRST:
        tensors.reverse()
    overload = func._schema.overload_name
    wraps = overload in _WRAPPING or (overload == "Tensor" and len(tensors) < 2)
    if not wraps and all(value.shape == result.shape for value in tensors):
        if all(value.is_contiguous() for value in tensors):
            return _strides_of(result, torch.contiguous_format)
        if result.dim() == 4 and all(map(_is_channels_last, tensors)):
            return _strides_of(result, torch.channels_last)
        if is_dense(tensors[0]) and len({value.stride() for value in tensors}) == 1:
            return tensors[0].stride()
    return _permuted(result.shape, tensors)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _strides_of(result: Tensor, format: torch.memory_format) -> tuple[int, ...]:
    with _disable_current_modes():
        return torch.empty(result.shape, device="meta", memory_format=format).stride()


def _permuted(shape: Sequence[int], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Strides without gaps, in the order of the operands' strides: the first that has one decides."""
    strides = [_broadcast(operand, shape) for operand in operands]

    def order(left: int, right: int) -> int:
        for stride in strides:
            if stride[left] == 0 or stride[right] == 0:
                continue
            if stride[left] != stride[right]:
                return -1 if stride[left] < stride[right] else 1
            if shape[left] > shape[right]:
                return 1
        return 0

    dimensions = [*reversed(range(len(shape)))]
    for i in range(1, len(shape)):
        moved = i
        for other in range(i - 1, -1, -1):
            found = order(dimensions[other], dimensions[moved])
            if found < 0:
                break
            if found > 0:
                dimensions[other], dimensions[moved] = dimensions[moved], dimensions[other]
                moved = other
    result = [0] * len(shape)
    for place, dimension in enumerate(dimensions):
        result[dimension] = math.prod(shape[before] for before in dimensions[:place])
    return tuple(result)


def _broadcast(operand: Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of an operand along the dimensions of a result: 0 where it is repeated."""
    missing = len(shape) - operand.dim()
    return [0] * missing + [
        0 if mine == 1 and whole != 1 else stride
        for mine, whole, stride in zip(operand.shape, shape[missing:], operand.stride(), strict=True)
    ]


# ---- by the operator's own code ---------------------------------------------------------------------------


def _on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the operator returns on "meta"; an empty list where it does not run there."""
    with _disable_current_modes(), torch.no_grad():
        like = tree_map_only(Tensor, _without_data, (tuple(args), kwargs))
        if "device" in like[1]:
            like[1]["device"] = "meta"
        try:
            return func(*like[0], **like[1])
        except Exception:  # no such kernel, or one that wants what "meta" has not
            return []


def _without_data(tensor: Tensor) -> Tensor:
    """The same form on "meta"."""
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _strides_on_meta(result: Any, on_meta: Any) -> tuple[int, ...] | None:
    if (
        not (isinstance(result, Tensor) and isinstance(on_meta, Tensor))
        or on_meta.layout is not torch.strided
    ):
        return None
    same = result.shape == on_meta.shape and result.dtype == on_meta.dtype
    return on_meta.stride() if same else None
