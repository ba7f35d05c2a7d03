# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a file, chosen by a plan: within the budget, and every bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from engine_samples import peak_bytes
from memscale import AsyncOffloadConfig, Config
from memscale.offload.engine import Offload, OffloadSettings, why_not
from memscale.optim.offload.attach import is_offloaded, offloaded_bytes, send, take_back
from patched import use_disk_of, use_disk_with, use_only

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

NAME = "state_offload"
WIDTH, DEPTH = 512, 10
WIDE = 2100  # two layers are more than a piece

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "lists": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def on_a_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    use_disk_of(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other techniques could meet the budgets, too."""
    use_only(monkeypatch, NAME)


X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def model_of(depth: int = DEPTH) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), *layers)


def config(folder: Path, budget: int, **more: Any) -> Config:
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(folder))
    return Config(memory_budget=budget, enable_logging=False, async_config=engine, **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    found = []
    for number in range(steps):
        loss = model(X + number).square().mean()
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_budget_holds_and_every_bit_stays(name: str, tmp_path: Path) -> None:
    kept: list[Any] = []

    def run(budget: int | None) -> None:
        model = model_of()
        optimizer = OPTIMIZERS[name](model.parameters())
        if budget is not None:
            memscale.wrap(model, config(tmp_path, budget), sample_input=X, optimizer=optimizer)
        kept.append((train(model, optimizer), model, optimizer))

    plain_peak = peak_bytes(partial(run, None))
    budget = plain_peak * (90 if name == "SGD" else 75) // 100
    peak = peak_bytes(partial(run, budget))
    (plain, expected, standard), (found, model, optimizer) = kept
    plans = memscale.executor_of(model).plans
    assert all(plan.fits and NAME in [choice.technique for choice in plan.steps] for plan in plans)
    predicted = max(plan.predicted.device_used_peak_bytes for plan in plans)
    assert 0.98 * predicted <= peak <= predicted <= budget
    amounts = plans[-1].steps[0].amounts
    assert offloaded_bytes(optimizer) == sum(amount.leaving_bytes for amount in amounts) > 0
    memscale.detach(model)
    assert type(optimizer) is type(standard)
    assert all(map(torch.equal, plain + train(expected, standard), found + train(model, optimizer)))
    assert all(map(torch.equal, expected.parameters(), model.parameters()))


def test_all_that_is_offloaded_together(tmp_path: Path) -> None:
    """State, gradients and activations; and our own state."""
    engines = 2 << 20  # what two of them take
    for share, more in ((2.6, {}), (1.5, {"use_8bit_optimizer": True})):
        model, other = model_of(), model_of()
        optimizer, standard = (OPTIMIZERS["fused"](item.parameters()) for item in (model, other))
        weights = sum(value.nbytes for value in model.parameters())
        plain = config(tmp_path, 16 * weights, **more)
        memscale.wrap(other, plain, sample_input=X, optimizer=standard)
        budget = int(share * weights) + engines
        memscale.wrap(model, config(tmp_path, budget, **more), sample_input=X, optimizer=optimizer)
        found, expected = train(model, optimizer), train(other, standard)
        plan = memscale.executor_of(model).plan
        assert plan is not None and {"gradient_offload", NAME} <= {choice.technique for choice in plan.steps}
        assert is_offloaded(optimizer) and not is_offloaded(standard)
        assert all(map(torch.equal, expected, found))
        memscale.detach(model)
        memscale.detach(other)
        assert type(optimizer) is type(standard) is torch.optim.AdamW
        assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_why_not(tmp_path: Path) -> None:
    settings = config(tmp_path, 1000)
    model = model_of()

    def notes(item: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
        return "\n".join(memscale.plan(item, config=settings, sample_input=X, optimizer=optimizer).notes)

    assert f"{NAME}: the optimizer is not known" in notes(model, None)
    assert "takes is not known" in notes(model, torch.optim.RMSprop(model.parameters()))
    small = nn.Linear(WIDTH, 2)
    assert "no parameter has 65536 bytes or more" in notes(small, torch.optim.AdamW(small.parameters()))


def test_room_that_the_state_has_already_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free is what the optimizer's own file has left."""
    model = model_of(depth=7)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, optimizer, 1)
    weights = sum(value.nbytes for value in model.parameters())

    def notes() -> str:
        settings = config(tmp_path, 1000)
        return "\n".join(memscale.plan(model, config=settings, sample_input=X, optimizer=optimizer).notes)

    assert 2 * weights < 1 << 25 < 3 * weights
    use_disk_with(monkeypatch, 1 << 25)
    assert f"{NAME}: the file may take" in notes()
    settings = OffloadSettings(torch.device("cpu"), file_bytes=64 << 20, directory=str(tmp_path))
    assert send(optimizer, Offload(settings)) == ""
    assert offloaded_bytes(optimizer) > 0.9 * weights
    assert "the file may take" not in notes()
    take_back(optimizer)
