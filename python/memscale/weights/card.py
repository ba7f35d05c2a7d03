# SPDX-License-Identifier: Apache-2.0
"""Blocks of weights on a CUDA device: one region of its memory, and a stream for copies.

    store    host memory: pinned first, then pageable, then a file, each within its limit
    region   taken once, as large as the window; blocks come to its two ends in turn:

                 │ block i ···      ··· block i + 1 │        the next one takes the place of block i

             so two blocks that fit have room, of whatever sizes, and the allocator sees one tensor
    copy     store ─► block, on a stream of its own, behind all that was computed with what lay there

Ordering. Before a block is used, the stream that computes waits for its copy. When a block leaves, the stream
of copies waits for every stream that has used it. When a weight's data are in the backing store again, the
host has waited for the block's copy, so later writes to the weight cannot get into it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.weights.backing import BackingStore, File, FileStore, HostStore
from memscale.weights.blocks import wait_for
from memscale.weights.unit import is_held

if TYPE_CHECKING:
    from memscale.weights.unit import Unit, Weight

CHUNK_BYTES = 16 << 20
"""Size of the host buffer that a file's bytes pass through."""

_MOST_BLOCKS = 2
_FILE = 2


class Rooms:
    """Host memory and disk space for backing stores.

    Args:
        pinned_bytes: most pinned memory.
        host_bytes: most pageable memory.
        file_bytes: most disk space.
        directory: folder of files.
    """

    def __init__(self, pinned_bytes: int, host_bytes: int, file_bytes: int, directory: str) -> None:
        self.left = [pinned_bytes, host_bytes, file_bytes]
        self.directory = directory
        self._file: File | None = None

    def copy(self) -> Rooms:
        """A copy, to try what fits."""
        pinned, host, file = self.left
        return Rooms(pinned, host, file, self.directory)

    def reserve(self, nbytes: int) -> int | None:
        """Reserves bytes in the first tier with room, and returns it; None: no tier has room."""
        for tier, left in enumerate(self.left):
            if nbytes <= left:
                self.left[tier] -= nbytes
                return tier
        return None

    def make(self, nbytes: int) -> tuple[BackingStore, int]:
        """Makes a backing store, and returns it with its tier.

        Raises:
            OSError: there is no room for it.
        """
        tier = self.reserve(nbytes)
        if tier is None:
            pinned, host, file = self.left
            raise OSError(
                28,
                f"no room for {nbytes} bytes of weights: {pinned} bytes of pinned memory, {host} of "
                f"pageable memory and {file} of a file are left of max_cpu_offload_gb and async_config",
            )
        try:
            if tier != _FILE:
                return HostStore(nbytes, tier == 0), tier
            if self._file is None:
                self._file = File(self.directory)
            return FileStore(self._file, nbytes), tier
        except BaseException:
            self.give(tier, nbytes)
            raise

    def give(self, tier: int, nbytes: int) -> None:
        """Gives the bytes of a store back to its tier."""
        self.left[tier] += nbytes


