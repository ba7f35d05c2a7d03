# SPDX-License-Identifier: Apache-2.0
"""`memscale.autosave`: when it saves, what it refuses, and that a run goes on with every bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memscale

STEPS = 5

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "planned": {"force_optimize": True},
    "eight_bit": {"use_8bit_optimizer": True, "eight_bit_backend": "memscale"},
}


def train(path: Path, steps: int, fields: dict[str, Any]) -> list[torch.Tensor]:
    """A run that begins where the file ends."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if fields:
        memscale.wrap(model, optimizer=optimizer, enable_logging=False, **fields)
    run = memscale.autosave(path, every=2, model=model, optimizer=optimizer, schedule=schedule)
    for _ in range(run.restore(), steps):
        x = torch.randn(6, 8) + random.random() + float(np.random.rand())
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.step()
    found = [*model.parameters(), *model.buffers(), torch.rand(2), torch.tensor([random.random()])]
    if fields:
        memscale.detach(model)
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_every_bit(way: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole.pt", STEPS, WAYS[way])
    train(tmp_path / "parts.pt", 3, WAYS[way])  # has saved after two
    parts = train(tmp_path / "parts.pt", STEPS, WAYS[way])
    assert all(map(torch.equal, whole, parts))
    assert torch.load(tmp_path / "parts.pt", weights_only=True)["steps"] == 4


def test_state_in_a_file(tmp_path: Path) -> None:
    settings = memscale.AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    fields = {"use_8bit_optimizer": True, "async_config": settings, "memory_budget": "60KiB", "exact": False}
    whole = train(tmp_path / "whole.pt", STEPS, fields)
    train(tmp_path / "parts.pt", 3, fields)
    assert all(map(torch.equal, whole, train(tmp_path / "parts.pt", STEPS, fields)))


def test_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = memscale.autosave(tmp_path / "run.pt", every="1.5min", model=nn.Linear(1, 1))
    assert not run.step()
    now[0] += 89.0
    assert not run.step()
    now[0] += 1.0
    assert run.step()
    assert not run.step()
    assert torch.load(tmp_path / "run.pt", weights_only=True)["steps"] == 3


@pytest.mark.parametrize("every", [0, -1, True, "10", "0s", "5 days", 2.5, None])
def test_intervals_that_are_none(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every is .*allowed: a number of steps above 0, or a time"):
        memscale.autosave(tmp_path / "run.pt", every=every, model=nn.Linear(1, 1))


def test_parts_without_a_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parts are missing"):
        memscale.autosave(tmp_path / "run.pt", every=1)
    loader: Any = [1, 2]
    with pytest.raises(TypeError, match="loader is a list; allowed: what has state_dict"):
        memscale.autosave(tmp_path / "run.pt", every=1, loader=loader)


def test_files_that_are_others(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    memscale.save({"weights": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"which memscale\.autosave has not written"):
        memscale.autosave(tmp_path / "other.pt", every=1, model=model).restore()
    memscale.autosave(tmp_path / "run.pt", every=1, model=model).save()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"parts are model, second; the file .* has model"):
        memscale.autosave(tmp_path / "run.pt", every=1, model=model, second=model).restore()
    assert torch.equal(state, torch.get_rng_state())


def test_without_a_file_it_begins(tmp_path: Path) -> None:
    assert memscale.autosave(tmp_path / "run.pt", every=1, model=nn.Linear(1, 1)).restore() == 0
