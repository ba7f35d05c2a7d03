# SPDX-License-Identifier: Apache-2.0
"""Blocks of offloaded weights on the host: their memory, and the copies between them and the backing store.

`HostBlocks` implements `unit.Blocks`; so does `CardBlocks` in `weights/card.py`.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memscale.weights.backing import BackingStore, File, FileStore

if TYPE_CHECKING:
    from memscale.weights.unit import Unit, Weight


class HostBlocks:
    """Blocks in this process's memory, and backing stores in a file. A thread reads.

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
        """Bytes that are kept for later blocks."""
        return sum(map(_size, self._free))

    def make_backing(self, nbytes: int) -> BackingStore:
        """A range of the file.

        Raises:
            OSError: there is no room for it.
        """
        if self._file is None:
            self._file = File(self.directory)
        return FileStore(self._file, nbytes)

    def release_backing(self, backing: BackingStore) -> None:
        """Nothing to do: the store goes with the last tensor over it."""

    def take(self, nbytes: int, used_bytes: int, most_bytes: int) -> Tensor | None:
        """Memory for a block: reuses that of the same size, and frees the rest."""
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
        """Keeps the memory for a later block."""
        self._free.append(memory)

    def lose(self, unit: Unit, memory: Tensor) -> None:
        """Nothing to do: the memory belongs to those who hold it."""

    def rest(self) -> None:
        """Frees kept memory, so that later blocks or an optimizer's step can have it."""
        self._free.clear()

    def start(self, unit: Unit) -> None:
        """Begins to fill a unit's block."""
        assert unit.block is not None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "memscale-weights")
        unit.pending = self._reader.submit(_read, unit.backing, [unit.block])

    def wait(self, unit: Unit) -> bool:
        """Waits until the block is filled."""
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
        """Copies one weight from its backing store into the block."""
        unit.backing.read(unit.address_of(weight), *weight.place)

    def write(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from the block to its backing store."""
        assert isinstance(unit.backing, FileStore)
        unit.backing.write(unit.address_of(weight), *weight.place)

    def own(self, unit: Unit, weight: Weight) -> Tensor:
        """A weight in memory of its own."""
        value = weight.parameter
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        unit.backing.read(made.data_ptr(), *weight.place)
        return made

    def close(self) -> None:
        """Ends the thread and frees all that is free."""
        self._free.clear()
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = None


def wait_for(unit: Unit, pending: Future[None]) -> bool:
    """Waits for the copy into a unit's block. After Ctrl-C the copy stays pending: the thread goes on."""
    waits = not pending.done()
    try:
        pending.result()
    finally:
        if pending.done():
            unit.pending = None
    return waits


def _read(backing: BackingStore, block: list[Tensor]) -> None:
    """Fills a block, in the thread, which drops its reference before it reports the end."""
    memory = block.pop()
    backing.read(memory.data_ptr(), 0, backing.nbytes)


def _size(memory: Tensor) -> int:
    return int(memory.numel())
