# SPDX-License-Identifier: Apache-2.0
"""Dropout in tiles: what each dropout drops is drawn for all rows at once, as the plain step draws it.

    plain      up ──► dropout draws [rows, inner] ──► down ──► dropout draws [rows, width]
    in tiles   both masks are drawn first, in that order and those shapes: one byte per element
               a tile's dropout takes its rows of them, and draws nothing

So the step drops what the plain step drops, and the generator stands afterwards where it stands there. The
masks are saved beside the input; in the recompute of a checkpointed block they are drawn again.

On the CPU, `dropout` fills a noise tensor by `bernoulli_` and multiplies. `bernoulli_` takes the same numbers
from the generator whatever it fills, float64 excepted where MKL draws them; so masks of bytes are filled
instead. On CUDA a fused kernel draws and multiplies, and what it draws depends on shape and dtype: it is run
on memory of that shape and dtype, and of its results the mask is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = ("cpu", "cuda")
"""Devices on which it is known how dropout draws its numbers."""

Called = Callable[[str, nn.Dropout, Tensor], Tensor]
"""What to do instead of a dropout's forward: path and module of the dropout, its input → its output."""


@dataclass(frozen=True)
class Drop:
    """One call of a dropout in a forward.

    Attributes:
        path: of the module, below the one whose forward it is.
        features: elements of a row of its input.
    """

    path: str
    features: int


class OtherDropoutError(Exception):
    """A tile called its dropouts in another way than the proof: nobody can tell what plain would draw."""

    def __init__(self) -> None:
        super().__init__("its dropouts are not called as they were when it was looked at")


def dropouts_of(module: nn.Module) -> dict[str, nn.Dropout]:
    """The dropouts in a module that can be run on tiles, by path."""
    return {path: part for path, part in module.named_modules() if type(part) is nn.Dropout}


@contextmanager
def called_as(parts: Mapping[str, nn.Dropout], called: Called) -> Iterator[None]:
    """Runs the block with something else in place of the forward of some dropouts."""
    # In the instance's dictionary, in front of the class's method. What was there is put back.
    before = [(part, part.__dict__.get("forward")) for part in parts.values()]
    try:
        for path, part in parts.items():
            part.__dict__["forward"] = functools.partial(called, path, part)
        yield
    finally:
        for part, forward in before:
            if forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.__dict__["forward"] = forward


@dataclass(frozen=True)
class _Mask:
    """One call of a dropout, as it is in this step.

    Attributes:
        share: of elements that are dropped; 0: it passes its input on.
        number: of its mask among those drawn, if it draws one.
    """

    drop: Drop
    share: float
    number: int


class Dropping:
    """What the dropouts of one call drop.

    Args:
        parts: the dropouts, by path.
        drops: their calls, in order.
        x: the input of the call, `[..., width]`.

    Attributes:
        draws: whether any of them draws numbers.
    """

    __slots__ = ("calls", "draws", "dtype", "parts", "rows")

    def __init__(self, parts: Mapping[str, nn.Dropout], drops: Sequence[Drop], x: Tensor) -> None:
        self.parts = parts
        self.rows = x.shape[:-1]
        self.dtype = _dtype_inside(x)
        self.calls: dict[str, _Mask] = {}
        count = 0
        for drop in drops:
            part = parts[drop.path]
            share = part.p if part.training else 0.0
            self.calls[drop.path] = _Mask(drop, share, count)
            count += bool(share)
        self.draws = count > 0

    def why_not(self, x: Tensor) -> str:
        """Why tiles cannot drop what the plain step drops; "" if they can."""
        if not self.draws:
            return ""
        if x.device.type not in _KINDS:
            return f"nobody knows how dropout draws its numbers on {x.device.type}"
        if not x.is_contiguous():
            return "it has dropout, and its input is not contiguous"
        if any(call.share >= 1 for call in self.calls.values()):
            return "it drops everything"
        if x.device.type != "cpu" and any(part.inplace for part in self.parts.values()):
            return "it has dropout in place, which draws in another way on CUDA"
        return ""

    def draw(self, device: torch.device) -> list[Tensor]:
        """The masks of all rows, in order: true where an element stays. Moves the generator as plain does."""
        with torch.no_grad():
            return [self._mask(call, device) for call in self.calls.values() if call.share]

    def _mask(self, call: _Mask, device: torch.device) -> Tensor:
        shape = (*self.rows, call.drop.features)
        if device.type == "cpu":
            dtype = torch.float64 if self.dtype is torch.float64 else torch.bool
            return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - call.share).bool()
        drawn = torch.empty(shape, dtype=self.dtype, device=device)
        mask: Tensor = torch.native_dropout(drawn, call.share, True)[1]
        return mask

    @contextmanager
    def applied(self, masks: Sequence[Tensor], rows: slice, first: bool = False) -> Iterator[None]:
        """Runs a tile in the block, with the masks in place of its dropouts.

        Checkpoints inside the tile call them again in backward, in an order of their own. Only the first run
        is therefore compared with the proof.

        Args:
            masks: what `draw` has returned.
            rows: of the tile.
            first: this is the tile's first run.

        Raises:
            OtherDropoutError: by a dropout that is called in another way than the proof has seen.
        """
        if not self.calls:
            yield
            return
        order: list[str] = []

        def called(path: str, part: nn.Dropout, x: Tensor) -> Tensor:
            order.append(path)
            call = self.calls.get(path)
            if call is None or call.drop.features != x.shape[-1]:
                raise OtherDropoutError
            if not call.share:
                return x
            if not self._is_expected(x.dtype, x.device):
                raise OtherDropoutError
            mask = masks[call.number].view(-1, x.shape[-1])[rows].view(x.shape)
            return _dropped(x, mask, call.share, part.inplace)

        with called_as(self.parts, called):
            yield
        if first and order != list(self.calls):
            raise OtherDropoutError

    def _is_expected(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a mask that was drawn for `self.dtype` is the one that plain draws for this dtype."""
        if device.type == "cpu":
            return (dtype is torch.float64) == (self.dtype is torch.float64)
        return dtype == self.dtype


def _dtype_inside(x: Tensor) -> torch.dtype:
    """What a dropout gets behind a matrix product: in most modules every dropout is."""
    kind = x.device.type
    if kind not in _KINDS or x.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _dropped(x: Tensor, mask: Tensor, share: float, inplace: bool) -> Tensor:
    """A dropout's output, with the operators of the plain step."""
    if x.device.type != "cpu":
        result: Tensor = _Masked.apply(x, mask, 1 / (1 - share))  # type: ignore[no-untyped-call]
        return result
    noise = mask.to(x.dtype).div_(1 - share)
    return x.mul_(noise) if inplace else x * noise


class _Masked(torch.autograd.Function):
    """The fused kernel's product, of input and of gradient, by a mask that is there already.

    Its own kernel is not for this: it draws. That of its backward multiplies in the same way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        result: Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grads[0], mask, ctx.scale), None, None
