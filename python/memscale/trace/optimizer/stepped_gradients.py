# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step inside of backward, in a traced step.

    backward    a gradient is complete: its parameter's step is recorded there, its state appears there if it
                is the first, and the gradient ends. Where our core steps it on a host, beside backward, the
                gradient joins those that wait, and the oldest end when they are more than the window
    the step    has those that are left: sparse ones, those of other optimizers

So what waits is a bound, reached when the steps are slow. The operations are backward's, as phases do not go
back. A model that cannot be traced on fakes has all its steps behind backward, with all gradients: that is
more than it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memscale.trace.optimizer.complete_gradients import enter, when_complete

if TYPE_CHECKING:
    from memscale.techniques.optimizer.path import OptimizerPath
    from memscale.trace.fake_optimizer import FakeOptimizer
    from memscale.trace.recorder import GraphRecorder


class SteppedGradients:
    """The gradients of one trace that are used in backward.

    Args:
        recorder: of the trace.
        path: says which, and how many bytes may wait.
        optimizers: of the trace; the first one steps.
    """

    def __init__(
        self, recorder: GraphRecorder, path: OptimizerPath, optimizers: Sequence[FakeOptimizer]
    ) -> None:
        self.recorder = recorder
        self.path = path
        self.optimizers = optimizers
        self._waiting: deque[Tensor] = deque()
        self._begun = False

    @contextmanager
    def watching(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Has parameters stepped, inside the block, when their gradients are complete."""
        names, stepped = self.recorder.names, self.path.stepped if self.optimizers else ()
        found = [parameter for parameter in parameters if names[id(parameter)] in stepped]
        with when_complete(found, self._completed):
            yield

    def _completed(self, parameter: nn.Parameter) -> None:
        gradient, recorder, optimizer = parameter.grad, self.recorder, self.optimizers[0]
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            return
        buffer = recorder.buffer_of(gradient)
        if buffer is not None:
            enter(recorder, buffer, parameter, gradient)
        on_host = recorder.target.kind == "cpu" or self.path.host_step_moves > 0
        if on_host and optimizer.is_stepped_by_core(parameter):
            self._wait(gradient)
        del gradient
        with recorder.accumulation.aside():
            if optimizer.step_alone(parameter):
                parameter.grad = None

    def _wait(self, gradient: Tensor) -> None:
        """Has a gradient wait for a step beside backward, if it is one of those."""
        if gradient.nbytes > self.path.step_window_bytes:
            return
        if not self._begun:
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._waiting.clear)
        self._waiting.append(gradient)
        while sum(value.nbytes for value in self._waiting) > self.path.step_window_bytes:
            self._waiting.popleft()
