# SPDX-License-Identifier: Apache-2.0
"""Parts of a card's gradients and weights on the host, for a step that its cores compute.

    gradient i + 1, weight i + 1     come down           while i is stepped in pinned buffers
    weight i − 1                     goes up again

What is on the host already does not move: the engine copies the bytes of a released gradient, and an
offloaded weight is stepped in its backing store.

Copies run on streams of their own. Down waits for what the card was given before the step, up for nothing:
when a part is stepped, the host has waited for it to come down. At the end of the step the card's own stream
waits for all that went up (`HostRoom.end`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from memscale.optim.offload.pieces import HOST, flat
from memscale.optim.release.gradient import ReleasedGradient, start
from memscale.weights.stream import apart

_WIDEST: Final = 4  # bytes of an element of weights and gradients that the core steps, at most
BUFFERS: Final = 6
"""A gradient and a weight that come, two that are stepped, and weights that go."""


class HostRoom:
    """The buffers and streams of one card's steps on the host; one thread's at a time.

    Args:
        device: the card.
        piece_elements: of a part, at most.
        say: gets a line where memory cannot be pinned: copies are waited for then, and right.
    """

    def __init__(self, device: torch.device, piece_elements: int, say: Callable[[str], None]) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._nbytes, self._say = piece_elements * _WIDEST, say
        self._made = 0
        self._free: list[Tensor] = []
        self._going: deque[tuple[Tensor, Any]] = deque()

    @staticmethod
    def most_bytes(piece_elements: int) -> int:
        """Host memory that all buffers take."""
        return BUFFERS * piece_elements * _WIDEST

    def take(self) -> Tensor:
        """A buffer that nothing is copied from any more."""
        while self._going and (self._made >= BUFFERS or self._going[0][1].query()) and not self._free:
            buffer, gone = self._going.popleft()
            gone.synchronize()
            self._free.append(buffer)
        return self._free.pop() if self._free else self._buffer()

    def _buffer(self) -> Tensor:
        self._made += 1
        try:
            return torch.empty(self._nbytes, dtype=torch.uint8, device=HOST, pin_memory=True)
        except RuntimeError as error:
            self._say(f"memory for steps on the host cannot be pinned: {str(error).splitlines()[0]}")
            return torch.empty(self._nbytes, dtype=torch.uint8, device=HOST)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back that nothing is copied from."""
        self._free.append(buffer)

    def bring(self, source: Tensor, ready: Any, buffer: Tensor) -> tuple[Tensor, Any]:
        """Starts to copy a part of a card's tensor into a buffer.

        Args:
            source: flat.
            ready: event behind which it is there.
            buffer: from `take`.

        Returns:
            The part on the host, and the event behind which it is there.
        """
        part = _as_part(buffer, source.numel(), source.dtype)
        self.down.wait_event(ready)
        with torch.cuda.stream(self.down), torch.no_grad():
            part.copy_(source, non_blocking=True)
            return part, self.down.record_event()

    def send(self, part: Tensor, buffer: Tensor, target: Tensor) -> None:
        """Starts to copy a part to the card, and takes its buffer back when it is there."""
        with torch.cuda.stream(self.up), torch.no_grad():
            target.copy_(part, non_blocking=True)
            target.record_stream(self.up)  # should the weight go before anybody has waited for it
            self._going.append((buffer, self.up.record_event()))

    def end(self) -> None:
        """Orders later work of the present stream behind all copies up."""
        torch.cuda.current_stream(self.device).wait_stream(self.up)


def _as_part(buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return buffer[: count * dtype.itemsize].view(dtype)


class HostWeight:
    """As `weights.WeightParts`, for a step on the host.

    Args:
        parameter: of a card; its data may be in the backing store.
        room: what its parts pass through.
        ready: event behind which nothing on the card uses it any more.
    """

    def __init__(self, parameter: Tensor, room: HostRoom, ready: Any) -> None:
        self._room, self._ready = room, ready
        self._asked: dict[int, tuple[Tensor, Any, Tensor]] = {}
        self._used: tuple[Tensor, Tensor] | None = None
        found = apart(parameter)
        self._is_offloaded = found is not None
        if found is not None:
            _, unit, weight = found
            unit.blocks.end(unit)  # nothing is copied from there any more
            self._flat = flat(weight.backing)
        else:
            self._flat = flat(parameter.detach())

    def begin(self, first: int, last: int) -> None:
        """Asks for a part."""
        if not self._is_offloaded:
            buffer = self._room.take()
            part, come = self._room.bring(self._flat[first:last], self._ready, buffer)
            self._asked[first] = part, come, buffer

    def part(self, first: int, last: int) -> Tensor:
        """A part on the host, flat."""
        if self._is_offloaded:
            return self._flat[first:last]
        part, come, buffer = self._asked.pop(first)
        come.synchronize()
        self._used = part, buffer
        return part

    def stepped(self, first: int, last: int, is_last: bool) -> None:
        """The part that was asked for last has been stepped."""
        if self._used is not None:
            self._room.send(*self._used, self._flat[first:last])
            self._used = None

    def drain(self) -> None:
        """Gives back what was asked for and is not needed any more."""
        for _, come, buffer in self._asked.values():
            come.synchronize()
            self._room.give(buffer)
        self._asked.clear()
        if self._used is not None:
            self._room.give(self._used[1])
            self._used = None


class HostGradient:
    """Parts of a gradient on the host, one after the other.

    Args:
        gradient: of a card; its bytes may be offloaded.
        room: what its parts pass through.
        ready: event behind which it is complete.
    """

    def __init__(self, gradient: Tensor, room: HostRoom, ready: Any) -> None:
        self.gradient = gradient
        self._room, self._ready = room, ready
        self._asked: dict[int, tuple[Tensor, Callable[[], object], Tensor]] = {}
        self._used: Tensor | None = None

    def begin(self, first: int, last: int) -> None:
        """Asks for a part."""
        buffer, gradient = self._room.take(), self.gradient
        if isinstance(gradient, ReleasedGradient):
            part = _as_part(buffer, last - first, gradient.dtype)
            wait: Callable[[], object] = start(gradient, first, last, part)
        else:
            part, come = self._room.bring(flat(gradient)[first:last], self._ready, buffer)
            wait = come.synchronize
        self._asked[first] = part, wait, buffer

    def part(self, first: int, last: int) -> Tensor:
        """A part on the host, flat, good until `stepped`."""
        part, wait, self._used = self._asked.pop(first)
        wait()
        return part

    def stepped(self) -> None:
        """The part that was asked for last has been used."""
        if self._used is not None:
            self._room.give(self._used)
            self._used = None

    def drain(self) -> None:
        """Gives back what was asked for and is not needed any more."""
        for _, wait, buffer in self._asked.values():
            with contextlib.suppress(Exception):  # there is one already, which is raised
                wait()
            self._room.give(buffer)
        self._asked.clear()
        self.stepped()
