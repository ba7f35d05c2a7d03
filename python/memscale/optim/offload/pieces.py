# SPDX-License-Identifier: Apache-2.0
"""Offloaded optimizer state of a parameter, in pieces: its tensors, and where each part is.

    whole    one piece: every tensor of the state as it is, one behind the other
    cut      of state that has a number for each element: piece i is elements i × n to (i + 1) × n of
             each of its tensors, in the order of memory. PyTorch's own (`Slots`), or ours (`Form`)

The lengths of pieces are multiples of 2^k: kernels that take several elements at a time see the same ones
together as in the whole tensor, and what is left over at its end is left over in the last piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from memscale import _core
from memscale.optim.arrays import BYTES, FORM, Form, Places, places
from memscale.torchkit.extents import fills_memory

if TYPE_CHECKING:
    from memscale.optim.arrays import Empty

OFFLOADED: Final = "memscale_away"
"""What `optimizer.state` has for a parameter in place of the tensors that are offloaded."""

PIECE_ELEMENTS: Final = 1 << 20
"""Of a parameter, that pass at once: 8 MiB of AdamW's moments, well above what a disk's latency is worth."""

LEAST_BYTES: Final = 64 << 10
"""Parameters that are smaller keep their state: a copy of its own would take longer than its bytes."""

LINE: Final = 64
"""Tensors begin on cache lines, as they do where PyTorch makes them."""

HOST: Final = torch.device("cpu")

_SCALED: Final = 128  # elements that share a scale: MSC_OPTIM_BLOCK


class Slot(NamedTuple):
    """A tensor of the state; flat where it is cut, and shape and strides are then the parameter's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def elements(self, first: int, last: int, cut: bool) -> int:
        """How many of them are in a piece."""
        return last - first if cut else math.prod(self.shape)


class Slots(NamedTuple):
    """PyTorch's state of a parameter, as far as it is offloaded."""

    slots: tuple[Slot, ...]
    cut: bool

    def size(self, first: int, last: int) -> int:
        """Bytes of a piece."""
        return sum(size for _, _, size in self._spans(first, last))

    def views(self, buffer: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """The tensors of a piece, by name: views of its bytes."""
        found = {}
        for slot, at, _ in self._spans(first, last):
            count = slot.elements(first, last, self.cut)
            flat = buffer[at : at + count * slot.dtype.itemsize].view(slot.dtype)
            found[slot.name] = flat if self.cut else flat.as_strided(slot.shape, slot.stride)
        return found

    def empty(self, make: Empty) -> dict[str, Tensor]:
        """Tensors for the whole of it."""
        return {slot.name: make(slot.shape, slot.stride, dtype=slot.dtype) for slot in self.slots}

    def copy(self, whole: dict[str, Any], buffer: Tensor, first: int, last: int, out: bool) -> None:
        """Copies a piece from the whole into its bytes, or back."""
        for name, part in self.views(buffer, first, last).items():
            side = flat(whole[name])[first:last] if self.cut else whole[name]
            (part if out else side).copy_(side if out else part)

    def _spans(self, first: int, last: int) -> Iterator[tuple[Slot, int, int]]:
        at = 0
        for slot in self.slots:
            size = slot.elements(first, last, self.cut) * slot.dtype.itemsize
            size += -size % LINE
            yield slot, at, size
            at += size


class Own(NamedTuple):
    """Our state of a parameter."""

    form: Form
    cut: bool = True

    def size(self, first: int, last: int) -> int:
        """Bytes of a piece."""
        return self.places(first, last).total_bytes

    def places(self, first: int, last: int) -> Places:
        """Where the arrays of a piece lie among its bytes."""
        return places(self.form.kind, self.form.weights, self.form.moments, last - first)

    def empty(self, make: Empty) -> dict[str, Any]:
        """An array for the whole of it."""
        return {BYTES: make((self.form.places.total_bytes,), (1,), dtype=torch.uint8), FORM: self.form}

    def copy(self, whole: dict[str, Any], buffer: Tensor, first: int, last: int, out: bool) -> None:
        """Copies a piece from the whole into its bytes, or back."""
        of_all, of_piece = self.form.places, self.places(first, last)
        state: Tensor = whole[BYTES]
        for number, name in enumerate(("moment1", "moment2", "rest", "scale1", "scale2")):
            at, size = getattr(of_piece, name)
            scales = number > 2
            begin, total = getattr(of_all, name)
            begin += first // _SCALED if scales else total // self.form.elements * first
            side, part = state[begin : begin + size], buffer[at : at + size]
            (part if out else side).copy_(side if out else part)


class Where(Enum):
    """Where pieces lie between steps, as far as they have come there."""

    ELSEWHERE = "blocks of an engine; a step brings them to the parameter's device, and sends them back"
    HERE = "tensors on the parameter's device"
    HOST = "tensors of the host, whose cores step a card's parameter"


class Offloaded:
    """The state of a parameter in pieces.

    Attributes:
        layout: what the pieces consist of.
        bounds: first and last element of each piece.
        pieces: their blocks, or tensors of bytes: where these are to be, or could not leave or be written. A
            move that was broken off leaves some where they were; a step brings them where it wants them.
        torn: a step ended in the middle: some pieces are those of the next step.
        where: they are to be.
        device: of the parameter.
    """

    def __init__(
        self,
        layout: Layout,
        count: int,
        piece_elements: int,
        where: Where = Where.ELSEWHERE,
        device: torch.device = HOST,
    ) -> None:
        self.layout = layout
        self.where = where
        self.device = device
        self.bounds = bounds_of(count, piece_elements if layout.cut else count)
        self.pieces: list[_core.Block | Tensor | None] = [None] * len(self.bounds)
        self.torn = False

    def size(self, index: int) -> int:
        """Bytes of a piece."""
        return self.layout.size(*self.bounds[index])

    @property
    def place(self) -> torch.device:
        """Where pieces are stepped."""
        return HOST if self.where is Where.HOST else self.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that are not on the parameter's device."""
        return sum(self.size(index) for index, piece in enumerate(self.pieces) if self._is_gone(piece))

    def _is_gone(self, piece: _core.Block | Tensor | None) -> bool:
        if isinstance(piece, Tensor):
            return not same_place(piece.device, self.device)
        return piece is not None


Layout = Slots | Own


def bounds_of(count: int, length: int) -> tuple[tuple[int, int], ...]:
    """Pieces of `length` elements, and one with what is left over."""
    return tuple((first, min(first + length, count)) for first in range(0, count, length))


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def same_place(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; a card without a number is the first."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def slots_of(
    state: dict[str, Any], cut_shape: tuple[int, ...] | None, device: torch.device
) -> tuple[Slot, ...]:
    """The tensors of PyTorch's state that are worth offloading.

    Args:
        state: of a parameter.
        device: of the parameter; what lies elsewhere, such as step counters of a card's, stays there.
        cut_shape: the parameter's, if only what has this shape is to leave; None: all that is large.
    """
    return tuple(
        Slot(name, value.dtype, tuple(value.shape), value.stride())
        for name, value in state.items()
        if type(value) is Tensor
        and same_place(value.device, device)
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_complex())
        and fills_memory(value)
        and (value.nbytes >= LEAST_BYTES // 16 if cut_shape is None else tuple(value.shape) == cut_shape)
    )
