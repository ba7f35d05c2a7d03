# SPDX-License-Identifier: Apache-2.0
"""Tokens of saved tensors in a traced step: what autograd holds while it needs a save."""

from __future__ import annotations

from typing import Any


class Slot:
    """Life of one save: ends when autograd has dropped it and every tensor made from it is gone."""

    __slots__ = ("buffer", "holders", "recorder", "save")

    def __init__(self, recorder: Any, buffer: int, save: int) -> None:
        self.recorder = recorder
        self.buffer = buffer
        self.save = save
        self.holders = 1

    def drop(self) -> None:
        """One holder less."""
        self.holders -= 1
        if self.holders == 0:
            self.recorder.released(self.save)
