# SPDX-License-Identifier: Apache-2.0
"""Techniques keep nothing: tensor bytes, from the profiler's events, and Python objects over many steps."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from amounts import also
from matrix.techniques import COLUMNS, TECHNIQUES, Columns, column_name
from memscale import AsyncOffloadConfig, Config
from memscale.offload.engine import Offload, why_not
from memscale.torchkit import step_hooks
from technique_leaks import (
    FEW,
    MANY,
    OBJECTS,
    grown_in,
    growth,
    growth_in_cycles,
    net_bytes,
    objects,
)
from zoo.blocks import Stack, inputs
from zoo.training import SMALLEST

FEW_PLANS, PLANS = 6, 16
"""Plans that are made; fewer than steps, which take less time."""


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are kept until a test has ended, in case that it fails."""
    monkeypatch.setattr(logging.getLogger("memscale"), "disabled", True)


SEARCHED = tuple(columns for columns in COLUMNS if column_name(columns) in ("mlp_tile", "attention_tile"))
"""What is searched for at each attachment, which takes seconds."""

ALONE = tuple(columns for columns in COLUMNS if len(columns) == 1 and columns not in SEARCHED)

RUNNING_TWICE = tuple(item for item in TECHNIQUES if item.twice and item.name != "boundary")
"""The models of these tests have three blocks to share."""


@pytest.mark.long
@pytest.mark.parametrize("columns", [columns for columns in COLUMNS if len(columns) == 1], ids=column_name)
def test_a_technique_keeps_nothing(columns: Columns) -> None:
    """Among the steps are some that fail, and some with two backwards."""
    grown, more = growth(columns)
    assert grown == 0, f"{grown} bytes in {MANY - FEW} steps"
    assert more < OBJECTS, f"{more} Python objects in {MANY - FEW} steps"


def test_techniques_together_keep_nothing() -> None:
    grown, more = growth(RUNNING_TWICE)
    assert grown == 0 and more < OBJECTS


@pytest.mark.long
@pytest.mark.parametrize("columns", [*ALONE, *also(*SEARCHED)], ids=column_name)
def test_attaching_and_detaching_keeps_nothing(columns: Columns) -> None:
    grown, more = growth_in_cycles(columns)
    assert grown == 0 and more < OBJECTS


def test_wrap_and_detach_keep_nothing() -> None:
    """With all that planning does, and a first batch that is waited for."""
    model = Stack().train()

    def cycle(number: int) -> None:
        memscale.wrap(model, SMALLEST)
        model(*inputs(number)).square().mean().backward()
        memscale.detach(model)
        model.zero_grad()

    grown, more = grown_in(cycle, PLANS, FEW_PLANS)
    assert grown == 0 and more < OBJECTS


@pytest.mark.long
@pytest.mark.skipif(why_not(torch.device("cpu")) != "", reason="no offload here")
def test_plans_that_release_gradients_keep_nothing(tmp_path: Path) -> None:
    """The traces' parameters go with them."""
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 600)
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = Config(memory_budget=1, async_config=engine, enable_logging=False)

    def plan(number: int) -> None:
        made = memscale.plan(model, config=config, sample_input=x, optimizer=optimizer)
        assert "gradient_offload" in {step.technique for step in made.steps}

    grown, more = grown_in(plan, PLANS, FEW_PLANS)
    assert grown == 0 and more < OBJECTS


@pytest.mark.parametrize("eight_bit", [False, True])
def test_steps_in_backward_keep_nothing(eight_bit: bool) -> None:
    """Among them steps that fail, in the place of ordinary ones and of those beside backward."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(12)])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 24)
    config = Config(step_in_backward=True, use_8bit_optimizer=eight_bit, enable_logging=False)
    memscale.wrap(model, config, x, optimizer=optimizer)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = -1.0 if number % 4 == 3 and eight_bit else 1e-3
        (group,) = optimizer.param_groups
        betas, group["betas"] = group["betas"], None if number % 4 == 3 and not eight_bit else group["betas"]
        try:
            model(x).square().mean().backward()
        except (ValueError, TypeError):
            group["betas"] = betas
            with pytest.raises(RuntimeError, match="broken off"):
                optimizer.step()
        else:
            assert number % 4 < 3
            optimizer.step()
        optimizer.zero_grad()

    grown, more = grown_in(step)
    assert grown == 0 and more < OBJECTS
    threads = threading.active_count()
    memscale.detach(model)
    assert threading.active_count() == threads - eight_bit


def test_steps_in_backward_attached_and_detached() -> None:
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 24)
    config = Config(step_in_backward=True, enable_logging=False)

    def cycle(number: int) -> None:
        memscale.wrap(model, config, x, optimizer=optimizer)
        model(x).square().mean().backward()
        if number % 2:
            optimizer.step()
        memscale.detach(model)
        optimizer.state.clear()  # PyTorch keeps what fake operators return by their numbers, such as a step's

    grown, more = grown_in(cycle, PLANS, FEW_PLANS)
    assert grown == 0 and more < OBJECTS


@pytest.mark.skipif(why_not(torch.device("cpu")) != "", reason="no offload here")
def test_a_model_that_goes_with_its_techniques_leaves_no_engine(tmp_path: Path) -> None:
    """Its optimizer and its hooks on all optimizers go with it."""
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = Config(memory_budget=1, async_config=engine, enable_logging=False)

    def train() -> None:
        model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)])
        optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 600)
        memscale.wrap(model, config, x, optimizer=optimizer)
        plan = memscale.executor_of(model).plan
        assert names == {step.technique for step in plan.steps}
        model(x).square().mean().backward()
        optimizer.step()

    def left() -> tuple[int, int, int]:
        gc.collect()
        engines = sum(type(item) is Offload for item in gc.get_objects())
        hooks = sys.modules["torch.optim.optimizer"]
        told = sum(not hook.is_over for hook in (*step_hooks._before, *step_hooks._after))
        pytorchs = len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks)
        return engines, told, pytorchs

    names = {"state_offload", "gradient_offload", "weight_offload"}
    before = left()
    for _ in range(2):
        train()
    assert left() == before


def test_the_instruments_see_a_leaking_technique() -> None:
    kept: list[object] = []
    assert net_bytes(lambda: kept.append(torch.ones(1000))) >= 4000
    before = objects()
    kept += [[] for _ in range(1000)]
    assert objects() - before >= 1000


def test_the_instruments_forget_what_an_earlier_measurement_saw() -> None:
    """Addresses that the profiler once saw begin, and not end, come back as the memory of another test."""
    seen: list[torch.Tensor] = []
    net_bytes(lambda: seen.extend(torch.ones(513) for _ in range(50)))
    seen.clear()
    unseen = [torch.ones(513) for _ in range(100)]
    assert net_bytes(lambda: (unseen.clear(), torch.ones(1))) == 0