class CardBlocks:
    """Blocks on a card, and backing stores in host memory.

    Args:
        device: the card.
        rooms: where backing stores may be.

    Attributes:
        stream: of the copies to the card.
        write_stream: of the copies back, of what an optimizer has stepped.
    """

    is_apart = True

    def __init__(self, device: torch.device, rooms: Rooms) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.rooms = rooms
        self.stream = torch.cuda.Stream(self.device)
        self.write_stream = torch.cuda.Stream(self.device)
        self._region: Tensor | None = None
        self._taken: dict[int, int] = {}  # offset of a block in the region → its size
        self._users: dict[Unit, set[torch.cuda.Stream]] = {}
        self._ready: dict[Unit, torch.cuda.Event] = {}  # of copies that the host has not waited for
        self._tiers: dict[BackingStore, int] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._chunk: HostStore | None = None

    # ---- backing stores ----------------------------------------------------------------------------

    def make_backing(self, nbytes: int) -> BackingStore:
        """Host memory, or a file.

        Raises:
            OSError: there is no room for it.
        """
        backing, tier = self.rooms.make(nbytes)
        self._tiers[backing] = tier
        return backing

    def release_backing(self, backing: BackingStore) -> None:
        """Gives a unit's backing store up. Tensors over it stay valid."""
        self.rooms.give(self._tiers.pop(backing), backing.nbytes)

    # ---- memory ------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes of the region that no block has."""
        size = 0 if self._region is None else self._region.numel()
        return max(0, size - sum(self._taken.values()))

    def open(self, most_bytes: int) -> None:
        """Takes the region now, if no block is in one."""
        if not self._taken:
            self._drop_region()
            self._region = self._allocated(most_bytes)

    def take(self, nbytes: int, used_bytes: int, most_bytes: int) -> Tensor | None:
        """A part of the region: at its begin, or at its end."""
        if not self._taken and (self._region is None or self._region.numel() != most_bytes):
            self._drop_region()
            if used_bytes:  # blocks beside a region, or in one that is lost
                return None
            self.open(most_bytes)
        region = self._region
        size = 0 if region is None else region.numel()
        if region is None or len(self._taken) >= _MOST_BLOCKS or nbytes > size:
            return None
        for offset in (0, size - nbytes):
            ends = [(begin, begin + length) for begin, length in self._taken.items()]
            if all(offset + nbytes <= begin or end <= offset for begin, end in ends):
                self._taken[offset] = nbytes
                return _with_own_storage(region[offset : offset + nbytes])
        return None

    def beyond(self, nbytes: int) -> Tensor:
        """Memory of its own."""
        return self._allocated(nbytes)

    def _allocated(self, nbytes: int) -> Tensor:
        """Allocates memory that the copy stream may write to: it waits for earlier uses of that memory."""
        with _plain(), torch.cuda.stream(torch.cuda.default_stream(self.device)):
            made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        return made

    def give(self, unit: Unit, memory: Tensor) -> None:
        """Frees the memory of a block once the streams that use it are done."""
        for stream in self._users.pop(unit, ()):
            self.stream.wait_stream(stream)
        self._ready.pop(unit, None)
        offset = self._offset_of(memory)
        if offset is None:
            self._before_freeing()
        else:
            del self._taken[offset]

    def lose(self, unit: Unit, memory: Tensor) -> None:
        """A block leaves the window. If somebody holds it, they hold the whole region, which is replaced."""
        if not is_held(memory):
            self.give(unit, memory)
            return
        self._users.pop(unit, None)
        self._ready.pop(unit, None)
        if self._offset_of(memory) is not None:
            self._drop_region()

    def _offset_of(self, memory: Tensor) -> int | None:
        region = self._region
        offset = -1 if region is None else int(memory.data_ptr() - region.data_ptr())
        return offset if self._taken.get(offset) == memory.numel() else None

    def _drop_region(self) -> None:
        self._before_freeing()
        self._region = None
        self._taken.clear()

    def _before_freeing(self) -> None:
        """Orders the allocator's stream behind our copies and all uses, since it gets the memory next."""
        torch.cuda.default_stream(self.device).wait_stream(self.stream)

    def rest(self) -> None:
        """Nothing to do: the region stays, as a plan for a card counts it."""

    # ---- copies ------------------------------------------------------------------------------------

    def start(self, unit: Unit) -> None:
        """Begins to fill a unit's block."""
        assert unit.block is not None
        if isinstance(unit.backing, FileStore):
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, "memscale-weights")
                self._chunk = HostStore(CHUNK_BYTES, locked=True)
            unit.pending = self._reader.submit(self._read_file, unit.backing, [unit.block])
            return
        with _plain(), torch.cuda.stream(self.stream):
            unit.block.copy_(_bytes_of(unit.backing), non_blocking=True)
            self._ready[unit] = self.stream.record_event()

    def _read_file(self, backing: FileStore, held: list[Tensor]) -> None:
        """Fills a block from a file, in the thread. The host has waited when it is done."""
        block, chunk = held.pop(), self._chunk
        assert chunk is not None
        piece = _bytes_of(chunk)
        with _plain(), torch.cuda.stream(self.stream):
            for begin in range(0, backing.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, backing.nbytes - begin)
                backing.read(piece.data_ptr(), begin, size)
                block[begin : begin + size].copy_(piece[:size], non_blocking=True)
                self.stream.record_event().synchronize()

    def wait(self, unit: Unit) -> bool:
        """Has the present stream wait for a block; the host too, where a thread reads it from a file."""
        stream = torch.cuda.current_stream(self.device)
        self._users.setdefault(unit, set()).add(stream)
        pending: Future[None] | None = unit.pending
        if pending is not None:
            return wait_for(unit, pending)
        ready = self._ready.get(unit)
        if ready is None:
            return False
        waits = not ready.query()
        stream.wait_event(ready)
        return waits

    def end(self, unit: Unit) -> None:
        """Waits on the host for the copy from a unit's backing store."""
        if unit.pending is not None:
            with contextlib.suppress(OSError):
                unit.pending.result()
            unit.pending = None
        ready = self._ready.pop(unit, None)
        if ready is not None:
            ready.synchronize()

    def read(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from its backing store into the block. The host waits."""
        self._pass(unit, weight, from_backing=True)

    def write(self, unit: Unit, weight: Weight) -> None:
        """Copies one weight from the block to its backing store. The host waits."""
        self._pass(unit, weight, from_backing=False)

    def _pass(self, unit: Unit, weight: Weight, from_backing: bool) -> None:
        assert unit.block is not None
        self.end(unit)
        begin, size = weight.place
        there = unit.block[begin : begin + size]
        here = unit.backing.tensor(begin, torch.uint8, (size,), (1,))
        users = self._users.setdefault(unit, set())
        stream = torch.cuda.current_stream(self.device)
        for other in users - {stream}:
            stream.wait_stream(other)
        users.add(stream)
        with _plain():
            (there if from_backing else here).copy_(here if from_backing else there)
        stream.synchronize()

    def own(self, unit: Unit, weight: Weight) -> Tensor:
        """A weight on the card in memory of its own."""
        value = weight.parameter
        with _plain():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            made.copy_(weight.backing)
        torch.cuda.current_stream(self.device).synchronize()
        return made

    def close(self) -> None:
        """Ends the thread and frees the region."""
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = self._chunk = None
        self._drop_region()
        self._users.clear()
        self._ready.clear()


@contextmanager
def _plain() -> Iterator[None]:
    """Hides operations from dispatch modes and autograd."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def _bytes_of(backing: BackingStore) -> Tensor:
    return backing.tensor(0, torch.uint8, (backing.nbytes,), (1,))


def _with_own_storage(part: Tensor) -> Tensor:
    """The same memory as a storage of its own, whose holders can be counted; it keeps the whole alive."""
    with _plain():
        exchange: Any = torch.utils.dlpack
        found: Tensor = exchange.from_dlpack(exchange.to_dlpack(part))
        return found
