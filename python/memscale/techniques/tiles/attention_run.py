# SPDX-License-Identifier: Apache-2.0
"""An attention in tiles of queries: forward, and backward that computes each tile's scores again.

    forward    q rows 0…R ─ @kᵀ ─ steps ─ @v ─► output rows 0…R     saved: q, kᵀ, v and what the steps take,
               q rows R…  ─ @kᵀ ─ steps ─ @v ─► output rows R…      which are there anyway
    backward   for each tile: q @ kᵀ and the steps again, then
                 dv += pᵀ @ dy,   dp = dy @ vᵀ,   dp ─ steps, backwards ─► ds
                 dq rows = ds @ k,   dkᵀ += qᵀ @ ds,   and the rows of a mask's or bias's gradient, or its sum

A tile has all batches and heads, so k, v and their gradients are read once per tile. The product with the
values is not computed again. Sums over tiles are in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memscale.techniques.tiles.attention_steps import Form, Step, rows_of
from memscale.techniques.tiles.head_products import own_saves

FEWEST_ROWS = 64
"""Queries of a tile, at least: below, products of a tile are too small to be quick."""

_TILES = 16
"""More are not worth it: what is left of the scores is then less than q, k and v."""


def tile_rows(queries: int) -> int:
    """Queries per tile.

    Args:
        queries: in all.
    """
    return max(FEWEST_ROWS, -(-queries // _TILES))


@dataclass(frozen=True)
class Recipe:
    """How scores are made, without the tensors.

    Attributes:
        form: of the product of queries and keys.
        steps: (operation, numbers of its tensors), in order; tensors 0 and 1 are q and kᵀ.
    """

    form: Form
    steps: tuple[tuple[Step, tuple[int, ...]], ...] = ()

    @property
    def after(self) -> Form:
        """Of the scores after all steps."""
        return self.steps[-1][0].after if self.steps else self.form

    def stepped(self, product: Tensor, tensors: Sequence[Tensor], rows: slice) -> Tensor:
        """All steps, on the product of some queries with the keys."""
        queries = self.form.shape[-2]
        for step, numbers in self.steps:
            product = step.run(product, [rows_of(tensors[number], queries, rows) for number in numbers])
        return product


def flat(tensor: Tensor, lead: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A batch of matrices with one leading dimension, as `bmm` takes it.

    Args:
        tensor: [..., rows, columns].
        lead: what its leading dimensions are broadcast to.
        dtype: that it is to have.
    """
    ends = tensor.shape[-2:]
    return tensor.detach().to(dtype).expand(*lead, *ends).reshape(-1, *ends)


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


class _Enter(torch.autograd.Function):
    """Puts a product into a tile's graph, whose leaf has the product's shape and no memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, product: list[Tensor]) -> Tensor:
        return product.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


_HALF = (torch.float16, torch.bfloat16)


class _Sum:
    """A gradient as tiles add to it, [batch, rows, columns]: in place, and in float32 at least."""

    def __init__(self, like: Tensor) -> None:
        self.narrow = like.dtype in _HALF
        self.total = torch.empty_like(
            like,
            dtype=torch.float32 if self.narrow else like.dtype,
            memory_format=torch.contiguous_format,
        )
        self.empty = True

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds `left @ right`."""
        if self.narrow:
            part = torch.bmm(left, right)
            self.total = self.total.copy_(part) if self.empty else self.total.add_(part)
        else:
            self.total.baddbmm_(left, right, beta=0 if self.empty else 1)
        self.empty = False

    def take(self, lead: Sequence[int], like: Tensor) -> Tensor:
        """The sum, as the gradient of a tensor that was broadcast to some leading dimensions."""
        whole = self.total.view(*lead, *self.total.shape[-2:])
        return whole.sum_to_size(like.shape).to(like.dtype)


