# SPDX-License-Identifier: Apache-2.0
"""Gradient release through the configuration: chosen by the plan, within the budget, and every bit."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from amounts import also
from engine_samples import peak_bytes
from gradient_samples import is_offloaded
from memscale import AsyncOffloadConfig, Config
from memscale.hardware.detect import detect
from memscale.offload.engine import why_not
from memscale.offload.limits import link_for
from memscale.techniques.base import Surroundings
from memscale.techniques.optimizer import gradient_offload
from patched import use_disk_of, use_only

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

WIDTH, DEPTH = 512, 10  # a gradient of a layer is 1 MiB
NAME = "gradient_offload"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "lists": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def alone_on_a_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other techniques could meet the budgets, too."""
    use_only(monkeypatch, NAME)
    use_disk_of(monkeypatch)


class Chain(nn.Module):
    """A classifier of a few large layers, with tied weights where the largest gradient is a sum."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(1500, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1500, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


X = torch.arange(24).view(2, 12)


def model_of(tied: bool = False) -> Chain:
    torch.manual_seed(1)
    return Chain(tied)


def config(folder: Path, budget: int | None) -> Config:
    return Config(
        memory_budget=budget,
        enable_checkpointing=False,
        enable_tiling=False,
        enable_logging=False,
        async_config=AsyncOffloadConfig(tiers=("file",), directory=str(folder)),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> list[Tensor]:
    found = []
    for number in range(3 * accumulate):
        loss = model(X + number % 3).logsumexp(-1).mean()
        loss.backward()
        found.append(loss.detach())
        if (number + 1) % accumulate == 0:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    return found


def released(folder: Path) -> tuple[Chain, torch.optim.Optimizer]:
    """A model under a budget that only release meets."""
    model = model_of()
    made = OPTIMIZERS["fused"](model.parameters())
    plain = memscale.plan(model, sample_input=X, optimizer=made).plain.device_used_peak_bytes
    memscale.wrap(model, config(folder, plain * 80 // 100), sample_input=X, optimizer=made)
    plan = memscale.executor_of(model).plan
    assert plan is not None and [choice.technique for choice in plan.steps if choice.technique == NAME]
    return model, made


@pytest.mark.parametrize(
    ("name", "tied", "accumulate"),
    [("one by one", True, 1), ("fused", False, 2), *also(("lists", False, 1), ("SGD", True, 2))],
)
def test_the_budget_holds_and_every_bit_stays(name: str, tied: bool, accumulate: int, tmp_path: Path) -> None:
    kept: list[Any] = []

    def run(budget: int | None) -> None:
        model = model_of(tied)
        optimizer = OPTIMIZERS[name](model.parameters())
        if budget is not None:
            memscale.wrap(model, config(tmp_path, budget), sample_input=X, optimizer=optimizer)
        kept.append((train(model, optimizer, accumulate), model, optimizer))

    plain_peak = peak_bytes(partial(run, None))
    budget = plain_peak * (94 if name == "one by one" else 90) // 100
    peak = peak_bytes(partial(run, budget))
    (plain, expected, _), (found, model, _) = kept
    plans = memscale.executor_of(model).plans
    assert all(plan.fits and NAME in [choice.technique for choice in plan.steps] for plan in plans)
    peaks = [plan.predicted.device_used_peak_bytes for plan in plans]  # the first one's step may not be run
    assert 0.98 * peaks[-1] <= peak <= max(peaks) <= budget
    assert all(map(torch.equal, plain, found))
    assert all(map(torch.equal, expected.parameters(), model.parameters()))
    memscale.detach(model)


def test_detach_between_backward_and_step(tmp_path: Path) -> None:
    model, optimizer = released(tmp_path)
    expected = copy.deepcopy(model_of())
    for value in (model, expected):
        value(X).logsumexp(-1).mean().backward()
    weight = model.layers[3].weight
    assert is_offloaded(weight.grad) and type(model.layers[3].bias.grad) is Tensor  # which is small
    figures = memscale.executor_of(model).offload_figures()
    assert figures is not None
    memscale.detach(model)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(mine.grad) is Tensor and torch.equal(mine.grad, theirs.grad)
    gc.collect()
    model(X).logsumexp(-1).mean().backward()
    assert type(weight.grad) is Tensor
    optimizer.step()


def test_copies_and_pickles_are_plain_models(tmp_path: Path) -> None:
    model, _ = released(tmp_path)
    model(X).logsumexp(-1).mean().backward()
    gradient = model.layers[0].weight.grad
    assert gradient is not None and is_offloaded(gradient)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(value.grad is None for value in other.parameters())
        other(X).logsumexp(-1).mean().backward()
        assert torch.equal(other.layers[0].weight.grad, gradient)
        assert type(other.layers[0].weight.grad) is Tensor
    memscale.detach(model)


def test_verified_on_the_spot(tmp_path: Path) -> None:
    model, _ = released(tmp_path)
    model(X).logsumexp(-1).mean().backward()
    gradient = model.layers[0].weight.grad
    assert gradient is not None
    before = gradient.clone()
    assert memscale.verify(model, X).passed
    assert torch.equal(gradient, before) and model.layers[0].weight.grad is gradient
    memscale.detach(model)


def test_it_is_left_out_where_memory_is_not_short(tmp_path: Path) -> None:
    model = model_of()
    memscale.wrap(model, config(tmp_path, 1 << 32), sample_input=X)
    plan = memscale.executor_of(model).plan
    assert plan is not None and not plan.steps
    memscale.detach(model)


def test_why_not(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    plan = memscale.plan(model, config=config(tmp_path, 1000), sample_input=torch.ones(2, 8))
    assert "gradient_offload: no gradient has 1048576 bytes or more" in plan.notes
    parallel = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), DistributedDataParallel.__new__(DistributedDataParallel)
    )
    nn.Module.__init__(parallel[1])
    link = link_for(config(tmp_path, 1 << 20).effective(), detect(X.device), X.device, 1 << 20)
    around = Surroundings(detect(X.device), config(tmp_path, None).effective(), None, link)
    assert gradient_offload.why_not(parallel[0], around) == "" and gradient_offload.find(parallel[0], around)
    assert "DistributedDataParallel" in gradient_offload.why_not(parallel, around)
    assert not gradient_offload.find(parallel, around)


def test_another_model_is_planned_while_gradients_are_looked_at(tmp_path: Path) -> None:
    """A GAN's loop logs norms of one model's gradients, then runs the other: its trace steps on fakes."""
    first, _ = released(tmp_path)
    first(X).logsumexp(-1).mean().backward()
    gradients = [value.grad for value in first.parameters() if value.grad is not None]
    norms = [gradient.data.norm() for gradient in gradients]
    second = memscale.wrap(model_of(), config(tmp_path, None))
    second(X).logsumexp(-1).mean().backward()
    assert memscale.executor_of(second).plan is not None
    assert [gradient.norm() for gradient in gradients] == norms
