# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a language model's head, a tile of rows at a time, gradients included.

    hidden [N, width] ─► rows of a tile ─► logits [rows, classes] ─► chain ─► softmax ─► loss, sums
                              ▲                                                     │ in place
                              └── gradient of the rows ◄── products ◄── gradient of the logits
                                  gradient of the weights += ◄┘

The logits of one tile are there at a time, in memory that every tile uses again, and their gradient takes
their place: never [N, classes]. Rows whose label is ignored are dropped first. The size of a tile depends on
shapes alone, so a batch with fewer ignored labels takes more tiles, not more memory.

Rounding. Each row's logits, softmax and gradient are computed as by plain PyTorch: in the logits' own dtype
up to the chain's last operation, and from there in FP32 (FP64 for FP64), also where plain PyTorch would stay
in half precision. Rows do not mix, so for these only the order of additions inside a product differs, by
shape. Loss and gradients of the weights are sums over rows, which are split into T tiles: the error of each
partial sum is relative to itself, and adding T of them adds at most T - 1 roundings at the precision of the
sum: |error| ≤ (T - 1) · u · Σ|partial|, u = 2⁻²⁴ for FP32. Plain PyTorch's own bound for a sum over N rows is
(N - 1) · u · Σ|term| with N ≫ T. For BF16 weights the sum is kept as high and low BF16 part, which is
good for 16 bits, and rounded once, at the end: each partial product brings one rounding relative to itself,
where plain PyTorch has one for the whole.

