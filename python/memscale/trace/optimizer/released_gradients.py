# SPDX-License-Identifier: Apache-2.0
"""Gradient release in a traced step: complete gradients end, but for those that may wait for their copies.

    backward    a complete gradient joins those that wait; while they are more than the window, the oldest
                ends. When backward is over, all are offloaded
    the step    has the gradient in use, and of those before as many as the window holds. An optimizer whose
                steps are declared has the most of that all the time; where its state is offloaded, it has
                pieces of gradients, which `techniques/optimizer/offload_layout` counts

So it is a bound that is reached when the disk is slow. Where there are gradients from an earlier backward,
a new one is added to what is offloaded, in pieces, and ends. The first backward of such a step has none to
add to: the trace has the larger of the two, what waits or the pieces.

On a card each gradient is a block of its own, which comes and goes as it does in a run.
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
from memscale.optim.offload.pieces import PIECE_ELEMENTS
from memscale.optim.release.gradient import fills_its_storage
from memscale.techniques.optimizer.offload_layout import Together, most_together
from memscale.trace.optimizer.complete_gradients import enter, when_complete

if TYPE_CHECKING:
    from memscale.techniques.step_facts import StepFacts
    from memscale.trace.fake_optimizer import FakeOptimizer
    from memscale.trace.recorder import GraphRecorder

_CHUNKS = 2
"""Pieces that are here while a gradient is added to what is offloaded."""


class ReleasedGradients:
    """The gradients of one trace that are released.

    Args:
        recorder: of the trace.
        step: says which, and how many bytes may wait.
    """

    def __init__(self, recorder: GraphRecorder, step: StepFacts) -> None:
        self.recorder = recorder
        self.path = step.path
        self._names = step.path.released if step.gradients else frozenset()
        self.adds = step.grads_present
        self.on_card = recorder.target.kind == "cuda"
        self._waiting: deque[Tensor] = deque()
        self._order: list[nn.Parameter] = []
        self._released: set[nn.Parameter] = set()

    def outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those whose gradients stay."""
        names = self.recorder.names
        return [value for value in parameters if names[id(value)] not in self._names]

    @contextmanager
    def watching(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Lets the others' gradients go, inside the block, when they are complete."""
        staying = set(self.outside(parameters))
        self._order = [parameter for parameter in parameters if parameter not in staying]
        with when_complete(self._order, self._completed):
            yield

    def _completed(self, parameter: nn.Parameter) -> None:
        gradient, recorder = parameter.grad, self.recorder
        buffer = None if gradient is None else recorder.buffer_of(gradient)
        if gradient is None or buffer is None or gradient.requires_grad or not fills_its_storage(gradient):
            return
        enter(recorder, buffer, parameter, gradient)
        self._released.add(parameter)
        parameter.grad = None
        self._priced("memscale::gradient_out", _bytes_of(gradient), self.path.link_moves[0])
        if self.adds:
            self._add(gradient)
        self._waiting.append(gradient)
        while sum(map(_bytes_of, self._waiting)) > self.path.gradient_window_bytes:
            self._waiting.popleft()

    def _add(self, gradient: Tensor) -> None:
        graph, size = self.recorder.graph, _bytes_of(gradient)
        self._priced("memscale::gradient_back", size, self.path.link_moves[1])
        piece = _piece_of(gradient)
        sizes = [min(size, _CHUNKS * piece)]
        if self.on_card:
            sizes = [piece] * _CHUNKS if size > piece else [size]
        missing = sum(sizes) - sum(map(_bytes_of, self._waiting))
        if missing < sum(sizes):
            sizes = [missing] * (missing > 0)
        for buffer in [graph.add_buffer(here, _core.CATEGORY_TEMPORARY) for here in sizes]:
            graph.end_buffer(buffer)

    @contextmanager
    def stepping(self, optimizers: Sequence[FakeOptimizer]) -> Iterator[None]:
        """Inside the block parameters have gradients to step with, in the memory that they have for that."""
        self._waiting.clear()
        stepped = [parameter for parameter in self._order if parameter in self._released]
        if not stepped:
            yield
            return
        sizes = list(map(_bytes_of, stepped))
        on_host = optimizers[:1] if self.path.host_step_moves else ()
        coming = [value for value in stepped if not any(item.is_stepped_by_core(value) for item in on_host)]
        self._priced("memscale::gradient_back", sum(map(_bytes_of, coming)), self.path.link_moves[1])
        most = most_together(sizes, self.path.gradient_window_bytes)
        looked_at = [self._added(size) for size in (most if self.on_card else [sum(most)])]
        if not any(item.has_whole_gradients for item in optimizers):  # the loop may look at them, in any case
            for buffer in looked_at:
                self.recorder.graph.end_buffer(buffer)
        self.recorder.paused = True
        for parameter in stepped:
            parameter.grad = torch.empty_like(parameter)
        self.recorder.paused = False
        uses = _UsesOnCard(self, stepped) if self.on_card else _Uses(self, self._here_at_use(optimizers))
        with uses:
            yield
        uses.end()

    def _here_at_use(self, optimizers: Sequence[FakeOptimizer]) -> dict[int, int]:
        """Bytes that are here when an optimizer uses a gradient, by its id: of that, and left of others."""
        found = {}
        for item in optimizers:
            here = Together(self.path.gradient_window_bytes)
            totals = {
                parameter: sum(here.use(_bytes_of(parameter)))
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

    def end(self) -> None:
        """The step is over. What was used last still counts: it may be read before it is offloaded."""

    def _use(self, gradient: int) -> None:
        graph = self.released.recorder.graph
        if self._buffer is not None:
            graph.end_buffer(self._buffer)
        self.released._priced("memscale::gradient_here", 0, 0)
        self._latest = gradient
        self._buffer = self.released._added(self.totals[gradient])


class _UsesOnCard(_Uses):
    """The same, each in its own block. An operation on lists has one after the other."""

    def __init__(self, released: ReleasedGradients, stepped: Sequence[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in stepped if parameter.grad is not None]
        super().__init__(released, {id(gradient): _bytes_of(gradient) for gradient in gradients})
        self._here: dict[int, int] = {}  # gradient → buffer, the latest used last
        self._seen: set[int] = set()

    def end(self) -> None:
        """The step is over, and all are offloaded."""
        self._leave(0)

    def _use(self, gradient: int) -> None:
        self._latest = gradient
        buffer = self._here.pop(gradient, None)
        if buffer is None:
            self._leave(self.released.path.gradient_window_bytes + 1)
            size = self.totals[gradient]
            # What all of them take once is in the step already.
            again = size if gradient in self._seen else 0
            self.released._priced("memscale::gradient_here", again, self.released.path.link_moves[1])
            self._seen.add(gradient)
            buffer = self.released._added(size)
        self._here[gradient] = buffer

    def _leave(self, below_bytes: int) -> None:
        """Lets the oldest go until the rest is less."""
        graph = self.released.recorder.graph
        while self._here and sum(self.totals[key] for key in self._here) >= below_bytes:
            graph.end_buffer(self._here.pop(next(iter(self._here))))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _piece_of(tensor: Tensor) -> int:
    return PIECE_ELEMENTS * tensor.element_size()
