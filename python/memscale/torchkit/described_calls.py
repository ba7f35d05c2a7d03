# SPDX-License-Identifier: Apache-2.0
"""Calls of operators with shapes in place of tensors: keys, and what a measurement runs on zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Shape(NamedTuple):
    """Stands for a tensor argument: all of it that decides what a kernel allocates.

    Attributes:
        size: elements per dimension.
        stride: elements.
        dtype: of the elements.
        conjugate: the elements are those of a complex tensor, conjugated when they are read.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool = False

    @property
    def reach(self) -> int:
        """Elements of the smallest storage that holds the tensor."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of that storage."""
        return self.reach * self.dtype.itemsize

    def zeros(self) -> Tensor:
        """A real tensor of zeros."""
        made = torch.zeros(self.reach, dtype=self.dtype).as_strided(self.size, self.stride)
        return made.conj() if self.conjugate else made

    def cut(self, dimension: int, size: int) -> Shape:
        """The same with fewer elements along a dimension, and no gaps where there were none."""
        step = self.stride[dimension]
        extent = step * self.size[dimension]
        stride = tuple(
            other // extent * step * size if extent and other >= extent and other % extent == 0 else other
            for other in self.stride
        )
        return self._replace(size=(*self.size[:dimension], size, *self.size[dimension + 1 :]), stride=stride)


class Call(NamedTuple):
    """An operation, described.

    Attributes:
        func: the operator overload.
        args: positional arguments; shapes stand for tensors.
        kwargs: keyword arguments, by name.
        outputs: bytes of the storages that the graph counts as made by it.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: int

    @property
    def room(self) -> int:
        """Bytes that a run needs, beside the scratch."""
        return sum(value.bytes for value in self.args if isinstance(value, Shape)) + self.outputs

    def cut(self, places: Sequence[tuple[int, int]], size: int) -> Call:
        """The same with `size` elements along a dimension of some arguments.

        Args:
            places: (position of the argument, dimension) pairs.
            size: new number of elements there.
        """
        args = list(self.args)
        for index, dimension in places:
            args[index] = args[index].cut(dimension, size)
        return self._replace(args=tuple(args))


def describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int) -> Call:
    """A call as the measurement reads it; tensors may be fake."""
    shaped = tree_map_only(Tensor, _shape_of, (tuple(args), tuple(sorted(kwargs.items()))))
    return Call(func, _frozen(shaped[0]), _frozen(shaped[1]), outputs)


def _shape_of(tensor: Tensor) -> Shape:
    size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    return Shape(size, stride, tensor.dtype, tensor.is_conj())


def _frozen(value: Any) -> Any:
    """The value with tuples for lists, so that it can be a key."""
    if isinstance(value, Shape) or not isinstance(value, (list, tuple)):
        return value
    return tuple(map(_frozen, value))
