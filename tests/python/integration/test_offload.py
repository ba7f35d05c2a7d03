# SPDX-License-Identifier: Apache-2.0
"""Offload through the configuration: budgets hold, bits stay, and what cannot be done says why."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memscale
from memscale import Config
from memscale.core.executor import Executor
from memscale.offload.engine import Boundary, Offload, OffloadSettings, why_not
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.recompute_check import RecomputeCheck
from memscale.techniques.offloading import OffloadAttachment
from patched import use_disk_of
from soak.samples import (
    WIDTH,
    Block,
    Network,
    batch,
    config,
    engine_of,
    same,
    step,
    whole_bytes,
    wrapped,
)
from zoo.training import peak_bytes as peak_beyond

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """Of a step, with what was there before, and what an engine takes for itself."""
    model.zero_grad()
    before = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    peak = peak_beyond(lambda: model(x).square().mean().backward())
    wrapped_here = isinstance(memscale.executor_of(model), Executor)
    offload = memscale.executor_of(model).in_force.offload if wrapped_here else None
    counters = {} if offload is None else offload.counters()
    return before + peak + counters.get("staging_bytes", 0) + counters.get("table_bytes", 0)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("percent", [75, 55])
def test_a_budget_is_met_and_every_bit_stays(
    percent: int, checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_disk_of(monkeypatch)  # no checkpoint is as cheap
    model, x = Network(), batch()
    plain = step(model, x)
    whole = whole_bytes(model, x)
    unseen = whole - peak_bytes(model, x)  # an optimizer, which this step has not
    budget = whole * percent // 100
    memscale.wrap(model, config(tmp_path, budget, checkpoints), sample_input=x)
    plan = memscale.executor_of(model).plan
    assert plan is not None and plan.fits and any(choice.offloads for choice in plan.choices)
    for _ in range(2):
        assert same(step(model, x), plain)
    predicted = plan.predicted.device_used_peak_bytes
    assert 0.9 * predicted <= peak_bytes(model, x) + unseen <= predicted <= budget
    memscale.detach(model)
    assert same(step(model, x), plain)
    assert not list(tmp_path.iterdir())


def test_a_region_comes_back_while_the_one_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the plan says, below its own peak. Without it each region's first use is waited for."""
    model, x = Network(6), batch()
    wrapped(model, x, tmp_path)
    plan = memscale.executor_of(model).plan
    assert plan is not None
    early = [choice for choice in plan.choices if choice.ahead_bytes]
    assert early and all(choice.offloads and choice.ahead_bytes <= plan.window_in_bytes for choice in early)

    def missed() -> int:
        before = engine_of(model).counters()["missed_count"]
        step(model, x)
        return engine_of(model).counters()["missed_count"] - before

    peaks = [peak_bytes(model, x) for _ in range(4)]  # the window grows to what is needed
    with_it = missed()
    hooks = Offload.hooks
    monkeypatch.setattr(Offload, "hooks", lambda self, ordinals, _, left: hooks(self, ordinals, left=left))
    assert with_it <= missed() - len(early)
    assert max(peaks) <= plan.predicted.device_used_peak_bytes


@pytest.mark.parametrize("ahead_bytes, misses", [(0, 6), ((1 << 20) - 1, 6), (1 << 20, 1)])
def test_a_boundary_comes_back_while_the_block_behind_it_runs_again(
    ahead_bytes: int, misses: int, tmp_path: Path
) -> None:
    settings = OffloadSettings(torch.device("cpu"), file_bytes=64 << 20, directory=str(tmp_path))
    model, x, offload = Network(7), batch(), Offload(settings)
    plain = step(model, x)
    for block in model.blocks:
        CheckpointAttachment(block, "", boundary=Boundary(offload, None, ahead_bytes)).attach()
    for _ in range(3):
        assert same(step(model, x), plain)
    before = offload.counters()["missed_count"]
    assert same(step(model, x), plain)
    assert offload.counters()["missed_count"] - before == misses  # of six: the batch itself stays


@pytest.mark.parametrize("kept", [frozenset(), frozenset({("addmm", 0)})], ids=["whole", "selective"])
def test_nothing_holds_a_boundary_that_left(kept: frozenset[tuple[str, int]], tmp_path: Path) -> None:
    """Not even what the module saves of it in its first run."""
    settings = OffloadSettings(torch.device("cpu"), file_bytes=64 << 20, directory=str(tmp_path))
    block, leaf = Block(), batch(4).requires_grad_()

    def run() -> tuple[Tensor, StorageWeakRef]:
        torch.manual_seed(3)
        x = leaf * 2
        return block(x), StorageWeakRef(x.untyped_storage())

    expected = torch.autograd.grad(run()[0].sum(), [leaf, *block.parameters()])
    boundary = Boundary(Offload(dataclasses.replace(settings, least_bytes=1)))
    attachment = CheckpointAttachment(block, "", kept=kept, boundary=boundary)
    attachment.attach()
    y, boundary_memory = run()
    gc.collect()
    assert boundary_memory.expired()
    assert same(list(torch.autograd.grad(y.sum(), [leaf, *block.parameters()])), list(expected))
    attachment.undo()


