# SPDX-License-Identifier: Apache-2.0
"""Seeded runs with copies that are delayed, cut in two, reordered and throttled: the bits of plain PyTorch.

A handful on every change. All of them with MEMSCALE_SOAK_SEEDS=1000, in some minutes; or from another seed on
with MEMSCALE_SOAK_FIRST_SEED.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from matrix.cells import FAILED, REFUSED
from memscale.offload.engine import why_not
from soak.seeds import Drawn, carried_out, drawn, in_order

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

FIRST = int(os.environ.get("MEMSCALE_SOAK_FIRST_SEED", "0"))
COUNT = int(os.environ.get("MEMSCALE_SOAK_SEEDS", "4"))


@pytest.mark.parametrize("run", in_order(map(drawn, range(FIRST, FIRST + COUNT))), ids=lambda run: run.name)
def test_the_bits_of_plain_pytorch(run: Drawn, tmp_path: Path) -> None:
    made = carried_out(run, tmp_path)
    assert made.status != FAILED, f"{run.name}: {made.note}"
    assert made.status == REFUSED or run.shares_blocks or run.moved > 0, f"{run.name}: nothing left"
