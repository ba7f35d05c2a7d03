# SPDX-License-Identifier: Apache-2.0
"""A plan that takes another's place between two steps: what both have offloaded stays so meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memscale
from engine_samples import peak_bytes
from memscale import AsyncOffloadConfig, Config
from memscale.core import variants
from memscale.core.executor import Executor
from memscale.core.in_force import InForce
from memscale.core.planner import Planned, make_plan
from memscale.optim.offload.attach import offloaded_bytes
from memscale.weights.saves import can_save
from memscale.weights.stream import stream_of
from patched import use_disk_of, use_techniques

pytestmark = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")

WIDTH = 512
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@pytest.fixture(autouse=True)
def state_and_weights_on_a_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    use_disk_of(monkeypatch)
    names = "state_offload", "weight_offload", "gradient_offload"
    rows = tuple(technique for technique in variants.STEP_TECHNIQUES if technique.name in names)
    use_techniques(monkeypatch, rows)


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for number in range(2):
        loss = model(X + number).square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


def planned_for(executor: Executor, config: Config) -> Planned:
    with executor.bare():
        return make_plan(executor.model, config, (X,), {}, executor._facts())


def path_of(in_force: InForce) -> list[str]:
    return [item.name for item in in_force.path]


def exchange_bytes(in_force: InForce, planned: Planned) -> int:
    """Most that is in memory beyond what was, while a plan takes the place of the one in force."""

    def work() -> None:
        torch.empty(1)  # or nothing is allocated, which the profiler takes for a failure
        in_force.exchange(planned)

    return peak_bytes(work)


def test_state_stays_offloaded_while_weights_leave_and_come_back(tmp_path: Path) -> None:
    def config(budget: int) -> Config:
        engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
        return Config(memory_budget=budget, enable_logging=False, async_config=engine)

    plain, model = model_of(), model_of()
    one, other = optimizer_of(plain), optimizer_of(model)
    whole = memscale.plan(plain, sample_input=X, optimizer=one).plain.device_used_peak_bytes
    memscale.wrap(model, config(whole * 75 // 100), X, optimizer=other)
    assert all(map(torch.equal, train(plain, one), train(model, other)))
    executor = memscale.executor_of(model)
    assert isinstance(executor, Executor) and executor.planned is not None
    in_force, larger, offloaded = executor.in_force, executor.planned, offloaded_bytes(other)
    weights = sum(value.nbytes for value in model.parameters())
    path = path_of(in_force)
    assert path == ["state_offload", "gradient_offload"] and offloaded > weights

    smaller = planned_for(executor, config(1))
    gc.collect()
    assert exchange_bytes(in_force, smaller) < offloaded // 8
    assert path_of(in_force) == ["weight_offload", "state_offload", "gradient_offload"]
    assert stream_of(model) is not None and offloaded_bytes(other) >= offloaded
    assert all(map(torch.equal, train(plain, one), train(model, other)))

    assert exchange_bytes(in_force, larger) < weights + offloaded // 8
    assert path_of(in_force) == path and stream_of(model) is None
    assert all(map(torch.equal, train(plain, one), train(model, other)))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    memscale.detach(model)
    assert offloaded_bytes(other) == 0
