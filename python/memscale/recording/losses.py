# SPDX-License-Identifier: Apache-2.0
"""The loss that a model returns, read without waiting for a card.

forward ──► on the CPU: the number
└─► on a card: a copy to pinned memory, and an event behind it ──► the number, once the event has passed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Losses", "loss_in"]

_MOST_WAITING: Final = 64


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returns: the output, its "loss", or the first of a tuple; None: not there."""
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor) or not found.is_floating_point() or not found.requires_grad:
        return None
    is_plain = type(found) is Tensor and found.layout is torch.strided and found.dim() == 0
    return found if is_plain else None


class Losses:
    """Losses of the steps of one model. That of a step is the mean over its forwards."""

    def __init__(self) -> None:
        self._open: list[float | _OnItsWay] = []
        self._steps: deque[tuple[int, list[float | _OnItsWay]]] = deque(maxlen=_MOST_WAITING)

    def add(self, output: Any) -> None:
        """A forward has returned this."""
        loss = loss_in(output)
        if loss is None or len(self._open) >= _MOST_WAITING:
            return
        if loss.device.type == "cpu":
            self._open.append(float(loss.detach()))
        elif loss.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._open.append(_OnItsWay(loss.detach()))

    def end_step(self, step: int) -> None:
        """The step that these forwards belong to is over."""
        found, self._open = self._open, []
        if found:
            self._steps.append((step, found))

    def ready(self) -> list[tuple[int, float]]:
        """Steps whose losses are here, with their means, oldest first. Waits for none."""
        here: list[tuple[int, float]] = []
        while self._steps:
            step, losses = self._steps[0]
            values = [item.value() if isinstance(item, _OnItsWay) else item for item in losses]
            numbers = [value for value in values if value is not None]
            if len(numbers) < len(values):
                break
            self._steps.popleft()
            here.append((step, sum(numbers) / len(numbers)))
        return here


class _OnItsWay:
    """A number that comes from a card."""

    def __init__(self, loss: Tensor) -> None:
        self._host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        with torch.cuda.device(loss.device):
            self._host.copy_(loss, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float | None:
        """The number; None: it is not here yet."""
        return float(self._host) if self._event.query() else None
