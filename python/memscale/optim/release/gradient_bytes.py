# SPDX-License-Identifier: Apache-2.0
"""The bytes of a released gradient: on the device, or offloaded.

    here      in the gradient's own storage, as ever
    leaving   here, and on their way out: the storage is freed when the copies are complete
    offloaded in blocks of the offload engine; the storage has no bytes

A gradient lies in blocks of some elements, so that a step can have it back a piece at a time. What multiplies
or clamps it by numbers while it is offloaded is remembered, and done by the same operation when it is back:
each element is computed alone, so every bit is that of plain PyTorch, done on all of them or on a piece.

On a card the storage is freed, in the order of its stream, as soon as that waits for the copies; nothing
here does where the tier is pinned memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from memscale.errors import MemScaleError
from memscale.optim.offload.pieces import flat
from memscale.torchkit import streams

if TYPE_CHECKING:
    from memscale import _core

Change = Callable[[Tensor], object]
"""Something that was done to all elements in place, each alone."""


class Window(Protocol):
    """That a gradient belongs to: `release_window.ReleaseWindow`."""

    piece_elements: int
    lock: threading.RLock

    def note(self, item: GradientBytes) -> None:
        """It was used just now."""

    def using(
        self, gradients: list[GradientBytes], written: list[GradientBytes]
    ) -> AbstractContextManager[None]:
        """Has gradients here inside the block; those that it writes go out anew."""

    @property
    def engine(self) -> _core.OffloadEngine:
        """Where its bytes go."""


class GradientBytes:
    """The bytes of one gradient.

    Args:
        window: that it belongs to.
        plain: the gradient as autograd made it. It shares the storage, and operations run on it.

    Attributes:
        here: the storage has the bytes.
        stays: it is not released any more: somebody has got its address.
        users: operations that run on it now.
        stream: of a card, that its memory was made on; None on the host.
    """

    def __init__(self, window: Window, plain: Tensor) -> None:
        self.window = window
        self.plain = plain
        self.nbytes: int = plain.numel() * plain.element_size()
        self.here = True
        self.stays = False
        self.users = 0
        self.stream = streams.present(plain)
        self.flat = plain.data.as_strided((plain.numel(),), (1,))  # all elements in the order of memory
        self._blocks: list[_core.Block] = []
        self._leaving: list[Tensor] = []  # sources of copies under way
        self._is_zero = False
        self._changes: list[Change] = []
        self._coming: list[Callable[[], None]] = []  # what waits for copies back, not yet waited for

    def __del__(self) -> None:
        self._forget()

    # ---- in pieces ---------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each block, in elements."""
        count, length = self.plain.numel(), self.window.piece_elements
        for begin in range(0, count, length):
            yield begin, min(begin + length, count)

    # ---- out ---------------------------------------------------------------------------------------

    @property
    def is_backed(self) -> bool:
        """The storage can go, and come again with what it has now."""
        return bool(self._blocks) or self._is_zero

    def put(self) -> bool:
        """Starts the copies out. False: there is no room, and it stays here."""
        if self.is_backed:
            return True
        blocks: list[_core.Block] = []
        sources = [self.flat[begin:end] for begin, end in self.pieces()]
        try:
            with streams.on(self.stream):
                for source in sources:
                    block = self.window.engine.put(source)
                    if block is None:
                        return False
                    blocks.append(block)
            self._blocks, self._leaving = blocks, sources
        except (OSError, MemoryError, torch.cuda.OutOfMemoryError, MemScaleError):
            return False  # there is no engine, or a copy could not begin
        finally:
            if self._blocks is not blocks:
                _drop(blocks)
        return True

    def let_go(self) -> bool:
        """Frees the storage if nothing but this gradient has it; waits for the copies out."""
        if self.users or self.stays or self.is_held() or not self.put():
            return False
        if not self._settle():
            return False
        self.here = False
        self.plain.untyped_storage().resize_(0)
        return True

    def _settle(self) -> bool:
        """Waits for the copies out. False: the disk failed, and what is here is all there is."""
        try:
            with streams.on(self.stream):
                for block in self._blocks if self._leaving else ():
                    block.settle()
        except (OSError, MemScaleError):
            self._forget()
            return False
        self._leaving = []
        return True

    def is_held(self) -> bool:
        """Whether somebody else has the storage, or the gradient as autograd made it.

        On older PyTorch autograd has it, too, in the hook that says it is complete: it goes a little later.
        """
        storage = self.plain.untyped_storage()
        found = (
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
            sys.getrefcount(self.plain),
        )
        known = _ALONE[0] + len(self._leaving)
        if found[0] > known or found[1] > _ALONE[1] or found[2] > _ALONE[2]:
            return True
        return not storage.resizable()  # NumPy has had it

    # ---- back --------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Makes it be here. What an exception interrupts goes on with the next call.

        Raises:
            OSError: it could not be read back.
        """
        self._wait()
        if self.here:
            return
        self.stream = streams.present(self.plain)
        storage = self.plain.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        if self._is_zero:
            self.flat.zero_()
        for (begin, end), block in zip(self.pieces(), self._blocks, strict=False):
            self._get(block, self.flat[begin:end])
        self._wait()
        for change in self._changes:
            change(self.flat)
        self.here = True

    def start(self, begin: int, end: int, into: Tensor) -> Callable[[], None]:
        """Starts to copy some elements, in the order of memory; see `released.start`."""
        if self.here:
            with self.in_order():
                into.copy_(flat(self.plain)[begin:end])  # its data may have been exchanged
            return _nothing
        changes = list(self._changes)
        wait = self._start(begin, end, into)

        def arrive() -> None:
            wait()
            while changes:
                changes.pop(0)(into)

        return arrive

    @property
    def changes_to_come(self) -> tuple[Change, ...]:
        """What is done to elements that come back."""
        return () if self.here else tuple(self._changes)

    def start_by_card(self, begin: int, end: int, into: Tensor) -> Callable[[], None]:
        """As `start` for the host, with the changes done on the card."""
        part = torch.empty(end - begin, dtype=into.dtype, device=self.plain.device)
        wait = self.start(begin, end, part)

        def arrive() -> None:
            wait()
            into.copy_(part)

        return arrive

    def _start(self, begin: int, end: int, into: Tensor) -> Callable[[], None]:
        """The same for what is offloaded, without its changes."""
        if self._is_zero:
            into.zero_()
            return _nothing
        self._wait()
        patches: list[tuple[Tensor, Tensor]] = []
        waits: list[Callable[[], None]] = []
        length = self.window.piece_elements
        for number in range(begin // length, -(-end // length)):
            first = number * length
            last = min(first + length, self.plain.numel())
            low, high = max(first, begin), min(last, end)
            target = place = into[low - begin : high - begin]
            if (low, high) != (first, last):
                target = torch.empty(last - first, dtype=into.dtype, device=into.device)
                patches.append((place, target[low - first : high - first]))
            waits.append(self._get(self._blocks[number], target))

        def wait() -> None:
            for item in waits:
                item()
            for place, source in patches:
                place.copy_(source)

        return wait

    def set(self, begin: int, end: int, values: Tensor) -> None:
        """Sets some elements, in the order of memory, without having all of them here.

        Raises:
            OSError: others could not be read back.
        """
        self._wait()
        if self.here or self._changes or self._is_zero or not self._set_offloaded(begin, end, values):
            self.fetch()
            with self.in_order():
                flat(self.plain)[begin:end].copy_(values)
            self.changed()

    def _set_offloaded(self, begin: int, end: int, values: Tensor) -> bool:
        """The same for what is offloaded. False: there is no room; some of it may be set."""
        length = self.window.piece_elements
        for number in range(begin // length, -(-end // length)):
            first = number * length
            last = min(first + length, self.plain.numel())
            low, high = max(first, begin), min(last, end)
            part = values[low - begin : high - begin]
            if (low, high) != (first, last):
                whole = torch.empty(last - first, dtype=values.dtype, device=values.device)
                self._get(self._blocks[number], whole)()
                whole[low - first : high - first].copy_(part)
                part = whole
            block: _core.Block | None = None
            try:
                block = self.window.engine.put(part)
                if block is None:
                    return False
                block.settle()
            except (OSError, MemScaleError):
                _drop([] if block is None else [block])
                return False
            before, self._blocks[number] = self._blocks[number], block
            before.drop()
        return True

    def _get(self, block: _core.Block, target: Tensor) -> Callable[[], None]:
        block.get(target)
        coming, stream = self._coming, streams.present(target)

        def wait() -> None:
            if wait not in coming:
                return
            try:
                with streams.on(stream):
                    block.arrive()
            except (OSError, MemScaleError):
                coming.remove(wait)
                raise
            coming.remove(wait)

        coming.append(wait)
        return wait

    def _wait(self) -> None:
        """Waits for what is on its way back: a block comes to one place at a time."""
        while self._coming:
            self._coming[0]()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Operations of the block, on the present stream, come between those of its own before and behind."""
        stream = streams.present(self.plain)
        streams.follow(stream, self.stream)
        try:
            yield
        finally:
            streams.follow(self.stream, stream)

    # ---- changes -----------------------------------------------------------------------------------

    def changed(self) -> None:
        """What is here is not what is offloaded: that is dropped."""
        self._forget()

    def zero(self) -> None:
        """Sets every element to zero."""
        self._wait()
        self._forget()
        self._is_zero = True
        if self.here:
            with self.in_order():
                self.flat.zero_()

    def change(self, change: Change) -> None:
        """Does something to all elements: now if they are here, and when they come back."""
        if self.here:
            self._settle()  # what is on its way out is to be as it was
            with self.in_order():
                change(self.flat)
        if self.is_backed:
            self._changes.append(change)

    def add(self, other: Tensor) -> bool:
        """Adds a tensor piece by piece, without having all of it here. False: it has to be here."""
        if self.here or self._changes or self.users:
            return False
        other = other.as_strided((other.numel(),), (1,))
        blocks: list[_core.Block] = []
        before: _core.Block | None = None
        try:
            for begin, end in self.pieces():
                part = torch.empty(end - begin, dtype=self.plain.dtype, device=self.plain.device)
                self._start(begin, end, part)()
                part.add_(other[begin:end])
                block = self.window.engine.put(part)
                if block is None:
                    return False
                blocks.append(block)
                if before is not None:
                    before.settle()
                before = block
            if before is not None:
                before.settle()
            self._blocks, blocks = blocks, self._blocks
            self._is_zero = False
        except (OSError, MemScaleError):  # of the copies out, or of one back, which says so again
            return False
        finally:
            _drop(blocks)
        return True

    def _forget(self) -> None:
        blocks, self._blocks = self._blocks, []
        self._coming.clear()
        self._changes, self._is_zero, self._leaving = [], False, []
        _drop(blocks)


def _drop(blocks: list[_core.Block]) -> None:
    """Ends blocks; what is running is waited for."""
    for block in blocks:
        block.drop()


def _nothing() -> None:
    """There is nothing to wait for."""


def _alone() -> tuple[int, int, int]:
    """What `is_held` finds where nobody else holds anything."""
    with torch._C._DisableTorchDispatch():  # a dispatch mode would hold something, too
        plain = torch.empty(1, device="cpu")
        item = GradientBytes(None, plain)  # type: ignore[arg-type]
        twin = torch.Tensor._make_subclass(Tensor, plain)
    del plain
    storage = item.plain.untyped_storage()
    found = torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), sys.getrefcount(item.plain)
    del twin
    return found


_ALONE: Final = _alone()
