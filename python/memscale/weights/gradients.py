# SPDX-License-Identifier: Apache-2.0
"""Gradients on a card whose streamed weights are in the backing store by the time they arrive.

PyTorch adds a gradient to `.grad` in a node of its own, which it makes when a graph uses the weight, and
which a weight forgets when its data change the device. So a weight that has been offloaded has one for each
use, where a plain one has one for all of them:

    one use in a backward     as in the plain step, but that `.grad` may be made again on the host, if PyTorch
                              copies: it is brought to the card before anybody sees it
    several                   a plain node adds up all contributions, and then adds the sum to `.grad`. So
                              what is in `.grad` already is put aside when the first one comes, and added when
                              backward is over: the same sums in the same order, so the same bits

Nodes are distinguished by a hook on each, which lives as long as its node does.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memscale.torchkit.graph_task import in_backward
from memscale.weights.placed_gradients import on_its_device, set_gradient


class _Trained(Protocol):
    parameter: nn.Parameter


class Arrivals:
    """The gradients of one weight.

    Args:
        weight: that is trained.
    """

    def __init__(self, weight: _Trained) -> None:
        self._weight = weakref.ref(weight)
        self._hooks: list[weakref.ref[_Arriving]] = []  # one for each node that a graph may have
        self._node: Any = None  # of the present use, which nobody else may have yet
        self._backward = -1
        self._aside: Tensor | None = None
        self._handle = weight.parameter.register_post_accumulate_grad_hook(_settled)

    def begin_use(self, parameter: nn.Parameter) -> None:
        """The weight is on the card: all its uses from now on share one node."""
        if self._aside is not None and not in_backward():
            self._recover(parameter)
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            made = parameter.view_as(parameter).grad_fn
        assert made is not None
        self._node = made.next_functions[0][0]
        hook = _Arriving(self)
        self._node.register_prehook(hook)
        self._hooks.append(weakref.ref(hook))

    def _recover(self, parameter: nn.Parameter) -> None:
        """A backward was broken off, and a plain node would not have added anything.

        Where `.grad` is nothing or zero now, that is the program's own doing.
        """
        aside, self._aside = self._aside, None
        gradient = parameter.grad
        if gradient is not None and bool(gradient.detach().count_nonzero()):
            set_gradient(parameter, aside)

    def end_use(self) -> None:
        """The weight has returned to its backing store."""
        self._node = None
        self._hooks = [ref for ref in self._hooks if ref() is not None]

    def end(self) -> None:
        """The weight is no longer streamed."""
        self._handle.remove()
        self._node = None

    def arrive(self) -> None:
        """A contribution is about to be added to the gradient."""
        weight = self._weight()
        task = torch._C._current_graph_task_id()
        if weight is None or task == self._backward:
            return
        self._backward, self._aside = task, None  # of a backward that was broken off
        parameter = weight.parameter
        if parameter.grad is not None and sum(ref() is not None for ref in self._hooks) > 1:
            self._aside, parameter.grad = parameter.grad, None
            torch.autograd.Variable._execution_engine.queue_callback(self._add_aside)

    def _add_aside(self) -> None:
        """Adds what was put aside: backward is over."""
        weight, aside, self._aside = self._weight(), self._aside, None
        if weight is None or aside is None:
            return
        gradient = weight.parameter.grad
        if gradient is not None:
            aside = aside + gradient if torch.is_grad_enabled() else aside.add_(gradient)
        set_gradient(weight.parameter, aside)


class _Arriving:
    """The hook on a node."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        self.arrivals.arrive()


def _settled(parameter: Tensor) -> None:
    """Moves a gradient that has been added to the card."""
    on_its_device(parameter)


def is_watched(parameter: Tensor) -> bool:
    """Whether somebody else has hooks on a weight's gradient, and would be called for each use."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(map(_is_ours, after))


def _is_ours(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] == "memscale"
