# SPDX-License-Identifier: Apache-2.0
"""Calls of `_core.FingerprintTable` on the stand-in for a card, where it is built, for test_leaks.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from card_memory import COMPILER, DRIVER, IS_BUILT, Memory, OnCard
from memscale import _core

_Calls = Callable[[_core.FingerprintTable, _core.KeptFingerprint, OnCard], object]


@functools.cache
def _made() -> tuple[_core.Card, _core.FingerprintTable, _core.KeptFingerprint, OnCard, OnCard]:
    card, memory = _core.Card(0, str(COMPILER), str(DRIVER)), Memory()
    table = _core.FingerprintTable(card, 8)
    one, other = memory.put(torch.ones(64)), memory.put(torch.zeros(64), 4096)
    kept = table.keep(one, False, 0)
    assert kept is not None
    return card, table, kept, one, other


def _on_card(run: Callable[..., object]) -> Callable[[Path], object]:
    return lambda _: run(*_made()) if IS_BUILT else None


def _differs(card: Any, table: Any, kept: Any, one: Any, other: Any) -> None:
    kept.compare(other, 3, 0)
    assert table.read()[:2] == (1, 3)


def _no_card() -> None:
    wrong: Any = object()
    try:
        _core.FingerprintTable(wrong)
    except TypeError:
        return
    raise AssertionError("it was taken")


def _refused(card: Any, table: Any, kept: Any, one: Any, other: Any) -> None:
    for wrong in (lambda: table.keep(7, False, 0), lambda: kept.compare(torch.ones(3), 1, 0)):
        try:
            wrong()
        except (TypeError, ValueError):
            continue
        raise AssertionError("it was taken")


CARD_CALLS: dict[str, Callable[[Path], object]] = {
    "FingerprintTable": lambda _: _no_card(),  # the stand-in never forgets what was freed
    "FingerprintTable.device_bytes": _on_card(lambda card, table, *_: table.device_bytes),
    "FingerprintTable.keep": _on_card(lambda card, table, kept, one, _: table.keep(one, True, 0)),
    "FingerprintTable.read": _on_card(lambda card, table, *_: table.read()),
    "KeptFingerprint": _on_card(lambda card, table, kept, one, _: [table.keep(one, False, 0)] * 2),
    "KeptFingerprint.compare": _on_card(_differs),
    "KeptFingerprint.value": _on_card(lambda card, table, kept, *_: kept.value()),
}
"""By public name."""

CARD_ERRORS: dict[str, Callable[[Path], object]] = {"error: no tensor of a card": _on_card(_refused)}
