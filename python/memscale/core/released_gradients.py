# SPDX-License-Identifier: Apache-2.0
"""Gradient release in a traced step: complete gradients end, but for those that may wait for their copies.

    backward    a complete gradient joins those that wait; while they are more than the window, the oldest
                ends. When backward is over, all are away
    the step    has the gradient in use, and of those before as many as the window holds. In a trace they
                share one piece of memory, as large as all that is ever there

So it is a bound that is reached when the disk is slow. Where there are gradients from an earlier backward, a
new one is added to what is away, in pieces, and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memscale import _core
from memscale.optim.pieces import PIECE_ELEMENTS
from memscale.optim.released import fills_its_storage

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.tracer import StepFacts

_CHUNKS = 2
"""Pieces that are here while a gradient is added to what is away, and in a step that takes it in pieces."""


class ReleasedGradients:
    """The gradients of one trace that are released.

    Args:
        recorder: of the trace.
        step: says which, and how many bytes may wait.
    """

    def __init__(self, recorder: GraphRecorder, step: StepFacts) -> None:
        self.recorder = recorder
        self.path = step.path
        self.adds = step.grads_present
        self._waiting: deque[Tensor] = deque()
        self._order: list[nn.Parameter] = []
        self._released: set[nn.Parameter] = set()
        self._chunks: Tensor | None = None  # alive until the step is over

    def outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those whose gradients stay."""
        names = self.recorder.names
        return [value for value in parameters if names[id(value)] not in self.path.released]

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Lets the others' gradients go when they are complete."""
        staying = set(self.outside(parameters))
        for parameter in parameters:
            if parameter not in staying:
                self._order.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._completed)

    def _completed(self, parameter: nn.Parameter) -> None:
        gradient, recorder = parameter.grad, self.recorder
        buffer = None if gradient is None else recorder.buffer_of(gradient)
        if gradient is None or buffer is None or gradient.requires_grad or not fills_its_storage(gradient):
            return
        recorder.graph.set_category(buffer, _core.CATEGORY_GRADIENT)
        recorder.label(buffer, gradient, recorder.names[id(parameter)])
        self._released.add(parameter)
        parameter.grad = None
        self._priced("memscale::gradient_out", _bytes_of(gradient), self.path.link_moves[0])
        if self.adds:
            self._add(gradient)
            return
        self._waiting.append(gradient)
        while sum(map(_bytes_of, self._waiting)) > self.path.gradient_window_bytes:
            self._waiting.popleft()

    def _add(self, gradient: Tensor) -> None:
        graph, size = self.recorder.graph, _bytes_of(gradient)
        self._priced("memscale::gradient_back", size, self.path.link_moves[1])
        here = min(size, _CHUNKS * _piece_of(gradient))
        graph.end_buffer(graph.add_buffer(here, _core.CATEGORY_TEMPORARY))

    def before_step(self) -> None:
        """Gives every parameter a gradient to step with, in the memory that they have for that."""
        self._waiting.clear()
        stepped = [parameter for parameter in self._order if parameter in self._released]
        if not stepped:
            return
        sizes = list(map(_bytes_of, stepped))
        self._priced("memscale::gradient_back", sum(sizes), self.path.link_moves[1])
        whole = self._buffer(self._room(sizes), stepped[0].device)
        if self.path.state_chunk_bytes:  # the loop may have looked at them; the step has pieces
            whole = self._chunks = self._buffer(
                max(min(_bytes_of(parameter), _CHUNKS * _piece_of(parameter)) for parameter in stepped),
                whole.device,
            )
        self.recorder.paused = True
        for parameter in stepped:
            parameter.grad = (
                torch.empty_like(parameter) if self.path.state_chunk_bytes else _form_of(whole, parameter)
            )
        self.recorder.paused = False

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        made = torch.empty(-(-size // 16) * 4, dtype=torch.float32, device=device)
        buffer = self.recorder.buffer_of(made)
        if buffer is not None:
            self.recorder.graph.set_category(buffer, _core.CATEGORY_GRADIENT)
        return made

    def _room(self, sizes: Sequence[int]) -> int:
        """What gradients that are used in turn take at most: the one in use, and what is left of others."""
        here: deque[int] = deque()
        most = 0
        for size in sizes:
            while sum(here) > self.path.gradient_window_bytes:
                here.popleft()
            here.append(size)
            most = max(most, sum(here))
        return most

    def _priced(self, name: str, size: int, moves: int) -> None:
        self.recorder.graph.add_op(name, 0, size * moves // 1024, 0, 0, _core.WORK_MOVE)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _piece_of(tensor: Tensor) -> int:
    return PIECE_ELEMENTS * tensor.element_size()


def _form_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor like a parameter, in other memory."""
    return whole.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
