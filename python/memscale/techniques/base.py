# SPDX-License-Identifier: Apache-2.0
"""What every technique looks like to the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from memscale.techniques.forward_slot import StandIn


class Attachment(Protocol):
    """One reversible change to a model.

    The executor attaches in order and undoes in reverse. `attach` either succeeds or leaves the model as
    it was; `undo` never fails on something that was attached. After `undo`, `attach` may be called again.
    """

    name: str

    def attach(self) -> None:
        """Makes the change."""

    def undo(self) -> None:
        """Takes it back, bit for bit."""


class StepAttachment(Attachment, Protocol):
    """A change to how the step computes. It is there when the step is traced, so the trace sees what it does.

    Attributes:
        path: qualified name of the module that it changes, "" for the model.
        beneath: the executor's watch over the model's forward. What changes the model itself goes beneath,
            so that the executor goes on seeing the batches; None for every other module.
    """

    path: str
    beneath: StandIn | None

    @property
    def used(self) -> bool:
        """It has done its work since it was attached last; False: it stood aside, and the step is plain."""

    @property
    def reason(self) -> str:
        """Why it stood aside, "" if it did not."""
