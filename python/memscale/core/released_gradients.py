# SPDX-License-Identifier: Apache-2.0
"""Gradient release in a traced step: complete gradients end, but for those that may wait for their copies.

    backward    a complete gradient joins those that wait; while they are more than the window, the oldest
                ends. When backward is over, all are away
    the step    has the gradient in use, and of those before as many as the window holds. An optimizer that
                is told, not run, has as much as that is ever; where its state is away, too, it has pieces of
                gradients, which `away_layout` counts

So it is a bound that is reached when the disk is slow. Where there are gradients from an earlier backward, a
new one is added to what is away, in pieces, and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale import _core
from memscale.core.away_layout import Together, most_together
from memscale.optim.pieces import PIECE_ELEMENTS
from memscale.optim.released import fills_its_storage

if TYPE_CHECKING:
    from memscale.core.fake_optimizer import FakeOptimizer
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.tracer import StepFacts

_CHUNKS = 2
"""Pieces that are here while a gradient is added to what is away."""


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

    @contextmanager
    def stepping(self, optimizers: Sequence[FakeOptimizer]) -> Iterator[None]:
        """Inside the block parameters have gradients to step with, in the memory that they have for that."""
        self._waiting.clear()
        stepped = [parameter for parameter in self._order if parameter in self._released]
        if not stepped:
            yield
            return
        sizes = list(map(_bytes_of, stepped))
        self._priced("memscale::gradient_back", sum(sizes), self.path.link_moves[1])
        most = self._added(most_together(sizes, self.path.gradient_window_bytes))
        if not any(item.has_whole_gradients for item in optimizers):  # the loop may look at them, in any case
            self.recorder.graph.end_buffer(most)
        self.recorder.paused = True
        for parameter in stepped:
            parameter.grad = torch.empty_like(parameter)
        self.recorder.paused = False
        with _Uses(self, self._here_at_use(optimizers)):
            yield

    def _here_at_use(self, optimizers: Sequence[FakeOptimizer]) -> dict[int, int]:
        """Bytes that are here when an optimizer uses a gradient, by its id: of that, and left of others."""
        found = {}
        for item in optimizers:
            here = Together(self.path.gradient_window_bytes)
            totals = {
                parameter: here.use(_bytes_of(parameter))
                for parameter in item.order
                if parameter in self._released and parameter.grad is not None
            }
            for first, others in item.alike.items():
                if first in totals:
                    found[id(first.grad)] = max(totals.get(other, 0) for other in others)
        return found

    def _added(self, size: int) -> int:
        return self.recorder.graph.add_buffer(size, _core.CATEGORY_GRADIENT)

    def _priced(self, name: str, size: int, moves: int) -> None:
        self.recorder.graph.add_op(name, 0, size * moves // 1024, 0, 0, _core.WORK_MOVE)


class _Uses(TorchDispatchMode):
    """Counts gradients as they come back, one after the other, to operations of optimizers that are run."""

    def __init__(self, released: ReleasedGradients, totals: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.released = released
        self.totals = totals
        self._latest = 0
        self._buffer: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, when what it uses is here."""
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.totals and id(leaf) != self._latest:
                self._use(id(leaf))
        return func(*args, **(kwargs or {}))

    def _use(self, gradient: int) -> None:
        graph = self.released.recorder.graph
        if self._buffer is not None:
            graph.end_buffer(self._buffer)
        self.released._priced("memscale::gradient_here", 0, 0)
        self._latest = gradient
        self._buffer = self.released._added(self.totals[gradient])


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _piece_of(tensor: Tensor) -> int:
    return PIECE_ELEMENTS * tensor.element_size()