class Asking(Block):
    """Asks its input what only the tensor itself knows."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x * getattr(x, "scale", 1.0))
        if x.is_leaf or x.grad_fn is None or x._base is not None:
            y = y.sin()
        return y


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_boundary_is_the_same_tensor_to_its_block(is_leaf: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    settings = OffloadSettings(torch.device("cpu"), file_bytes=64 << 20, directory=folder, least_bytes=1)
    block, leaf, offload = Asking(), batch(4).requires_grad_(), Offload(settings)

    def gradients_of() -> list[Tensor]:
        torch.manual_seed(3)
        x = leaf if is_leaf else leaf * 2
        x.scale = 0.5  # type: ignore[attr-defined]
        return list(torch.autograd.grad(block(x).sum(), [leaf, *block.parameters()]))

    expected = gradients_of()
    check = RecomputeCheck("always")
    CheckpointAttachment(block, "", boundary=Boundary(offload, (0,)), check=check).attach()
    assert same(gradients_of(), expected)
    assert offload.counters()["put_count_file"] > 0


@pytest.mark.parametrize("saves, offloaded", [((0, 1), 1 << 21), (None, 0)], ids=["named", "not named"])
def test_a_copy_that_autocast_makes_of_a_weight(
    saves: tuple[int, ...] | None, offloaded: int, tmp_path: Path
) -> None:
    """It leaves where a plan names it, which counts on that; nobody else asks for it."""
    settings = OffloadSettings(torch.device("cpu"), file_bytes=64 << 20, directory=str(tmp_path))
    model, x, offload = nn.Linear(1024, 1024), torch.randn(64, 1024, requires_grad=True), Offload(settings)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    expected = torch.autograd.grad(run(), [x, *model.parameters()])
    attachment = OffloadAttachment(model, "", offload, saves)
    attachment.attach()
    loss = run()
    assert offload.counters()["held_bytes_file"] == offloaded
    assert same(list(torch.autograd.grad(loss, [x, *model.parameters()])), list(expected))
    attachment.undo()


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.up(x)).sin()
        if depth:
            x = self(x, depth - 1) + x
        return torch.exp(-self.down(x).square())


def test_a_module_that_calls_itself(tmp_path: Path) -> None:
    """What its inner calls save is numbered on from where the outer one was."""
    model, x = nn.Sequential(Recursive(), Recursive()), batch(16)
    plain = step(model, x)
    budget = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes * 60 // 100
    memscale.wrap(model, config(tmp_path, budget), sample_input=x)
    plan = memscale.executor_of(model).plan
    assert plan is not None and plan.fits and any(choice.calls > 1 for choice in plan.active)
    assert same(step(model, x), plain)
    assert 0 < engine_of(model).counters()["held_peak_bytes_file"] == plan.away_peak_bytes
    assert peak_bytes(model, x) <= plan.predicted.device_used_peak_bytes


def test_no_more_is_offloaded_than_the_plan_says(tmp_path: Path) -> None:
    model, x = Network(), batch()
    wrapped(model, x, tmp_path)
    step(model, x)
    plan = memscale.executor_of(model).plan
    assert plan is not None
    assert 0 < engine_of(model).counters()["held_peak_bytes_file"] == plan.away_peak_bytes


def test_copies_of_a_model_know_nothing_of_its_engine(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    assert same(step(model, x), plain)
    twin, moved = copy.deepcopy(model), engine_of(model).counters()
    assert same(step(twin, x), plain) and engine_of(model).counters() == moved
    assert moved["saves_moved"] > 0 and same(step(model, x), plain)


def test_on_the_cpu_a_file_is_asked_for() -> None:
    model, x = Network(), batch()
    plan = memscale.plan(model, config=Config(async_offload=True), sample_input=x)
    assert any("tiers=('file',)" in note for note in plan.notes)
    assert not any(choice.offloads for choice in plan.choices)


def test_without_being_asked_for_nothing_leaves_and_nothing_is_said() -> None:
    model, x = Network(), batch()
    budget = whole_bytes(model, x) // 2
    plan = memscale.plan(model, config=Config(memory_budget=budget), sample_input=x)
    assert not any("offload" in note for note in plan.notes)
    assert not any(choice.offloads for choice in plan.choices)


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_folder_that_cannot_be_used(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "there"
    if what == "a file":
        folder.write_text("")
    plan = memscale.plan(Network(), config=config(folder, 10**9), sample_input=batch())
    assert any("is not a folder" in note and os.fspath(folder) in note for note in plan.notes)
    memscale.wrap(Network(), config(folder, 10**9), sample_input=batch())
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "is not a folder" in warning and os.fspath(folder) in warning
