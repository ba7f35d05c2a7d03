# SPDX-License-Identifier: Apache-2.0
"""`detach` brings state back to memory: it says where that is too much, and fails without harm."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside, failing
from memscale import AsyncOffloadConfig, Config
from memscale.core import variants
from memscale.optim.offload.attach import offloaded_bytes, take_back
from memscale.techniques.optimizer import state_offload
from patched import use_disk_of, use_techniques

WIDTH = 512
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.parameters()]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has trained with state in a file, above whose budget that state is."""
    rows = tuple(item for item in variants.STEP_TECHNIQUES if item.name == state_offload.NAME)
    use_techniques(monkeypatch, rows)
    use_disk_of(monkeypatch)
    model, optimizer = made()
    weights = sum(value.nbytes for value in model.parameters())
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = Config(memory_budget=weights * 29 // 10, enable_logging=False, async_config=engine)
    memscale.wrap(model, config, sample_input=X, optimizer=optimizer)
    train(model, optimizer)
    assert offloaded_bytes(optimizer) > weights * 19 // 10
    return model, optimizer


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.message for record in caplog.records)


def test_what_comes_back_above_the_budget_is_said(
    wrapped: tuple[nn.Module, torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    model, optimizer = wrapped
    memscale.detach(model)
    assert warnings_of(caplog, "come back to memory") == 1 and not offloaded_bytes(optimizer)
    plain, standard = made()
    train(plain, standard)
    assert all(map(torch.equal, train(plain, standard), train(model, optimizer)))


def test_what_cannot_come_back_stays_and_works_once_it_can(
    wrapped: tuple[nn.Module, torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    model, optimizer = wrapped
    offloaded = offloaded_bytes(optimizer)

    with beside({take_back: failing(OSError("the disk is gone"))}):
        memscale.detach(model)
    assert warnings_of(caplog, "cannot be brought back: the disk is gone") == 1
    assert memscale.executor_of(model) is None and offloaded_bytes(optimizer) == offloaded
    plain, standard = made()
    train(plain, standard)
    assert all(map(torch.equal, train(plain, standard), train(model, optimizer)))
