# SPDX-License-Identifier: Apache-2.0
"""What optimizers find: on a card, weights that are trained and lie at home on the host.

    state away            the optimizer steps them in pieces, and brings each itself (`optim/away_weights`)
    any other step        has them on the card as a whole until it is over: those of its groups, or those that
                          it borrows one by one

What was borrowed goes home with the end of a step of the optimizer that it belongs to, whichever thread that
is in. So a step of another optimizer sends nothing home that is being stepped; what a step has borrowed that
failed goes with the next one that does not; and what a device's thread steps in backward, with `step()`.

Afterwards the pages of files go that a step has touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.optim.step_hooks import after_steps, before_steps
from memscale.weights.places import apart

if TYPE_CHECKING:
    from memscale.weights.stream import Stream
    from memscale.weights.unit import Unit, Weight


class Steps:
    """Hears of the steps of all optimizers.

    Args:
        stream: whose weights they may step.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = weakref.ref(stream)
        self._borrowed: dict[int, tuple[Weight, Tensor]] = {}  # by id of the parameter
        self._hooks = [before_steps(self, Steps._begin), after_steps(self, Steps._end)]

    def close(self) -> None:
        """Hears no more. What is borrowed goes home."""
        for hook in self._hooks:
            hook.remove()
        self._return(list(self._borrowed))

    def borrow(self, unit: Unit, weight: Weight) -> None:
        """Has a weight on the card as a whole, until a step of its optimizer is over.

        Raises:
            torch.OutOfMemoryError: the card has no room for it.
        """
        unit.blocks.end(unit)
        parameter, lent = weight.parameter, unit.blocks.own(unit, weight)
        self._borrowed[id(parameter)] = weight, lent  # first: who interrupts this finds it
        parameter.data = lent

    def _begin(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        stream = self._stream()
        if stream is None or not stream.blocks.is_apart:
            return
        if not hasattr(type(optimizer), "_memscale_away_base"):  # which borrows what it cannot take apart
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        borrow(parameter)

    def _end(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._borrowed:
            self._return(id(value) for group in optimizer.param_groups for value in group["params"])
        stream = self._stream()
        if stream is not None:
            stream.let_pages_go()

    def _return(self, borrowed: Iterable[int]) -> None:
        """Sends home what is borrowed of these parameters, unless they have been given other data since."""
        for key in borrowed:
            weight, lent = self._borrowed.get(key, (None, None))
            if weight is None or lent is None:
                continue
            parameter = weight.parameter
            if weight.is_streamed and parameter.data_ptr() == lent.data_ptr() and weight.has_form():
                with torch.no_grad():
                    weight.home.copy_(lent)
                parameter.data = weight.home
            self._borrowed.pop(key, None)


def borrow(parameter: Tensor) -> None:
    """Has a weight of a card that is at home there, until a step is over. Any other tensor stays as it is.

    Raises:
        torch.OutOfMemoryError: the card has no room for it.
    """
    found = apart(parameter)
    if found is not None:
        stream, unit, weight = found
        stream.steps.borrow(unit, weight)