This is not `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13). That knows no label smoothing, no soft
cap or scale between head and loss and no heads but a weight and a bias, and it leaves ignored rows in. For
BF16 on a CPU it takes FP32 copies of the weight and of its gradient, and rounds the loss to BF16.
bench/python/loss_tile.py runs both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memscale.techniques.tiles.head_products import HALF, AnyTiles, Head, ProductTiles

_SHARE_PPM = 30_000
"""Most that the logits of a tile may take of what the plain loss takes."""

_HALF_SHARE_PPM = 8_000
"""The same in half precision, where the low part of the weight's gradient takes its share as well."""

_PART_ELEMENTS = 1 << 21
"""Logits of a tile that go through chain and softmax at a time: in FP32 8 MiB, which caches hold."""

_FEWEST_ROWS = 64
"""Below this, products read the weight more often than they compute with it."""

_MOST_ROWS = 2048
"""Products are as fast as they get."""

_SMALLEST_TILE = 16
"""Rows. With fewer than four, products add up classes one after another, with ten times the error."""

_FP16_SCALE = 1024.0
"""Gradients of logits are kept this much larger in FP16, whose least number is 6e-8: a softmax over 50,000
classes is 2e-5 on average, and 1 / N on top of it would be lost where a GradScaler would have saved it."""


@dataclass(frozen=True)
class LossArguments:
    """Arguments of `cross_entropy` beside logits and target."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


@dataclass
class TiledLoss:
    """What the tiles have made.

    Attributes:
        loss: 0-dimensional.
        factor: that gradients are still to be multiplied by, 0-dimensional; None for 1.
        rows: gradient of the hidden states [N, width], or None.
        params: gradients of the head's parameters.
    """

    loss: Tensor
    factor: Tensor | None
    rows: Tensor | None
    params: list[Tensor]


class Each:
    """One operation of a chain that works on every element.

    Args:
        name: "cast", "tanh", "mul", "div", "add" or "sub".
        operand: a number, or a tensor of one element or one per class.
        dtype: of the result.
    """

    def __init__(self, name: str, operand: Any, dtype: torch.dtype) -> None:
        self.name = name
        self.operand = operand
        self.dtype = dtype
        self._version = operand._version if isinstance(operand, Tensor) else 0

    def run(self, logits: Tensor) -> Tensor:
        """The operation, as plain PyTorch runs it."""
        self.check()
        if self.name == "cast":
            return logits.to(self.dtype)
        if self.name == "tanh":
            return torch.tanh(logits)
        function: Callable[..., Tensor] = getattr(torch, self.name)
        return function(logits, self.operand)

    def check(self) -> None:
        """Raises RuntimeError where the operand has been changed in place since."""
        if isinstance(self.operand, Tensor) and self.operand._version != self._version:
            raise RuntimeError(
                f"the operand of {self.name!r} on a head's logits was changed in place before the logits "
                "were computed, which MemScale's loss tile puts off; use a copy, or set enable_tiling=False"
            )

    @functools.cached_property
    def _by_class(self) -> Any:
        return self.operand.reshape(-1) if isinstance(self.operand, Tensor) else self.operand

    def forward_(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Result for a tile, which is used up, and what `backward_` needs."""
        if self.name == "cast":
            return tile.to(self.dtype), tile
        if self.name == "tanh":
            return tile.tanh_(), tile.clone()
        if self.dtype == tile.dtype:
            getattr(tile, f"{self.name}_")(self._by_class)
            return tile, tile
        return getattr(torch, self.name)(tile, self._by_class), tile

    def backward_(self, grad: Tensor, kept: Tensor) -> Tensor:
        """Gradient before the operation; `grad` and `kept` are used up."""
        if self.name == "tanh":
            return grad.mul_(kept.square_().neg_().add_(1))
        if self.name in ("mul", "div"):
            getattr(grad, f"{self.name}_")(self._by_class)
        return grad if kept.dtype == grad.dtype else kept.copy_(grad)


@contextmanager
def autocast_as(state: Sequence[tuple[str, torch.dtype, bool, bool]]) -> Iterator[None]:
    """Autocast as it was when `autocast_now` was called."""
    if tuple(state) == autocast_now():
        yield
        return
    with ExitStack() as stack:
        for kind, dtype, enabled, cache in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def autocast_now() -> tuple[tuple[str, torch.dtype, bool, bool], ...]:
    """Autocast of the devices there are: kind, dtype, on or off, whether casts are cached."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache) for kind in kinds
    )


def rows_per_tile(rows: int, dtype: torch.dtype, general: bool = False) -> int:
    """Rows of one tile. Depends on shapes alone.

    Plain PyTorch has three tensors of FP32 logits at its peak: softmax, and the gradients of the two
    functions of a cross-entropy. The logits of a tile have a small share of that, but 64 rows at least.

    Args:
        rows: in all.
        dtype: of the head's logits.
        general: the head is not just a product: it keeps some tensors of their size.
    """
    size = dtype.itemsize * (4 if general else 1)
    share = _HALF_SHARE_PPM if dtype in HALF else _SHARE_PPM
    fitting = rows * 3 * max(4, dtype.itemsize) * share // (1_000_000 * size)
    most = max(_FEWEST_ROWS, min(_MOST_ROWS, fitting // 32 * 32))
    tiles = -(-rows // most)
    return max(_SMALLEST_TILE, -(-rows // tiles))


def tiled_cross_entropy(
    head: Head,
    hidden: Tensor,
    index: Tensor,
    target: Tensor,
    chain: Sequence[Each],
    arguments: LossArguments,
    wants_rows: bool,
) -> TiledLoss:
    """Cross-entropy of the logits that a chain makes of a head's, with the gradients.

    Args:
        head: as a function of rows.
        hidden: [N, width].
        index: row of `hidden` that each label belongs to, [M] integers, no two the same.
        target: class indices, [M].
        chain: operations between head and loss.
        arguments: of the cross-entropy.
        wants_rows: the gradient of `hidden` is needed.

    Returns:
        The loss in FP32 (FP64 for FP64 logits) and the gradients.
    """
    tiles = _Tiles(head, hidden, chain, arguments, wants_rows)
    with torch.no_grad():
        return tiles.run(index, target)


def _evenly(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """A tensor in parts of much the same length, of at most `size`."""
    return tensor.tensor_split(-(-len(tensor) // size)) if len(tensor) else ()


class _Tiles:
    """One cross-entropy in tiles."""

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        chain: Sequence[Each],
        arguments: LossArguments,
        wants_rows: bool,
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.chain = chain
        self.arguments = arguments
        last = chain[-1].dtype if chain else head.dtype
        self.dtype = torch.float64 if last == torch.float64 else torch.float32
        self.wants_rows = wants_rows
        for each in chain:
            each.check()

    def run(self, index: Tensor, target: Tensor) -> TiledLoss:
        """All tiles."""
        index, target, wanted = self._chosen(index, target)
        rates = wanted.to(self.dtype)
        if self.arguments.weight is not None:
            rates = rates * self.arguments.weight.to(self.dtype)[target]
        scale = rates.sum().reciprocal() if self.arguments.reduction == "mean" else None
        late = self.head.dtype == torch.float16
        grad_scale = rates.new_full((), _FP16_SCALE) if late else scale
        smooth = wanted.to(self.dtype) * (self.arguments.label_smoothing / self.head.classes)
        loss = rates.new_zeros(())
        rows, params = self._gradients((index, target, rates, smooth), loss, grad_scale)
        if scale is not None:
            loss.mul_(scale)
        factor = None
        if late:
            factor = loss.new_full((), 1 / _FP16_SCALE) if scale is None else scale / _FP16_SCALE
            # No valid label at all: the loss is NaN, the gradients stay zero.
            factor = torch.where(factor.isfinite(), factor, torch.zeros_like(factor))
        return TiledLoss(loss, factor, rows, params)

    def _chosen(self, index: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, label, and whether it counts, of the rows whose label is not ignored."""
        wanted = target != self.arguments.ignore_index
        if isinstance(self.hidden, FakeTensor):  # a trace takes all of them, so that it has seen the most
            chosen = torch.arange(len(wanted), device=wanted.device)
        else:
            chosen = wanted.nonzero().squeeze(1)
        index, target, wanted = index[chosen], target[chosen], wanted[chosen]
        lacking = _SMALLEST_TILE - len(index)
        if 0 < lacking < _SMALLEST_TILE:
            index, target = (torch.cat((part, part[:1].expand(lacking))) for part in (index, target))
            wanted = torch.cat((wanted, wanted.new_zeros(lacking)))
        return index, target.masked_fill(~wanted, 0), wanted

    def _gradients(
        self, labels: Sequence[Tensor], loss: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of the hidden states and the parameters; the value goes to `loss`."""
        general = self.head.linear is None
        size = rows_per_tile(len(self.hidden), self.head.dtype, general)
        step = max(1, _PART_ELEMENTS // self.head.classes)
        tiles: ProductTiles | AnyTiles = (AnyTiles if general else ProductTiles)(self.head, self.wants_rows)
        grad_rows = torch.zeros_like(self.hidden) if self.wants_rows else None
        # Evenly, so that the last tile is not a small one.
        for rows, *rest in zip(*(_evenly(tensor, size) for tensor in labels), strict=True):
            logits = tiles.logits(self.hidden.index_select(0, rows), size)
            for part in zip(*(_evenly(tensor, step) for tensor in (logits, *rest)), strict=True):
                self._differentiate_(part[0], part[1:], loss, scale)
            del part
            made = tiles.backward(logits)
            if grad_rows is not None and made is not None:
                # A row may be there again, with a gradient of 0.
                grad_rows.index_add_(0, rows, made.to(grad_rows.dtype))
            del logits, made
        return grad_rows, tiles.gradients()

    def _differentiate_(
        self, logits: Tensor, labels: Sequence[Tensor], loss: Tensor, scale: Tensor | None
    ) -> None:
        """Turns logits of the head into their gradient, and adds the value to `loss`."""
        kept: list[Tensor] = []
        x = logits
        for each in self.chain:
            x, needed = each.forward_(x)
            kept.append(needed)
            del needed
        last = x
        x = x.to(self.dtype)
        self._softmax_(x, labels, loss, scale)
        grad = x if x.dtype == last.dtype else last.copy_(x)
        del x, last
        for each in reversed(self.chain):
            grad = each.backward_(grad, kept.pop())
        assert grad.untyped_storage()._cdata == logits.untyped_storage()._cdata

    def _softmax_(self, x: Tensor, labels: Sequence[Tensor], loss: Tensor, scale: Tensor | None) -> None:
        """Turns logits into the gradient of their cross-entropy, and adds its value to `loss`.

        With rates a of the label's class and b of every class (label smoothing), weights w:

            loss     = Σ (1 - ε) a (lse - x[label]) + b (Σw lse - Σ w x)
            gradient =   softmax ((1 - ε) a + b Σw) - (1 - ε) a [class = label] - b w
        """
        target, rates, smooth = labels
        target = target.unsqueeze(1)
        smoothing, weight = self.arguments.label_smoothing, self.arguments.weight
        x.sub_(x.amax(-1, keepdim=True))
        hit = x.gather(1, target).squeeze(1)
        own = rates * (1 - smoothing) if smoothing else rates
        every = own
        if smoothing:
            weight = None if weight is None else weight.to(x.dtype)
            total = x.shape[1] if weight is None else weight.sum()
            mean = x.sum(-1) if weight is None else x @ weight
            every = own + smooth * total
        x.exp_()
        norm = x.sum(-1)
        log_norm = norm.log()
        loss.add_((own * (log_norm - hit)).sum())
        if smoothing:
            loss.add_((smooth * (log_norm * total - mean)).sum())
        if scale is not None:
            own, every, smooth = own * scale, every * scale, smooth * scale
        x.mul_((every / norm).unsqueeze(1))
        if smoothing:
            x.sub_(smooth.unsqueeze(1) if weight is None else smooth.unsqueeze(1) * weight)
        x.scatter_add_(1, target, own.neg().unsqueeze(1))
