# SPDX-License-Identifier: Apache-2.0
"""Streamed weights, chosen by a plan: last, no more than the budget demands, within it, and every bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from engine_samples import peak_bytes
from memscale import AsyncOffloadConfig, Config
from memscale.optim.offload.attach import is_offloaded
from memscale.weights.saves import can_save
from memscale.weights.stream import stream_of
from patched import use_disk_of, use_only

pytestmark = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")

NAME = "weight_offload"
WIDTH, DEPTH = 512, 7

X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@pytest.fixture(autouse=True)
def on_a_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    use_disk_of(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other techniques could meet the budgets, too."""
    use_only(monkeypatch, NAME)


def model_of() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH), *layers)


def config(folder: Path, budget: int, **more: Any) -> Config:
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(folder))
    return Config(memory_budget=budget, enable_logging=False, async_config=engine, **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, parts: int = 1) -> list[Tensor]:
    found = []
    for number in range(steps):
        for part in range(parts):
            loss = model(X + number + part).square().mean()
            loss.backward()
            found.append(loss.detach())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return found


def streamed_paths(model: nn.Module) -> list[str]:
    stream = stream_of(model)
    return [] if stream is None else list(stream.units)


@pytest.mark.usefixtures("alone")
def test_the_budget_holds_and_every_bit_stays(tmp_path: Path) -> None:
    kept: list[Any] = []

    def run(budget: int | None) -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget is not None:
            memscale.wrap(model, config(tmp_path, budget), sample_input=X, optimizer=optimizer)
        kept.append((train(model, optimizer), model))

    plain_peak = peak_bytes(partial(run, None))
    counts = []
    for share in (92, 76):
        budget = plain_peak * share // 100
        peak = peak_bytes(partial(run, budget))
        (plain, expected), (found, model) = kept[0], kept[-1]
        plans = memscale.executor_of(model).plans
        assert all(plan.fits and [choice.technique for choice in plan.steps] == [NAME] for plan in plans)
        predicted = max(plan.predicted.device_used_peak_bytes for plan in plans)
        assert 0.98 * predicted <= peak <= predicted <= budget
        counts.append(len(streamed_paths(model)))
        memscale.detach(model)
        assert not streamed_paths(model)
        assert all(map(torch.equal, plain, found))
        assert all(map(torch.equal, expected.parameters(), model.parameters()))
    assert 0 < counts[0] < counts[1] <= DEPTH + 2


@pytest.mark.parametrize("share", [3.0, 1.75])
def test_it_is_the_last_one(share: float, tmp_path: Path) -> None:
    """Where optimizer state in a file is enough, weights stay; where nothing else is, all go together."""
    streams = share < 2
    kept: list[Any] = []
    other = model_of()
    expected = train(other, torch.optim.AdamW(other.parameters(), fused=True), parts=2)
    weights = sum(value.nbytes for value in other.parameters())

    def run() -> None:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        settings = config(tmp_path, int(share * weights), enable_tiling=False, use_mixed_precision=False)
        memscale.wrap(model, settings, sample_input=X, optimizer=optimizer)
        kept.append((model, optimizer, train(model, optimizer, parts=2)))

    peak = peak_bytes(run)
    model, optimizer, found = kept[0]
    plans = memscale.executor_of(model).plans
    names = {choice.technique for choice in plans[-1].steps}
    assert plans[-1].fits and "state_offload" in names and is_offloaded(optimizer)
    assert (NAME in names) == streams == bool(streamed_paths(model))
    # Copies of state and gradients on their way count in full, and are often gone by then.
    predicted = max(plan.predicted.device_used_peak_bytes for plan in plans)
    assert 0.6 * predicted <= peak <= predicted
    assert all(map(torch.equal, expected, found))
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    memscale.detach(model)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@pytest.mark.usefixtures("alone")
def test_replanned_for_other_batches(tmp_path: Path) -> None:
    model, other = model_of(), model_of()
    weights = sum(value.nbytes for value in model.parameters())
    memscale.wrap(model, config(tmp_path, int(1.7 * weights)), sample_input=X)
    before = streamed_paths(model)
    for rows in (4, 64, 8):
        losses = [item(X[:1].expand(rows, WIDTH)).square().mean() for item in (model, other)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    grads = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in grads)  # type: ignore[arg-type]
    assert before and set(before) <= set(streamed_paths(model))


@pytest.mark.usefixtures("alone")
def test_why_not(tmp_path: Path) -> None:
    settings = config(tmp_path, 1000)

    def notes(model: nn.Module) -> str:
        return "\n".join(memscale.plan(model, config=settings, sample_input=X).notes)

    small = nn.Linear(WIDTH, 2)
    assert f"{NAME}: no block of weights has 1048576 bytes or more" in notes(small)
    held = nn.Linear(WIDTH, WIDTH)
    view = held.weight.detach()
    assert "somebody else holds its memory" in notes(held)
    del view
    assert NAME not in notes(held)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_kept", [False, True], ids=["gone", "kept"])
def test_a_module_in_a_block_is_replaced(tmp_path: Path, is_kept: bool) -> None:
    kept, runs = [], []
    for budget in (None, 9 << 20):
        model: Any = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget is not None:
            memscale.wrap(model, config(tmp_path, budget), sample_input=X, optimizer=optimizer)
            assert streamed_paths(model)
        found = train(model, optimizer)
        kept += [model[4][0]] if is_kept else []
        torch.manual_seed(2)
        model[4][0] = nn.Linear(WIDTH, WIDTH)
        optimizer.add_param_group({"params": list(model[4][0].parameters())})
        found += train(model, optimizer)
        if budget is not None:
            memscale.detach(model)
            assert stream_of(model) is None
        assert all("forward" not in vars(module) for module in [*model.modules(), *kept])
        runs.append(
            [*found, *model.parameters(), *(value for module in kept for value in module.parameters())]
        )
        kept.clear()
    assert all(map(torch.equal, *runs))
