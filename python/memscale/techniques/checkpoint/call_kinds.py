# SPDX-License-Identifier: Apache-2.0
"""What kind of call a forward runs in: a recompute, one without gradients, one that somebody transforms."""

from __future__ import annotations

import math
import threading

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from memscale.techniques.checkpoint.saving_hooks import under_foreign_hooks
from memscale.torchkit.forward_slot import StandIn, serial_numbers


class _Recomputing(threading.local):
    """The one in progress in this thread.

    Attributes:
        first: when its first run began, in the order of `serial_numbers`; infinity: none is in progress.
        number: of this one among all.
    """

    first: float = math.inf
    number = 0

    def of(self, first: float) -> _Turn:
        """A recompute for the time of a block."""
        return _Turn(self, first)


class _Turn:
    """One recompute. A class, since a generator would take several times as long."""

    __slots__ = ("_before", "_first", "_of")

    def __init__(self, of: _Recomputing, first: float) -> None:
        self._of, self._first = of, first

    def __enter__(self) -> None:
        of = self._of
        self._before = of.first, of.number
        of.first, of.number = self._first, next(serial_numbers)

    def __exit__(self, *_: object) -> None:
        self._of.first, self._of.number = self._before


recomputing = _Recomputing()


def came_later(stand_in: StandIn) -> bool:
    """Whether a recompute is in progress, and the stand-in was not there in the first.

    Another plan put it there while graphs waited for their backward. It must not change what is saved.
    """
    return stand_in.serial > recomputing.first


def recompute_in_progress() -> tuple[float, int]:
    """When the forward that this thread recomputes had begun, and a number of this recompute alone.

    The first is infinity where none is in progress; the numbers are those of `serial_numbers`.
    """
    return recomputing.first, recomputing.number


def runs_plain() -> bool:
    """Whether a forward saves nothing, or is transformed by functorch, which brings its own saves.

    Or is written down by `torch.jit.trace`, `torch.fx.symbolic_trace` or an exporter to ONNX, which see no
    values behind placeholders; or runs with derivatives in forward direction, which backward, where the
    recompute runs, need not have.
    """
    return not torch.is_grad_enabled() or _is_transformed()


def evaluates() -> bool:
    """Whether a forward runs without gradients, and computes what it returns."""
    return not (torch.is_grad_enabled() or _is_transformed())


def _is_transformed() -> bool:
    """Whether a forward is none that is differentiated by autograd in reverse alone, see `runs_plain`."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
    )


def stands_aside() -> bool:
    """Whether what decides what is saved leaves a forward as it is: it `runs_plain`, or others have hooks."""
    return runs_plain() or under_foreign_hooks()
