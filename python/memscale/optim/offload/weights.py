# SPDX-License-Identifier: Apache-2.0
"""Weights in the step of an optimizer with offloaded state: in place, or in pieces from the backing store.

    resident          the step works on a part of the parameter
    offloaded         piece i + 1 comes to the card, while piece i is stepped there, and piece i − 1 goes back

Copies run on streams of their own, as those of the state do (`offload/store`): in waits for what was given to
the step's stream before, out for the piece's step, and the step's stream waits for them where a piece is used
and where its memory is free again. At the end the host has waited, too: any code may read an
offloaded weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memscale.optim.alone import can_cut
from memscale.optim.kinds import group_refusal, inner_of, parameter_refusal
from memscale.optim.offload.pieces import LEAST_BYTES, flat
from memscale.optim.patched_base import base_of, is_patched
from memscale.torchkit.extents import fills_memory
from memscale.weights.stream import apart


def why_not_in_pieces(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Which parameters of an optimizer on a card are stepped in pieces: by id, "" or why not.

    Args:
        optimizer: whose state is offloaded, or will be.
    """
    inner = inner_of(optimizer)
    return {
        id(value): _why_not(inner, group, value) for group in inner.param_groups for value in group["params"]
    }


def _why_not(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> str:
    if parameter.nbytes < LEAST_BYTES:
        return f"it is trained and has less than {LEAST_BYTES} bytes"
    if is_patched(optimizer):
        if reason := group_refusal(optimizer._memscale_kind, group) or parameter_refusal(parameter):
            return f"it is trained, and PyTorch steps it as a whole ({reason})"
        return ""
    base = base_of(optimizer)
    has_state = base is not torch.optim.SGD or group["momentum"]
    if group.get("differentiable") or not has_state or not fills_memory(parameter):
        return "it is trained, and its step is not computed in pieces"
    if not can_cut(base, group, parameter, on_card=True):
        return f"it is trained, and {base.__name__} steps it as a whole"
    return ""


BUFFERS: Final = 3
"""Number of buffers: for the piece that is stepped, the one before it and the one behind it."""


class Passage:
    """The buffers that pieces of weights pass through, and the copies back that are under way.

    All buffers are as large as the largest piece, and made at once: what comes and goes in several sizes
    leaves the allocator with blocks that are a little too large or too small for the next.
    """

    def __init__(self) -> None:
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._size = self._count = 0

    def expect(self, count: int, nbytes: int) -> None:
        """Announces pieces: how many, and their largest size."""
        self._size, self._count = max(self._size, nbytes), self._count + count

    def buffer(self, device: torch.device) -> Tensor:
        """A buffer for a piece; the present stream has finished earlier uses of it."""
        count, self._count = min(BUFFERS, self._count), 0
        self._free += [torch.empty(self._size, dtype=torch.uint8, device=device) for _ in range(count)]
        return self._free.pop()

    def send(self, buffer: Tensor, backing: Tensor, stream: Any) -> None:
        """Copies a piece to the backing store, on a stream; earlier copies are waited for.

        Args:
            buffer: that the piece is in, as it was stepped.
            backing: its place there.
            stream: of such copies.
        """
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream), torch.no_grad():
            backing.copy_(buffer[: backing.nbytes].view(backing.dtype), non_blocking=True)
            self._leaving.append((buffer, stream.record_event()))
        while len(self._leaving) > 1:
            self._settle()

    def _settle(self) -> Any:
        buffer, gone = self._leaving.popleft()
        torch.cuda.current_stream(buffer.device).wait_event(gone)  # then its memory is free
        self._free.append(buffer)
        return gone

    def end(self) -> None:
        """Waits on the host until all copies back are done."""
        while self._leaving:
            self._settle().synchronize()
        self._free.clear()


class WeightParts:
    """A weight whose parts are stepped one after the other.

    Args:
        parameter: the weight.
        passage: of its step.
        bounds: first and last element of each part.
    """

    def __init__(self, parameter: Tensor, passage: Passage, bounds: Sequence[tuple[int, int]]) -> None:
        self._parameter, self._passage = parameter, passage
        self._asked: dict[int, tuple[Tensor, Any]] = {}
        self._used: Tensor | None = None
        found = apart(parameter)
        self._blocks: Any = None
        self._backing: Tensor | None = None
        if found is not None:
            _, unit, weight = found
            unit.blocks.end(unit)
            self._blocks, self._backing = unit.blocks, flat(weight.backing)
            passage.expect(len(bounds), bounds[0][1] * parameter.element_size())

    def begin(self, first: int, last: int) -> None:
        """Starts the copy of a part."""
        if self._backing is None:
            return
        blocks = self._blocks
        backing, buffer = self._backing[first:last], self._passage.buffer(blocks.device)
        blocks.stream.wait_stream(torch.cuda.current_stream(blocks.device))  # whose memory it was
        with torch.cuda.stream(blocks.stream), torch.no_grad():
            buffer[: backing.nbytes].view(backing.dtype).copy_(backing, non_blocking=True)
            self._asked[first] = buffer, blocks.stream.record_event()

    def part(self, first: int, last: int) -> Tensor:
        """A part, flat, where the step is computed."""
        if self._backing is None:
            return flat(self._parameter.detach())[first:last]
        buffer, come = self._asked.pop(first)
        torch.cuda.current_stream(buffer.device).wait_event(come)
        self._used = buffer
        return buffer[: (last - first) * self._backing.itemsize].view(self._backing.dtype)

    def stepped(self, first: int, last: int, is_last: bool) -> None:
        """The part that was asked for last has been stepped."""
        if self._backing is None or self._used is None:
            return
        self._passage.send(self._used, self._backing[first:last], self._blocks.write_stream)
        self._used = None
        if is_last:
            torch.autograd.graph.increment_version(self._parameter)

    def drain(self) -> None:
        """Drops parts that were asked for; their memory is free once they have arrived."""
        for buffer, come in self._asked.values():
            torch.cuda.current_stream(buffer.device).wait_event(come)
        self._asked.clear()
