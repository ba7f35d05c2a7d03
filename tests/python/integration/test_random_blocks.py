# SPDX-License-Identifier: Apache-2.0
"""Blocks that random numbers drop: a plan is for all of them, whatever its trace happened to draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as bound

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from memscale.state.extreme_draws import extreme_draws
from zoo.training import peak_bytes

WIDTH, ROWS = 64, 1024

DRAWS: dict[str, Callable[[], bool]] = {
    "random.random": lambda: random.random() >= 0.4,
    "bound to another name": lambda: bound() >= 0.4,
    "the other side": lambda: random.uniform(0, 1) < 0.6,
    "numpy": lambda: bool(np.random.uniform(0, 1) >= 0.4),
    "torch.rand": lambda: bool(torch.rand([]) >= 0.4),
}


class Dropped(nn.Module):
    def __init__(self, runs: Callable[[], bool]) -> None:
        super().__init__()
        self.runs = runs
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.runs():
                x = x + layer(x)
        return x.square().mean()


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("name", [*DRAWS])
@pytest.mark.parametrize("number", [1, 2])
def test_no_step_exceeds_a_budget_that_is_met(name: str, number: int) -> None:
    seed(number)
    model, x = Dropped(DRAWS[name]), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plain = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes
    config = memscale.Config(memory_budget=int(0.8 * plain), enable_logging=False)
    memscale.wrap(model, config, sample_input=x, optimizer=optimizer)
    executor: Executor = memscale.executor_of(model)

    def step() -> None:
        loss = model(x)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert executor.plan is not None and executor.plan.fits and executor.plan.active
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    peak = held + max(peak_bytes(step) for _ in range(12))
    assert peak <= executor.plan.budget_bytes


@pytest.mark.parametrize("highest", [True, False])
def test_extremes_end_and_leave_the_generators_as_they_were(highest: bool) -> None:
    seed(0)
    expected = [(random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()) for _ in range(3)]
    seed(0)
    with extreme_draws(highest):
        drawn = [random.random() for _ in range(300)] + np.random.rand(300).tolist()
        assert all(number > 1 - 1e-9 if highest else number == 0 for number in drawn)
        later = [random.random() for _ in range(2000)] + np.random.rand(2000).tolist()
        assert sum(0.3 < number < 0.7 for number in later) > 100
    assert expected == [
        (random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()) for _ in range(3)
    ]


def test_code_that_draws_until_it_likes_the_number_is_planned() -> None:
    def runs() -> bool:
        while not 0.3 < random.random() < 0.7:
            pass
        return True

    model, x = Dropped(runs), torch.randn(8, WIDTH)
    assert memscale.plan(model, None, memscale.Config(memory_budget="1GiB"), x).fits


def test_a_model_that_cannot_work_with_extremes_is_planned() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            share = random.random()
            if not 0 < share < 1 - 1e-9:
                raise ValueError("no such share")
            return self.layer(x).sum() * share

    seed(0)
    assert memscale.plan(Refuses(), None, memscale.Config(memory_budget="1GiB"), torch.randn(8, WIDTH)).fits


def test_a_model_that_needs_one_of_its_layers_is_planned_and_trained() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            seen = []
            for layer in self.layers:
                if torch.rand([]) >= 0.1:
                    x = torch.tanh(layer(x))
                    seen.append(x)
            return torch.stack(seen).mean()  # raises if every layer was dropped

    seed(0)
    model, x = Seen(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    assert memscale.predict(model, optimizer, sample_input=x).plain is not None
    memscale.wrap(model, memscale.Config(memory_budget="1GiB", enable_logging=False), sample_input=x)
    model(x).backward()
    assert model.layers[0].weight.grad is not None
