# SPDX-License-Identifier: Apache-2.0
"""Weights in the step of an optimizer whose state is away: in place, or a piece at a time from home.

    resident          the step works on a part of the parameter
    at home           piece i + 1 comes to the card, while piece i is stepped there, and piece i − 1 goes home

Copies run on streams of their own, as those of the state do (`shelf`): in waits for what was given to the
step's stream before, out for the piece's step, and the step's stream waits for them where a piece is used and
where its memory is free again. When all is done the host has waited, too: a weight at home is one that any
code may read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memscale.optim.alone import can_cut
from memscale.optim.kinds import group_refusal, inner_of, parameter_refusal
from memscale.optim.pieces import LEAST_BYTES, flat, is_dense
from memscale.optim.taken import base_of, is_taken
from memscale.weights.places import apart


def why_not_in_pieces(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Which parameters of an optimizer on a card are stepped in pieces: by id, "" or why not.

    Args:
        optimizer: whose state is away, or will be.
    """
    inner = inner_of(optimizer)
    return {
        id(value): _why_not(inner, group, value) for group in inner.param_groups for value in group["params"]
    }


def _why_not(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> str:
    if parameter.nbytes < LEAST_BYTES:
        return f"it is trained and has less than {LEAST_BYTES} bytes"
    if is_taken(optimizer):
        if reason := group_refusal(optimizer._memscale_kind, group) or parameter_refusal(parameter):
            return f"it is trained, and PyTorch steps it as a whole ({reason})"
        return ""
    base = base_of(optimizer)
    has_state = base is not torch.optim.SGD or group["momentum"]
    if group.get("differentiable") or not has_state or not is_dense(parameter):
        return "it is trained, and its step is not computed in pieces"
    if not can_cut(base, group, parameter, on_card=True):
        return f"it is trained, and {base.__name__} steps it as a whole"
    return ""


BUFFERS: Final = 3
"""That pieces pass through: for the one that is stepped, that before it and that behind it."""


class Passage:
    """The buffers that pieces of weights pass through, and the pieces that are on their way home.

    All buffers are as large as the largest piece, and made at once: what comes and goes in several sizes
    leaves the allocator with blocks that are a little too large or too small for the next.
    """

    def __init__(self) -> None:
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._size = self._count = 0

    def expect(self, count: int, nbytes: int) -> None:
        """So many pieces are to come, none of which is larger."""
        self._size, self._count = max(self._size, nbytes), self._count + count

    def buffer(self, device: torch.device) -> Tensor:
        """Bytes for a piece. What the present stream was given has been done with them before."""
        count, self._count = min(BUFFERS, self._count), 0
        self._free += [torch.empty(self._size, dtype=torch.uint8, device=device) for _ in range(count)]
        return self._free.pop()

    def send(self, buffer: Tensor, home: Tensor, stream: Any) -> None:
        """Copies a piece home, on a stream. No more than this one is on its way then.

        Args:
            buffer: that the piece is in, as it was stepped.
            home: its place there.
            stream: of such copies.
        """
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream), torch.no_grad():
            home.copy_(buffer[: home.nbytes].view(home.dtype), non_blocking=True)
            self._leaving.append((buffer, stream.record_event()))
        while len(self._leaving) > 1:
            self._settle()

    def _settle(self) -> Any:
        buffer, gone = self._leaving.popleft()
        torch.cuda.current_stream(buffer.device).wait_event(gone)  # then its memory is free
        self._free.append(buffer)
        return gone

    def end(self) -> None:
        """Waits on the host until all are at home."""
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
        self._home: Tensor | None = None
        if found is not None:
            _, unit, weight = found
            unit.blocks.end(unit)
            self._blocks, self._home = unit.blocks, flat(weight.home)
            passage.expect(len(bounds), bounds[0][1] * parameter.element_size())

    def begin(self, first: int, last: int) -> None:
        """Asks for a part."""
        if self._home is None:
            return
        blocks = self._blocks
        home, buffer = self._home[first:last], self._passage.buffer(blocks.device)
        blocks.stream.wait_stream(torch.cuda.current_stream(blocks.device))  # whose memory it was
        with torch.cuda.stream(blocks.stream), torch.no_grad():
            buffer[: home.nbytes].view(home.dtype).copy_(home, non_blocking=True)
            self._asked[first] = buffer, blocks.stream.record_event()

    def part(self, first: int, last: int) -> Tensor:
        """A part, flat, where the step is computed."""
        if self._home is None:
            return flat(self._parameter.detach())[first:last]
        buffer, come = self._asked.pop(first)
        torch.cuda.current_stream(buffer.device).wait_event(come)
        self._used = buffer
        return buffer[: (last - first) * self._home.itemsize].view(self._home.dtype)

    def stepped(self, first: int, last: int, is_last: bool) -> None:
        """The part that was asked for last has been stepped."""
        if self._home is None or self._used is None:
            return
        self._passage.send(self._used, self._home[first:last], self._blocks.stream_home)
        self._used = None
        if is_last:
            torch.autograd.graph.increment_version(self._parameter)

    def drain(self) -> None:
        """What was asked for and is not needed any more: its memory is free when it has come."""
        for buffer, come in self._asked.values():
            torch.cuda.current_stream(buffer.device).wait_event(come)
        self._asked.clear()
