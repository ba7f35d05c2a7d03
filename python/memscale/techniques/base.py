# SPDX-License-Identifier: Apache-2.0
"""What every technique looks like to the executor."""

from __future__ import annotations

from typing import Protocol


class Attachment(Protocol):
    """One reversible change to a model.

    The executor attaches in order and undoes in reverse. `attach` either succeeds or leaves the model as
    it was; `undo` never fails on something that was attached, and may be called once only.
    """

    name: str

    def attach(self) -> None:
        """Makes the change."""

    def undo(self) -> None:
        """Takes it back, bit for bit."""