class _Call:
    """One attention: what its forward and backward have in common. Holds no tensors."""

    def __init__(self, recipe: Recipe, values: Tensor, dtype: torch.dtype) -> None:
        self.recipe = recipe
        self.dtype = dtype  # of the product with the values
        self.batch = torch.broadcast_shapes(recipe.after.shape[:-2], values.shape[:-2])
        self.queries, self.keys = recipe.form.shape[-2:]
        self.width = values.shape[-1]

    def tiles(self) -> Iterator[slice]:
        """Rows of each tile."""
        rows = tile_rows(self.queries)
        for start in range(0, self.queries, rows):
            yield slice(start, min(self.queries, start + rows))

    def operands(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Q [batch, queries, inner] and kᵀ [batch, inner, keys]."""
        form = self.recipe.form
        lead = form.shape[:-2]
        return flat(tensors[0], lead, form.dtype), flat(tensors[1], lead, form.dtype)

    def product(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """Q @ kᵀ of some queries, [..., rows, keys]."""
        return torch.bmm(q[:, rows], k).view(*self.recipe.form.shape[:-2], -1, self.keys)

    def run(self, values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The output, [..., queries, width]."""
        with _without_autocast(values.device.type):
            q, k = self.operands(tensors)
            v = flat(values, self.batch, self.dtype)
            # Of its own shape, and filled through a view: a view that a function returns may not be written
            # in place, and what plain PyTorch returns here may.
            output = v.new_empty(*self.batch, self.queries, self.width)
            matrices = output.view(len(v), self.queries, self.width)
            for rows in self.tiles():
                scores = self.recipe.stepped(self.product(q, k, rows), tensors, rows)
                matrices[:, rows] = torch.bmm(flat(scores, self.batch, self.dtype), v)
                del scores
        return output


class _Backward:
    """Gradients of one attention, as tiles add to them."""

    def __init__(
        self, call: _Call, grad: Tensor, values: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        self.call = call
        self.tensors = [tensor.detach() for tensor in tensors]
        self.values = values
        self.of_values, self.of_tensors = wanted[0], list(wanted[1:])
        self.q, self.k = call.operands(self.tensors)
        self.v = flat(values, call.batch, call.dtype)
        self.grad = flat(grad, call.batch, call.dtype)
        self.dv = _Sum(self.v) if self.of_values else None
        self.dk = _Sum(self.k.mT) if self.of_tensors[1] else None
        self.dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.beside = [number for number, want in enumerate(self.of_tensors) if want and number > 1]
        self.sums: dict[int, Tensor] = {}
        self.spread = self._spread()

    def _spread(self) -> dict[int, torch.Size]:
        """What is the same for all queries, in half precision: number → leading dimensions of the scores.

        Summed over the queries of a tile by autograd its gradient would be rounded once per tile.
        """
        return {
            number: step.after.shape[:-2]
            for step, numbers in self.call.recipe.steps
            for number in numbers
            if number in self.beside
            and self.tensors[number].dtype in _HALF
            and not self._has_rows(number)
            and step.takes_any_shape
        }

    def _has_rows(self, number: int) -> bool:
        tensor = self.tensors[number]
        return tensor.dim() > 1 and tensor.shape[-2] == self.call.queries

    def tile(self, rows: slice) -> None:
        """One tile's share."""
        call = self.call
        product = call.product(self.q, self.k, rows)
        if not any(self.of_tensors):
            scores = call.recipe.stepped(product, self.tensors, rows)
            self._add_values(scores, rows)
            return
        leaf = product.new_empty(()).expand(product.shape).requires_grad_()
        holder = [product]
        del product
        tensors = list(self.tensors)
        for number in self.beside:
            part = rows_of(tensors[number], call.queries, rows)
            if number in self.spread:
                part = part.expand(*self.spread[number], rows.stop - rows.start, call.keys)
            tensors[number] = part.detach().requires_grad_()
        with torch.enable_grad(), own_saves():
            scores = _Enter.apply(leaf, holder)  # type: ignore[no-untyped-call]
            scores = self._stepped(scores, tensors, rows)
        self._add_values(scores.detach(), rows)
        inputs = [leaf, *(tensors[number] for number in self.beside)]
        through = torch.bmm(self.grad[:, rows], self.v.mT).view(*call.batch, -1, call.keys)
        through = through.sum_to_size(scores.shape).to(scores.dtype)
        of_product, *beside = torch.autograd.grad(scores, inputs, through, allow_unused=True)
        del scores, through
        for number, part in zip(self.beside, beside, strict=True):
            if part is not None:
                self._add_beside(number, part, rows)
        if of_product is not None:
            self._add_product(of_product, rows)

    def _stepped(self, product: Tensor, tensors: Sequence[Tensor], rows: slice) -> Tensor:
        """The steps, with those tensors cut already that get a gradient of their own."""
        recipe = self.call.recipe
        for step, numbers in recipe.steps:
            beside = [
                tensors[number]
                if number in self.beside
                else rows_of(tensors[number], self.call.queries, rows)
                for number in numbers
            ]
            product = step.run(product, beside)
        return product

    def _add_values(self, scores: Tensor, rows: slice) -> None:
        if self.dv is not None:
            self.dv.add(flat(scores, self.call.batch, self.call.dtype).mT, self.grad[:, rows])

    def _add_product(self, grad: Tensor, rows: slice) -> None:
        grad = grad.reshape(len(self.q), -1, self.call.keys)
        if self.of_tensors[0]:
            self.dq[:, rows] = torch.bmm(grad, self.k.mT)
        if self.dk is not None:
            self.dk.add(grad.mT, self.q[:, rows])

    def _add_beside(self, number: int, part: Tensor, rows: slice) -> None:
        """A mask or bias: rows of it, or one for all queries."""
        whole, own = self.tensors[number], self._has_rows(number)
        wide = whole.dtype if own else torch.promote_types(whole.dtype, torch.float32)
        if number not in self.sums:
            self.sums[number] = torch.zeros(whole.shape, dtype=wide, device=whole.device)
        if number in self.spread:
            part = part.to(wide).sum_to_size(whole.shape)
        rows_of(self.sums[number], self.call.queries, rows).add_(part)

    def results(self) -> list[Tensor | None]:
        """Gradients of the values and of the tensors."""
        call = self.call
        found: list[Tensor | None] = [None] * len(self.tensors)
        lead = call.recipe.form.shape[:-2]
        if self.of_tensors[0]:
            q = self.tensors[0]
            found[0] = self.dq.view(*lead, *self.dq.shape[-2:]).sum_to_size(q.shape).to(q.dtype)
        if self.dk is not None:
            found[1] = self.dk.take(lead, self.tensors[1].mT).mT
        for number, total in self.sums.items():
            found[number] = total.to(self.tensors[number].dtype)
        return [None if self.dv is None else self.dv.take(call.batch, self.values), *found]


class _Tiled(torch.autograd.Function):
    """All tiles as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: Tensor, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, *tensors)
        return call.run(values, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        wanted = ctx.needs_input_grad[1:]
        if grads[0] is None:
            return (None, *(None for _ in wanted))
        values, *tensors = ctx.saved_tensors
        with torch.no_grad(), _without_autocast(values.device.type):
            backward = _Backward(call, grads[0], values, tensors, wanted)
            for rows in call.tiles():
                backward.tile(rows)
            results = backward.results()
        if torch.is_grad_enabled():  # create_graph
            results = [None if result is None else _once_only(result) for result in results]
        return (None, *results)


def _once_only(grad: Tensor) -> Tensor:
    """A gradient that cannot be differentiated: who tries gets an error."""
    message = (
        "attention in tiles (attention_tile) has no second derivative: switch enable_tiling off for a step "
        "that differentiates twice"
    )
    refused: Tensor = torch._C._functions.DelayedError(message, 1)(grad.detach().requires_grad_())
    return refused


def attend(recipe: Recipe, values: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`scores @ values`, tile by tile.

    Args:
        recipe: how the scores are made.
        values: [..., keys, width].
        tensors: q [..., queries, inner], kᵀ [..., inner, keys], and what the steps take.
        dtype: of the product.

    Returns:
        [..., queries, width].
    """
    output: Tensor = _Tiled.apply(_Call(recipe, values, dtype), values, *tensors)  # type: ignore[no-untyped-call]
    return output
