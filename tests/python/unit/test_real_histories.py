# SPDX-License-Identifier: Apache-2.0
"""Histories of PyTorch's allocator on a card, played into the simulator: reserved bytes are equal throughout.

`h100_histories.json.gz` has what `torch.cuda.memory._record_memory_history` recorded of two or three training
steps each: bytes that were allocated, `-1 - index` for the release of an earlier one, and the reserved bytes
from an event on, wherever they changed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memscale import _core

_FILE = Path(__file__).with_name("h100_histories.json.gz")
HISTORIES: dict[str, Any] = json.loads(gzip.decompress(_FILE.read_bytes()))["histories"]


@pytest.mark.parametrize("name", HISTORIES)
def test_reserved_bytes_after_every_event(name: str) -> None:
    history = HISTORIES[name]
    simulator, index, expected = _core.Simulator("cuda"), 0, 0
    changes = dict(history["reserved"])
    for at, event in enumerate(history["events"]):
        expected = changes.get(at, expected)
        if event >= 0:
            simulator.alloc(index, event)
            index += 1
        else:
            simulator.free(-1 - event)
        assert simulator.stats()["reserved_bytes.all.current"] == expected, f"event {at}"
    assert index > 300 and expected > 1 << 30
