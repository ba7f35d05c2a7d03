# SPDX-License-Identifier: Apache-2.0
"""Offload through the configuration: budgets hold, bits stay, and what cannot be done says why."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.core.executor import EXECUTOR, Executor
from memscale.offload.engine import why_not
from technique_leaks import quiet_profiler

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)


class Block(nn.Module):
    """An MLP whose dropout must drop the same again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Network(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> Tensor:
    return torch.randn(8, 512, 128)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]


def config(folder: Path, budget: int | None = None, checkpoints: bool = True) -> Config:
    return Config(
        memory_budget=budget,
        enable_checkpointing=checkpoints,
        enable_logging=False,
        async_config=AsyncOffloadConfig(tiers=("file",), directory=str(folder), debug=True),
    )


def executor_of(model: nn.Module) -> Executor:
    found = model.__dict__[EXECUTOR]
    assert isinstance(found, Executor)
    return found


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """Of a step, with what was there before."""
    from torch.profiler import ProfilerActivity, profile

    model.zero_grad()
    gc.collect()
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(x).square().mean().backward()
    live = peak = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("percent", [70, 50])
def test_a_budget_is_met_and_every_bit_stays(percent: int, checkpoints: bool, tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    whole = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    budget = whole * percent // 100
    memscale.wrap(model, config(tmp_path, budget, checkpoints), sample_input=x)
    plan = executor_of(model).plan
    assert plan is not None and plan.fits and any(choice.offloads for choice in plan.choices)
    for _ in range(3):
        assert all(map(torch.equal, step(model, x), plain))
    assert peak_bytes(model, x) <= plan.predicted.device_used_peak_bytes <= budget
    memscale.detach(model)
    assert all(map(torch.equal, step(model, x), plain))
    assert not list(tmp_path.iterdir())


def test_no_more_is_away_than_the_plan_says(tmp_path: Path) -> None:
    model, x = Network(), batch()
    whole = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    memscale.wrap(model, config(tmp_path, whole // 2, checkpoints=False), sample_input=x)
    executor = executor_of(model)
    assert executor.plan is not None and executor._offload is not None
    step(model, x)
    held = executor._offload.counters()["held_peak_bytes_file"]
    assert 0 < held == executor.plan.away_peak_bytes


def test_copies_of_a_model_have_engines_of_their_own(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    whole = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    memscale.wrap(model, config(tmp_path, whole // 2, checkpoints=False), sample_input=x)
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, step(twin, x), plain)) and all(map(torch.equal, step(model, x), plain))


def test_detaching_between_forward_and_backward(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    whole = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    memscale.wrap(model, config(tmp_path, whole // 2, checkpoints=False), sample_input=x)
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(x).square().mean()
    memscale.detach(model)
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), plain[1:], strict=True))  # type: ignore[arg-type]


def test_on_the_cpu_a_file_is_asked_for() -> None:
    model, x = Network(), batch()
    plan = memscale.plan(model, config=Config(async_offload=True), sample_input=x)
    assert any("tiers=('file',)" in note for note in plan.notes)
    assert not any(choice.offloads for choice in plan.choices)


def test_without_being_asked_for_nothing_leaves_and_nothing_is_said() -> None:
    model, x = Network(), batch()
    whole = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    plan = memscale.plan(model, config=Config(memory_budget=whole // 2), sample_input=x)
    assert not any("offload" in note for note in plan.notes)
    assert not any(choice.offloads for choice in plan.choices)


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_folder_that_cannot_be_used(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    if what == "a file":
        folder.write_text("")
    plan = memscale.plan(Network(), config=config(folder, 10**9), sample_input=batch())
    assert any("is not a folder" in note and os.fspath(folder) in note for note in plan.notes)
