# SPDX-License-Identifier: Apache-2.0
"""The step in backward beside every other technique: losses, weights, buffers and state of it alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrix import techniques
from matrix.architectures import Architecture, architecture
from matrix.cells import optimizer_for
from matrix.modes import mode, model_for
from matrix.techniques import IN_BACKWARD, TECHNIQUES, Columns, Refused, Technique, facts_of, forced
from memscale.optim.spent import SpentGradient
from memscale.techniques.optimizer.gradient_offload import NAME as RELEASE
from memscale.techniques.optimizer.weight_offload import NAME as WEIGHTS
from memscale.trace.loss import loss_of
from zoo.training import SMALLEST, call

STEP = Technique(IN_BACKWARD, True, False, partial(techniques._step, techniques._STEPS[IN_BACKWARD]))
BESIDE = [item for item in TECHNIQUES if item.name not in (RELEASE, WEIGHTS)]
MODELS = ("gpt2", "sequential-blocks", "bert", "llama")


@pytest.fixture(autouse=True)
def promised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only here the configuration has the promise."""
    monkeypatch.setattr(techniques, "SMALLEST", SMALLEST.replace(step_in_backward=True))
    facts_of.cache_clear()
    yield
    facts_of.cache_clear()


def trained(row: Architecture, columns: Columns) -> tuple[list[Tensor], bool]:
    """What comes of three steps, and whether gradients were there after a backward."""
    facts_of(row)
    model = model_for(row, mode("dropout"))
    optimizer = optimizer_for(model)
    found, spent = [], False
    with forced(model, row, columns, optimizer):
        for number in range(3):
            loss = loss_of(call(model, row.case.batch(number)))
            assert loss is not None
            loss.backward()
            found.append(loss.detach())
            spent = any(isinstance(value.grad, SpentGradient) for value in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found += [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
        states: dict[int, Any] = optimizer.state_dict()["state"]
    entries = [states[number] for number in sorted(states)]
    found += [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    return found, spent


def row_for(technique: Technique) -> Architecture:
    for name in MODELS:
        row = architecture(name)
        model: nn.Module = model_for(row, mode("dropout"))
        try:
            with forced(model, row, (technique,), optimizer_for(model)):
                return row
        except Refused:
            continue
    raise AssertionError("no model has a place for it")


@pytest.mark.parametrize("technique", BESIDE, ids=[item.name for item in BESIDE])
def test_every_bit_beside(technique: Technique) -> None:
    row = row_for(technique)
    alone, is_spent = trained(row, (technique,))
    with_it, spent = trained(row, (technique, STEP))
    assert spent and not is_spent
    assert len(alone) == len(with_it) and all(map(torch.equal, alone, with_it))


@pytest.mark.parametrize("name", [RELEASE, WEIGHTS])
def test_not_beside(name: str) -> None:
    """There are no gradients to release; weights are stepped where they are."""
    technique = next(item for item in TECHNIQUES if item.name == name)
    row = architecture("gpt2")
    model = model_for(row, mode("dropout"))
    with pytest.raises(Refused), forced(model, row, (technique, STEP), optimizer_for(model)):
        pass
