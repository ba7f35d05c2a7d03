# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at any moment of a loop that saves: what `memscale.save` has returned for is there, and is whole.

A few moments on every change; more with MEMSCALE_SOAK_KILLS=1000.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import memscale

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

COUNT = int(os.environ.get("MEMSCALE_SOAK_KILLS", "10"))
MOST = 50 * COUNT
ELEMENTS = 200_000


def save_for_ever(path: Path, begin: int, told: int) -> None:
    """Saves number after number, and tells each that is saved."""
    number = begin
    while True:
        memscale.save({"number": number, "value": torch.full((ELEMENTS,), float(number))}, path)
        os.write(told, number.to_bytes(8, "little"))
        number += 1


def number_in(path: Path) -> int:
    saved = torch.load(path, weights_only=True)
    assert torch.equal(saved["value"], torch.full((ELEMENTS,), float(saved["number"])))
    return int(saved["number"])


def test_at_any_moment(tmp_path: Path) -> None:
    draw, path, begin, in_a_save = random.Random(3), tmp_path / "run.pt", 0, 0
    for kill in range(MOST):
        if kill >= COUNT and in_a_save:  # how often one falls into a save is the disk's choice
            break
        tells, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, begin, told)
            finally:
                os._exit(1)
        os.close(told)
        first = os.read(tells, 8)  # it is at it
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        rest = b""
        while part := os.read(tells, 1 << 16):
            rest += part
        os.close(tells)
        last = int.from_bytes((first + rest)[-8:], "little")
        found = number_in(path)
        assert found in (last, last + 1)
        left = [name for name in os.listdir(tmp_path) if name != path.name]
        assert len(left) <= 1
        in_a_save += len(left)
        begin = found + 1
    assert in_a_save > 0
    memscale.save({}, path)
    assert os.listdir(tmp_path) == [path.name]
