# SPDX-License-Identifier: Apache-2.0
"""Where blocks of weights get their memory, and how bytes come there from home: on the host.

`Blocks` is what a window asks of a device; `weights/card.py` has that of a card.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from memscale.weights.home import File, Home, Mapped

if TYPE_CHECKING:
    from memscale.weights.unit import Unit, Weight


class Blocks(Protocol):
    """Memory for blocks, and the copies between them and home.

    Attributes:
        device: of the blocks.
        is_apart: no operation on the device reads a weight at home.
    """

    device: torch.device
    is_apart: bool

    @property
    def free_bytes(self) -> int:
        """Of memory that is kept for blocks to come."""

    def make_home(self, nbytes: int) -> Mapped:
        """A home for a unit.

        Raises:
            OSError: there is no room for it.
        """

    def give_home(self, home: Mapped) -> None:
        """A unit's home is not needed any more. Tensors over it go on living."""

    def take(self, nbytes: int, used_bytes: int, most_bytes: int) -> Tensor | None:
        """Memory for a block, beside blocks of so many bytes; None where there is none within a limit."""

    def beyond(self, nbytes: int) -> Tensor:
        """Memory for a block beside the window."""

    def give(self, unit: Unit, memory: Tensor) -> None:
        """The memory of a unit's block, which nobody else has, is free."""

    def lose(self, unit: Unit, memory: Tensor) -> None:
        """The memory of a unit's block, which others may hold, is in the window no more."""

    def rest(self) -> None:
        """Nothing comes next: memory that no block has may go."""

    def start(self, unit: Unit) -> None:
        """Begins to fill a unit's block."""

    def wait(self, unit: Unit) -> bool:
        """Whoever computes from now on finds the block filled. Returns whether that took waiting.

        Raises:
            OSError: it could not be read.
        """

    def end(self, unit: Unit) -> None:
        """Waits until no copy of a unit's home is under way: whoever writes there disturbs nothing."""

    def read(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from home into the block.

        Raises:
            OSError: it cannot be read.
        """

    def write(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from the block home.

        Raises:
            OSError: it cannot be written.
        """

    def own(self, unit: Unit, weight: Weight) -> Tensor:
        """A weight in memory of its own, as at home.

        Raises:
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Frees all that is free."""


class HostBlocks:
    """Blocks in this process's memory, and homes in a file. A thread reads.

    Args:
        directory: of the file.
    """

    device = torch.device("cpu")
    is_apart = False

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._file: File | None = None
        self._free: list[Tensor] = []
        self._reader: ThreadPoolExecutor | None = None

    @property
    def free_bytes(self) -> int:
        """Of memory that is kept for blocks to come."""
        return sum(map(_size, self._free))

    def make_home(self, nbytes: int) -> Mapped:
        """A file.

        Raises:
            OSError: there is no room for it.
        """
        if self._file is None:
            self._file = File(self.directory)
        return Home(self._file, nbytes)

    def give_home(self, home: Mapped) -> None:
        """It goes with the last tensor over it."""

    def take(self, nbytes: int, used_bytes: int, most_bytes: int) -> Tensor | None:
        """Memory for a block: that of one of the same size. Other memory that is free goes."""
        sizes = list(map(_size, self._free))  # no name for what goes below: it would live on
        memory = self._free.pop(sizes.index(nbytes)) if nbytes in sizes else None
        self._free.clear()
        if memory is None and used_bytes + nbytes <= most_bytes:
            memory = self.beyond(nbytes)
        return memory

    def beyond(self, nbytes: int) -> Tensor:
        """Memory for a block beside the window."""
        with torch._C._DisableTorchDispatch():
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give(self, unit: Unit, memory: Tensor) -> None:
        """It is free."""
        self._free.append(memory)

    def lose(self, unit: Unit, memory: Tensor) -> None:
        """Who holds it has it."""

    def rest(self) -> None:
        """Others can have the memory: later blocks, an optimizer's step."""
        self._free.clear()

    def start(self, unit: Unit) -> None:
        """Begins to fill a unit's block."""
        assert unit.block is not None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "memscale-weights")
        unit.pending = self._reader.submit(_read, unit.home, [unit.block])

    def wait(self, unit: Unit) -> bool:
        """Waits until it is filled."""
        pending = unit.pending
        if pending is None:
            return False
        return wait_for(unit, pending)

    def end(self, unit: Unit) -> None:
        """Waits for a block that nobody needs any more."""
        if unit.pending is not None:
            with contextlib.suppress(OSError):
                unit.pending.result()
            unit.pending = None

    def read(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from home into the block."""
        unit.home.read(unit.address_of(weight), *weight.place)

    def write(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from the block home."""
        assert isinstance(unit.home, Home)
        unit.home.write(unit.address_of(weight), *weight.place)

    def own(self, unit: Unit, weight: Weight) -> Tensor:
        """A weight in memory of its own."""
        value = weight.parameter
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        unit.home.read(made.data_ptr(), *weight.place)
        return made

    def close(self) -> None:
        """Ends the thread and frees all that is free."""
        self._free.clear()
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = None


def wait_for(unit: Unit, pending: Future[None]) -> bool:
    """Waits for what fills a unit's block. Interrupted, it is pending still: the thread goes on."""
    waits = not pending.done()
    try:
        pending.result()
    finally:
        if pending.done():
            unit.pending = None
    return waits


def _read(home: Mapped, block: list[Tensor]) -> None:
    """Fills a block, in the thread, which has it live till then; who is told of the end finds it alone."""
    memory = block.pop()
    home.read(memory.data_ptr(), 0, home.nbytes)


def _size(memory: Tensor) -> int:
    return int(memory.numel())
