# SPDX-License-Identifier: Apache-2.0
"""Products of one tile of a head, and the gradients of its parameters, summed over tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)

_BLOCK_BYTES = 1 << 22
"""Part of a weight's gradient that is summed at a time where it takes another dtype in between."""


@contextmanager
def own_saves() -> Iterator[None]:
    """Saves of graphs that live and die inside the block are nobody else's business: not a checkpoint's."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        yield


class Head(Protocol):
    """A head as a function of rows.

    Attributes:
        dtype: of its logits.
        classes: their number.
        linear: weight [classes, width] and bias [classes], where it is nothing else; None for other heads.
        params: parameters that get a gradient.
    """

    dtype: torch.dtype
    classes: int
    linear: tuple[Tensor, Tensor | None] | None
    params: Sequence[Tensor]

    def run(self, rows: Tensor, stand_ins: Sequence[Tensor] = ()) -> Tensor:
        """Logits [..., classes] of rows [..., width], as the module's own forward computes them."""

    def stand_ins(self) -> Sequence[Tensor]:
        """Stand-ins for `params` that gradients are taken of."""


class ProductTiles:
    """A head that is a product with a weight, and maybe a bias: gradients are summed where they stay."""

    def __init__(self, head: Head, wants_rows: bool) -> None:
        assert head.linear is not None
        self.wants_rows = wants_rows
        weight, bias = head.linear
        self.weight = weight.detach().to(head.dtype)
        self.bias = None if bias is None else bias.detach().to(head.dtype)
        self.rows: Tensor | None = None
        self.memory: Tensor | None = None
        self.grads = [WeightSum(param) for param in head.params]
        self.places = {id(param): grad for param, grad in zip(head.params, self.grads, strict=True)}
        self.of_weight = self.places.get(id(weight))
        self.of_bias = None if bias is None else self.places.get(id(bias))

    def logits(self, rows: Tensor, size: int) -> Tensor:
        """Logits of a tile of at most `size` rows, in memory that the next tile's take over."""
        if self.memory is None:
            self.memory = rows.new_empty((min(size, len(rows)), len(self.weight)), dtype=self.weight.dtype)
        self.rows = rows.to(self.weight.dtype)
        out = self.memory[: len(rows)]
        if self.bias is None:
            return torch.mm(self.rows, self.weight.t(), out=out)
        return torch.addmm(self.bias, self.rows, self.weight.t(), out=out)

    def backward(self, grad: Tensor) -> Tensor | None:
        """Gradient of the rows; those of weight and bias are added up."""
        assert self.rows is not None
        if self.of_weight is not None:
            self.of_weight.add_product(grad, self.rows)
        if self.of_bias is not None:
            self.of_bias.add(grad.sum(0, dtype=self.of_bias.sum_dtype))
        self.rows = None
        return torch.mm(grad, self.weight) if self.wants_rows else None

    def gradients(self) -> list[Tensor]:
        """Of the parameters."""
        self.memory = None
        return [grad.result() for grad in self.grads]


class AnyTiles:
    """Any other head: autograd gives the gradients of each tile."""

    def __init__(self, head: Head, wants_rows: bool) -> None:
        self.head = head
        self.wants_rows = wants_rows
        self.grads = [WeightSum(param) for param in head.params]
        self.rows: Tensor | None = None
        self.out: Tensor | None = None
        self.stand_ins: Sequence[Tensor] = ()

    def logits(self, rows: Tensor, size: int) -> Tensor:
        """Logits of a tile."""
        with torch.enable_grad(), own_saves():
            self.rows = rows.requires_grad_(self.wants_rows)
            self.stand_ins = self.head.stand_ins()
            self.out = self.head.run(self.rows, self.stand_ins)
        return self.out.detach().clone()  # what follows changes it, and its graph may need it

    def backward(self, grad: Tensor) -> Tensor | None:
        """Gradient of the rows; those of the parameters are added up."""
        assert self.rows is not None and self.out is not None
        inputs = [self.rows] if self.wants_rows else []
        inputs += self.stand_ins
        made = list(torch.autograd.grad(self.out, inputs, grad, allow_unused=True))
        self.rows = self.out = None
        self.stand_ins = ()
        of_rows = made.pop(0) if self.wants_rows else None
        for total, part in zip(self.grads, made, strict=True):
            if part is not None:
                total.add(part)
        return of_rows

    def gradients(self) -> list[Tensor]:
        """Of the parameters."""
        return [grad.result() for grad in self.grads]


class WeightSum:
    """The gradient of a parameter, summed over tiles.

    An FP32 sum of a half-precision parameter's gradient would take twice the gradient's memory beside it. So
    it is kept as two numbers of the parameter's own dtype, the sum and what its rounding has left over:
    16 bits together in BF16, and the first of them is the gradient.
    """

    def __init__(self, param: Tensor) -> None:
        self.high = torch.zeros_like(param, memory_format=torch.contiguous_format)
        self.low = torch.zeros_like(self.high) if param.dtype in HALF else None
        self.sum_dtype = torch.float32 if self.low is not None else param.dtype

    def add_product(self, grad: Tensor, rows: Tensor) -> None:
        """Adds gradᵀ · rows, [classes, width]."""
        if grad.dtype == self.high.dtype and self.low is None:
            self.high.addmm_(grad.t(), rows)
            return
        step = max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
        for start in range(0, len(self.high), step):
            part = slice(start, start + step)
            self._add(_wide_product(grad[:, part].t(), rows), part)

    def add(self, part: Tensor) -> None:
        """Adds a gradient."""
        self._add(part, ...)

    def _add(self, value: Tensor, part: Any) -> None:
        high = self.high[part]
        if self.low is None:
            high.add_(value)
            return
        low = self.low[part]
        total = low.to(torch.float32).add_(value).add_(high)
        high.copy_(total)
        low.copy_(total.sub_(high))

    def result(self) -> Tensor:
        """The sum."""
        self.low = None
        return self.high


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A product of half-precision matrices, in FP32 where the device gives it."""
    if left.dtype in HALF and left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float16:  # partial sums may leave its range
        return torch.mm(left.float(), right.float())
    return torch.mm(left, right)
