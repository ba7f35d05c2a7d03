# SPDX-License-Identifier: Apache-2.0
"""Switches of the configuration that no other test turns: each does what it says, and nothing without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from memscale import AsyncOffloadConfig, Config
from memscale.hardware.detect import detect
from memscale.offload.limits import Link, link_for

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chooses(nn.Module):
    """Its way depends on a computed value, so that it is profiled by real steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            tallies.add("runs")
        return self.layer(x).tanh()


def forwards(steps: int) -> int:
    """How often a model runs while it is planned."""
    tallies.clear()
    config = Config(warmup_steps=steps, enable_logging=False)
    plan = memscale.plan(Chooses(), config=config, sample_input=torch.ones(2, 8))
    assert plan.profile == "empirical"
    return tallies.of("runs")


def test_warmup_steps_are_run_by_the_empirical_profile() -> None:
    once = forwards(1)
    assert once >= 1
    assert forwards(4) == once + 3


@pytest.mark.parametrize("forced", [False, True])
def test_force_optimize_saves_memory_that_nobody_needs(forced: bool) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    config = Config(memory_budget="4GiB", force_optimize=forced, enable_logging=False)
    plan = memscale.plan(model, config=config, sample_input=torch.ones(32, 16))
    assert plan.fits
    assert bool(plan.active) is forced
    saved = plan.plain.allocated_peak_bytes - plan.predicted.allocated_peak_bytes
    assert (saved > 0) is forced


@pytest.mark.parametrize("wanted", [True, False])
def test_nothing_leaves_where_offloading_is_off(wanted: bool, tmp_path: Path) -> None:
    asked = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = Config(mode="balanced" if wanted else "conservative", async_config=asked)  # type: ignore[arg-type]
    found = link_for(config.effective(), detect(CPU), CPU, 1 << 30)
    assert isinstance(found, Link) is wanted
    assert wanted or found == ""
