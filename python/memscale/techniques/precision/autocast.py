# SPDX-License-Identifier: Apache-2.0
"""A model's forward under autocast: the stand-in, and its attachment. For what: see `mixed_precision`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale.techniques.checkpoint.call_kinds import runs_plain
from memscale.techniques.precision import loss_scale_backward, loss_scale_step
from memscale.techniques.precision.loss_scale import LossScale
from memscale.techniques.precision.loss_scale_outputs import in_fp32
from memscale.torchkit.forward_slot import ForwardSlot, StandIn


class Outcome:
    """What became of an attachment in the steps since it was attached.

    Attributes:
        used: a forward ran under its autocast.
        reason: why the latest forward did not; "" if it did.
    """

    __slots__ = ("reason", "used")

    def __init__(self) -> None:
        self.used = False
        self.reason = ""


class AutocastForward(StandIn):
    """Stands in for the model's forward, and runs it under autocast.

    Attributes:
        kind: device kind, "cuda" or "cpu".
        dtype: what autocast computes in.
        outcome: shared with the attachment.
        scale: of the loss, for FP16; None in BF16, and in a copy of a model that runs in FP16.
    """

    calls_through = True  # what it returns in FP16 are copies

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        kind: str,
        dtype: torch.dtype,
        outcome: Outcome,
        scale: LossScale | None = None,
    ) -> None:
        super().__init__(module, original)
        self.kind = kind
        self.dtype = dtype
        self.outcome = outcome
        self.scale = scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward under autocast, or as it is where autocast is on or nothing is saved."""
        if torch.compiler.is_compiling():  # the compiler knows autocast, and nothing of what follows
            if self.passive or not torch.is_grad_enabled() or self._stands_aside():
                return self.run_original(*args, **kwargs)
            with torch.autocast(self.kind, dtype=self.dtype):
                output = self.run_original(*args, **kwargs)
            return output if self.scale is None else in_fp32(output)
        if self.passive or runs_plain() or self._stands_aside():
            return self.original(*args, **kwargs)
        self.outcome.used, self.outcome.reason = True, ""
        if self.scale is None:
            with torch.autocast(self.kind, dtype=self.dtype):
                return self.original(*args, **kwargs)
        loss_scale_backward.install()
        with torch.autocast(self.kind, dtype=self.dtype):
            output = self.original(*args, **kwargs)
        return in_fp32(output)

    def _stands_aside(self) -> bool:
        """Whether this forward is not the one to change; `outcome` says why."""
        on = torch.is_autocast_enabled(self.kind)
        if self.scale is not None:
            self.scale.armed = not on
        if on:
            self.outcome.reason = "the training loop opens autocast itself, and keeps its own"
        return on


class AutocastAttachment:
    """Autocast around a model's forward, as planner and executor attach it.

    Args:
        model: the model.
        kind: device kind, "cuda" or "cpu".
        dtype: what autocast computes in.
        beneath: the executor's watch over the model's forward, to stay on top; None for the front.
        scale: of the loss, for FP16.
    """

    name = "autocast"
    path = ""

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        dtype: torch.dtype,
        beneath: StandIn | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # the model owns the executor, which owns the attachment
        self.kind = kind
        self.dtype = dtype
        self._beneath: weakref.ref[StandIn] | None = None
        self.beneath = beneath
        self.scale = scale
        self._slot: ForwardSlot | None = None
        self._outcome = Outcome()

    @property
    def beneath(self) -> StandIn | None:
        """The executor's watch, while there is one."""
        return None if self._beneath is None else self._beneath()

    @beneath.setter
    def beneath(self, stand_in: StandIn | None) -> None:
        self._beneath = None if stand_in is None else weakref.ref(stand_in)

    @property
    def what(self) -> str:
        """What it does, for people."""
        if self.dtype is torch.float16:
            return "mixed precision: the forward runs under FP16 autocast with loss scaling"
        return "mixed precision: the forward runs under BF16 autocast"

    @property
    def used(self) -> bool:
        """Whether a forward has run under its autocast since it was attached."""
        return self._outcome.used

    @used.setter
    def used(self, used: bool) -> None:
        self._outcome.used = used

    @property
    def reason(self) -> str:
        """Why it stood aside in the latest forward, "" if it did not."""
        return self._outcome.reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._outcome.reason = reason

    def attach(self) -> None:
        """Replaces the model's forward.

        Raises:
            AttachError: the model does not let its forward be replaced.
        """
        model = self._model()
        assert model is not None
        slot = ForwardSlot(model, self.path, self.beneath)
        outcome = Outcome()
        slot.put(AutocastForward(model, slot.present, self.kind, self.dtype, outcome, self.scale))
        self._slot, self._outcome = slot, outcome
        if self.scale is not None:
            self.scale.open(_uninstall)
            loss_scale_backward.install()
            loss_scale_step.install()

    def undo(self) -> None:
        """Restores the model's forward. What became of the attachment can still be asked."""
        slot, self._slot = self._slot, None
        assert slot is not None
        slot.remove()
        if self.scale is not None:
            self.scale.close()
            _uninstall()


def _uninstall() -> None:
    """What PyTorch is given for loss scales goes, where none is in force any more."""
    loss_scale_backward.uninstall()
    loss_scale_step.uninstall()
