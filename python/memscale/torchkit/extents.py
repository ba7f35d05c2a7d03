# SPDX-License-Identifier: Apache-2.0
"""Which elements of its storage a tensor covers, and whether two tensors may overlap."""

from __future__ import annotations

import torch
from torch import Tensor

Extent = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides, elements."""


def extent_of(tensor: Tensor) -> Extent:
    """Where a strided tensor lies in its memory; all of it for others."""
    try:
        return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
    except (NotImplementedError, RuntimeError):
        return 0, (1 << 62,), (1,)


def overlap(one: Extent, other: Extent) -> bool:
    """Whether they may share an element. Two chunks of rows of one width do not; in doubt, yes."""
    if 0 in one[1] or 0 in other[1]:
        return False
    if one[0] + _reach(*one[1:]) <= other[0] or other[0] + _reach(*other[1:]) <= one[0]:
        return False
    if not one[2] or one[2] != other[2]:
        return True
    step = max(one[2])
    longest = one[2].index(step)
    widths = [
        _reach(*(part[:longest] + part[longest + 1 :] for part in extent[1:])) for extent in (one, other)
    ]
    between = (other[0] - one[0]) % step if step else 0
    return max(widths) > step or not (between >= widths[0] and step - between >= widths[1])


def is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def fills_memory(tensor: Tensor) -> bool:
    """Whether the elements of a plain tensor fill its memory, each once."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
