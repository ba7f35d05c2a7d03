# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters that come and go together, as one block of memory.

    block   │ weight │ bias │ weight │ ...      one tensor of bytes, each parameter at a place of its own
    backing │ weight │ bias │ weight │ ...      the same bytes, in a file or, for a card, in host memory

A parameter's data are in the backing store, or in the block while a module's forward uses it. They return to
the store as soon as nobody else holds the block. So a view of a weight stays valid: as long as it exists, the
weight stays in the block that the view looks at.
"""

from __future__ import annotations

import bisect
import sys
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from memscale.weights.backing import BackingStore
from memscale.weights.gradients import Arrivals, is_watched

_LINE = 64  # parameters begin on cache lines, as they do where PyTorch makes them
_PAGE = 4096


class Place(NamedTuple):
    """Where a parameter lies in its block, in bytes."""

    offset: int
    nbytes: int


class Weight:
    """A parameter of a unit.

    Attributes:
        parameter: the caller's, which stays the same object.
        place: in the block and in the backing store.
        backing: its bytes in the backing store.
        users: forwards that use it now.
        in_block: its data are in the block.
        version: of the parameter, when block and backing store last had the same bytes.
        was_left: its data were in the block while anybody could write to them.
        is_streamed: False once the caller has given it other data, or it is back in memory for good.
        arrivals: of its gradients, where they arise on another device than its backing store; else None.
    """

    def __init__(self, parameter: nn.Parameter, place: Place, backing: Tensor) -> None:
        self.parameter = parameter
        self.place = place
        self.backing = backing
        self.backing_address: int = backing.data_ptr()
        self.users = 0
        self.in_block = False
        self.version = parameter._version
        self.was_left = False
        self.is_streamed = True
        self.arrivals: Arrivals | None = None

    def has_form(self) -> bool:
        """Whether the parameter has the type, sizes and strides that it had."""
        now, backing = self.parameter, self.backing
        return now.dtype is backing.dtype and now.shape == backing.shape and now.stride() == backing.stride()

    def view(self, block: Tensor) -> Tensor:
        """Its tensor in a block."""
        value = self.parameter
        return view_of(block, value.dtype, self.place.offset, tuple(value.shape), value.stride())


class Blocks(Protocol):
    """Memory for blocks, and the copies between them and the backing stores.

    Attributes:
        device: of the blocks.
        is_apart: no operation on the device reads the backing store.
    """

    device: torch.device
    is_apart: bool

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for later blocks."""

    def make_backing(self, nbytes: int) -> BackingStore:
        """A backing store for a unit.

        Raises:
            OSError: there is no room for it.
        """

    def release_backing(self, backing: BackingStore) -> None:
        """Gives a unit's backing store up. Tensors over it stay valid."""

    def take(self, nbytes: int, used_bytes: int, most_bytes: int) -> Tensor | None:
        """Memory for a block within the limit, beside blocks of `used_bytes`; None: there is no room."""

    def beyond(self, nbytes: int) -> Tensor:
        """Memory for a block beside the window."""

    def give(self, unit: Unit, memory: Tensor) -> None:
        """Frees the memory of a unit's block, which nobody else holds."""

    def lose(self, unit: Unit, memory: Tensor) -> None:
        """Takes the memory of a unit's block, which others may hold, out of the window."""

    def rest(self) -> None:
        """No block comes next: memory that no block has may be freed."""

    def start(self, unit: Unit) -> None:
        """Begins to fill a unit's block."""

    def wait(self, unit: Unit) -> bool:
        """Orders later computations behind the copy into the block. Returns whether they have to wait.

        Raises:
            OSError: it could not be read.
        """

    def end(self, unit: Unit) -> None:
        """Waits until no copy from a unit's backing store is under way, so that it is safe to write there."""

    def read(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from its backing store into the block.

        Raises:
            OSError: it cannot be read.
        """

    def write(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from the block to its backing store.

        Raises:
            OSError: it cannot be written.
        """

    def own(self, unit: Unit, weight: Weight) -> Tensor:
        """A copy of a weight in memory of its own, from the backing store.

        Raises:
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Frees all that is free."""


class Unit:
    """Parameters that come and go together.

    Args:
        path: of the module, or of the first module that has the parameter.
        parameters: as they are, in memory.
        blocks: makes its backing store, and fills its blocks.
        owners: paths of the modules that use it. None: a forward reads a few rows in the backing store
            (embeddings), and no block is made.

    Attributes:
        block: its memory; None: it is in the backing store only.
        pending: what `blocks` knows of the copy that fills the block.
        users: forwards that use one of its weights.
        lingers: somebody else held the block when that was looked at last.
        stays: somebody went on holding it. From then on the block is where its weights lie.

    Raises:
        OSError: there is no room for its backing store.
    """

    def __init__(
        self, path: str, parameters: list[nn.Parameter], blocks: Blocks, owners: tuple[str, ...]
    ) -> None:
        self.path = path
        self.owners = owners
        places, self.nbytes = places_of([value.nbytes for value in parameters])
        self.blocks = blocks
        self.backing = blocks.make_backing(self.nbytes)
        self.weights: list[Weight] = []
        self.block: Tensor | None = None
        self.pending: Any = None
        self.users = 0
        self.lingers = False
        self.stays = False
        for value, place in zip(parameters, places, strict=True):
            backing = self.backing.tensor(place.offset, value.dtype, value.shape, value.stride())
            with torch._C._DisableTorchDispatch():
                backing.copy_(value.detach())
            self.weights.append(Weight(value, place, backing))
        self.backing.let_pages_go()
        self._offsets = [place.offset for place in places]

    @property
    def is_read_in_place(self) -> bool:
        """No block of it is made."""
        return not self.owners

    def weight_at(self, offset: int) -> Weight:
        """The weight that has a byte of the block."""
        return self.weights[bisect.bisect_right(self._offsets, offset) - 1]

    def leave_memory(self) -> None:
        """Points the parameters at the backing store, which frees their memory."""
        for weight in self.weights:
            weight.parameter.data = weight.backing
            if self.blocks.is_apart and weight.parameter.requires_grad:
                weight.arrivals = Arrivals(weight)

    # ---- use ---------------------------------------------------------------------------------------

    def begin_use(self, weights: list[Weight]) -> None:
        """Points weights at the block, which is filled."""
        assert self.block is not None
        begun: list[Weight] = []
        try:
            for weight in weights:
                self._come(weight)
                weight.users += 1
                begun.append(weight)
        except BaseException:  # no room on the card, Ctrl-C: those that have come return to the store
            for weight in begun:
                weight.users -= 1
            self.settle()
            raise
        self.users += 1

    def _come(self, weight: Weight) -> None:
        parameter = weight.parameter
        if weight.in_block or not weight.is_streamed:
            return
        if not self._is_in_backing(weight):
            weight.is_streamed = False  # the caller has given it other data
            if parameter.device != self.blocks.device and self.blocks.is_apart:
                parameter.data = parameter.detach().to(self.blocks.device)  # made from the backing store
            return
        if self._has_to_stay(weight):
            parameter.data = self.blocks.own(self, weight)
            weight.is_streamed = False
            return
        assert self.block is not None
        weight.in_block = True  # first, so that after Ctrl-C the weight still returns to its store
        parameter.data = weight.view(self.block)
        if weight.arrivals is not None and parameter.requires_grad:
            weight.arrivals.begin_use(parameter)

    def _has_to_stay(self, weight: Weight) -> bool:
        """Whether a weight cannot come and go any more: it left frozen, or its gradient is watched now."""
        parameter = weight.parameter
        if not (self.blocks.is_apart and parameter.requires_grad):
            return False
        return weight.arrivals is None or is_watched(parameter)

    def end_use(self, weights: list[Weight]) -> None:
        """Ends a use of weights."""
        for weight in weights:
            weight.users -= 1
        self.users -= 1
        self.settle()

    def settle(self) -> None:
        """Points unused weights back at the backing store, unless somebody else holds the block.

        Raises:
            OSError: a change to the block could not be written back. The weight stays in memory.
        """
        if self.block is None or self.stays:
            return
        here = [weight for weight in self.weights if weight.in_block]
        self.lingers = is_held(self.block, 1 + len(here))
        if here and not self.lingers and not all(weight.users for weight in here):
            self.blocks.end(self)
        for weight in here:
            if self.lingers:
                weight.was_left = True
            elif not weight.users:
                self._go(weight)

    def _go(self, weight: Weight) -> None:
        parameter = weight.parameter
        if weight.arrivals is not None:
            weight.arrivals.end_use()
        if not self._is_in_block(weight):
            weight.in_block = False
            weight.is_streamed = self._is_in_backing(weight)  # or the caller has given it other data
            return
        if weight.was_left or parameter._version != weight.version:
            self.lingers = True  # if this fails
            self.blocks.write(self, weight)
            self.lingers = False
        parameter.data = weight.backing
        weight.in_block = weight.was_left = False
        weight.version = parameter._version

    def _is_in_block(self, weight: Weight) -> bool:
        return weight.parameter.data_ptr() == self.address_of(weight) and weight.has_form()

    @staticmethod
    def _is_in_backing(weight: Weight) -> bool:
        return weight.parameter.data_ptr() == weight.backing_address and weight.has_form()

    def address_of(self, weight: Weight) -> int:
        """Where a weight is in the block."""
        assert self.block is not None
        return int(self.block.data_ptr()) + weight.place.offset

    def note_filled(self) -> None:
        """The block is about to be filled."""
        for weight in self.weights:
            weight.version = weight.parameter._version

    def refresh(self) -> None:
        """Reads weights again that have been written to in the backing store since."""
        for weight in self.weights:
            if not weight.in_block and weight.version != weight.parameter._version and weight.is_streamed:
                weight.version = weight.parameter._version
                self.blocks.read(self, weight)

    def linger(self) -> None:
        """Puts all weights into a block that somebody holds, so that writes to them are seen there."""
        for weight in self.weights:
            if not weight.in_block and weight.is_streamed:
                self.blocks.read(self, weight)
                self._come(weight)
            weight.was_left = True

    # ---- back --------------------------------------------------------------------------------------

    def return_to_memory(self) -> None:
        """Gives the parameters memory of their own again, but for those that lie in a block that is held.

        Raises:
            OSError: they cannot be read. The others stay in the backing store.
            torch.OutOfMemoryError: the card has no room for them. The others stay, too.
        """
        for weight in self.weights:
            parameter = weight.parameter
            if weight.is_streamed and not weight.in_block and self._is_in_backing(weight):
                parameter.data = self.blocks.own(self, weight)
            weight.is_streamed = weight.in_block = False
            if weight.arrivals is not None:
                weight.arrivals.end()
                weight.arrivals = None


def places_of(sizes: list[int]) -> tuple[list[Place], int]:
    """Where parameters of these sizes lie in a block, and its size."""
    places, at = [], 0
    for size in sizes:
        places.append(Place(at, size))
        at += size + -size % _LINE
    return places, at + -at % _PAGE


def view_of(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor on the memory of another, `offset` bytes from its storage's begin; to autograd no view."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        made = torch.empty(0, dtype=dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many tensors have the storage of one, and how many references there are to that as an object."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


def is_held(tensor: Tensor, tensors: int = 1) -> bool:
    """Whether a tensor's storage has more holders than so many tensors."""
    uses, references = _holders(tensor)
    return uses > _ALONE[0] + tensors - 1 or references > _ALONE[1]


def _alone() -> tuple[int, int]:
    with torch._C._DisableTorchDispatch():
        return _holders(torch.empty(1, device="cpu"))


_ALONE = _alone()
"""What `_holders` finds where one tensor has a storage."""
