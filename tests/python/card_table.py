# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `_core.FingerprintTable`: what it knows it tells when it is read, as a card does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from memscale import _core
from memscale.optim import cards
from memscale.techniques.checkpoint import card_check, recompute_check

STREAM = 7
_of_host = _core.fingerprint


class Kept:
    """Stands in for `_core.KeptFingerprint`."""

    def __init__(self, table: Table, value: int, sampled: bool) -> None:
        self.table, self.value, self.sampled = table, value, sampled
        table.alive += 1

    def __del__(self) -> None:
        self.table.alive -= 1

    def compare(self, tensor: Tensor, tag: int, stream: int) -> None:
        self.table.submitted.append((tag, self.value, _of_host(tensor, self.sampled)))


class Table:
    """Stands in for `_core.FingerprintTable`."""

    def __init__(self, slots: int = 1 << 16) -> None:
        self.slots, self.alive, self.reads = slots, 0, 0
        self.submitted: list[tuple[int, int, int]] = []

    def keep(self, tensor: Tensor, sampled: bool, stream: int) -> Kept | None:
        assert stream == STREAM
        value = _of_host(tensor, sampled)
        return Kept(self, value, sampled) if self.alive < self.slots else None

    def read(self) -> tuple[int, int, int, int] | None:
        self.reads += 1
        wrong = [each for each in self.submitted if each[1] != each[2]]
        self.submitted = []
        return (len(wrong), *wrong[0]) if wrong else None


@contextmanager
def card_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """Has tensors of the CPU compared as those of a card are."""
    made = Table()
    monkeypatch.setattr(recompute_check, "_fingerprint", card_check.keep)
    monkeypatch.setattr(cards, "fingerprint_table", lambda device, slots: made)
    monkeypatch.setattr(cards, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(card_check, "_tables", {})
    monkeypatch.setattr(card_check, "_warned", set())
    yield made
    assert not card_check._passes
