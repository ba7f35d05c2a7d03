# SPDX-License-Identifier: Apache-2.0
"""Brings trained, offloaded weights to the card for an optimizer's step.

    state offloaded       the optimizer steps them in pieces, and brings each itself (`optim/offload/weights`)
    any other step        has them on the card as a whole until it is over: those of its groups, or those that
                          it borrows one by one

A borrowed weight returns to its backing store when a step of its own optimizer ends, in whichever thread. So
a step of another optimizer returns nothing that is still being stepped. What a failed step has borrowed
returns with the next one that succeeds; what a device's thread steps in backward, with `step()`.

Afterwards the process drops the pages of files that a step has touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from memscale.torchkit.step_hooks import after_steps, before_steps
from memscale.weights.unit import Blocks, Unit, Weight


class _Stream(Protocol):
    """Whose weights are stepped."""

    blocks: Blocks

    def borrow(self, parameter: Tensor) -> None: ...

    def let_pages_go(self) -> None: ...


class Steps:
    """Watches the steps of all optimizers.

    Args:
        stream: whose weights they may step.
    """

    def __init__(self, stream: _Stream) -> None:
        self._stream = weakref.ref(stream)
        self._borrowed: dict[int, tuple[Weight, Tensor]] = {}  # by id of the parameter
        self._hooks = [before_steps(self, Steps._begin), after_steps(self, Steps._end)]

    def close(self) -> None:
        """Stops watching, and returns borrowed weights to their stores."""
        for hook in self._hooks:
            hook.remove()
        self._return(list(self._borrowed))

    def borrow(self, unit: Unit, weight: Weight) -> None:
        """Brings a whole weight to the card until a step of its optimizer is over.

        Raises:
            torch.OutOfMemoryError: the card has no room for it.
        """
        unit.blocks.end(unit)
        parameter, copy = weight.parameter, unit.blocks.own(unit, weight)
        self._borrowed[id(parameter)] = weight, copy  # first, so that Ctrl-C loses nothing
        parameter.data = copy

    def _begin(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        stream = self._stream()
        if stream is None or not stream.blocks.is_apart:
            return
        if not hasattr(type(optimizer), "_memscale_offload_base"):  # which borrows what it cannot take apart
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        stream.borrow(parameter)

    def _end(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._borrowed:
            self._return(id(value) for group in optimizer.param_groups for value in group["params"])
        stream = self._stream()
        if stream is not None:
            stream.let_pages_go()

    def _return(self, borrowed: Iterable[int]) -> None:
        """Writes borrowed parameters back to their stores, unless the caller has given them other data."""
        for key in borrowed:
            weight, copy = self._borrowed.get(key, (None, None))
            if weight is None or copy is None:
                continue
            parameter = weight.parameter
            if weight.is_streamed and parameter.data_ptr() == copy.data_ptr() and weight.has_form():
                with torch.no_grad():
                    weight.backing.copy_(copy)
                parameter.data = weight.backing
            self._borrowed.pop(key, None)
