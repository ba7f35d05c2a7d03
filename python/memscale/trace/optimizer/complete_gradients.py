# SPDX-License-Identifier: Apache-2.0
"""Hooks of a trace where a parameter's gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from memscale import _core
from memscale.trace.recorder import GraphRecorder


@contextmanager
def when_complete(parameters: Iterable[nn.Parameter], call: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Calls, inside the block, with each parameter whose gradient is complete.

    The hooks go then: by them a parameter would hold itself, where no collector sees it.
    """
    handles = [parameter.register_post_accumulate_grad_hook(call) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def enter(recorder: GraphRecorder, buffer: int, parameter: nn.Parameter, gradient: Tensor) -> None:
    """Says of a buffer of the graph that it is the gradient of a parameter."""
    recorder.graph.set_category(buffer, _core.CATEGORY_GRADIENT)
    recorder.label(buffer, gradient, recorder.names[id(parameter)])
