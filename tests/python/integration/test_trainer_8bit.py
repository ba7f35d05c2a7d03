# SPDX-License-Identifier: Apache-2.0
"""`wrap(trainer)` with 8-bit state: the optimizer that the trainer makes has it, from its first step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale.optim import is_patched
from memscale.optim.eight_bit import with_8bit_state
from trainer_samples import Trained, trained, weights
from zoo.training import same_bits

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STATE = memscale.Config(use_8bit_optimizer=True, enable_logging=False)
FULL = memscale.Config(mode="aggressive", memory_budget="4MiB", enable_logging=False)
LESS = FULL.replace(memory_budget="2500KiB")  # which takes BF16 weights


def _made_before(trainer: Any) -> None:
    """As a loop of one's own would do it."""
    trainer.create_optimizer()
    with_8bit_state(trainer.optimizer, "memscale")


def _optimizer_of(run: Trained) -> torch.optim.Optimizer:
    optimizer = run.trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def _same_weights(one: Trained, other: Trained) -> bool:
    pairs = zip(weights(one.model), weights(other.model), strict=True)
    return all(same_bits(a, b) for (_, a), (_, b) in pairs)


def test_it_trains_as_with_an_optimizer_made_before(tmp_path: Path) -> None:
    expected = trained(tmp_path, None, prepare=_made_before, prepare_first=True)
    planned = trained(tmp_path, STATE)
    assert is_patched(_optimizer_of(planned))
    assert planned.losses == expected.losses and _same_weights(planned, expected)
    assert planned.plan_at_wrap is not None
    assert planned.executor.plan.digest == planned.plan_at_wrap.digest  # which has counted it
    memscale.detach(planned.trainer)
    assert not is_patched(_optimizer_of(planned))


def test_the_plan_counts_it(tmp_path: Path) -> None:
    plain = trained(tmp_path, memscale.Config(enable_logging=False)).plan_at_wrap
    planned = trained(tmp_path, STATE).plan_at_wrap
    assert plain is not None and planned is not None
    assert planned.predicted.allocated_peak_bytes < plain.predicted.allocated_peak_bytes


@pytest.mark.usefixtures("bf16_host")
def test_the_full_stack(tmp_path: Path) -> None:
    run = trained(tmp_path, FULL)
    assert is_patched(_optimizer_of(run)) and run.executor.plan.active
    assert "autocast" in {step.technique for step in run.executor.plan.steps}
    assert run.executor.planning_seconds == 0.0


@pytest.mark.usefixtures("bf16_host")
def test_the_trainers_own_optimizer_gets_what_was_planned_for_one_like_it(tmp_path: Path) -> None:
    run = trained(tmp_path, LESS)
    assert "bf16_weights" in {step.technique for step in run.executor.plan.steps}
    assert run.plan_at_wrap is not None and run.executor.plan.digest == run.plan_at_wrap.digest
    assert torch.bfloat16 in {value.dtype for value in run.model.parameters()}
    assert run.executor.planning_seconds == 0.0
    memscale.detach(run.trainer)
    assert {value.dtype for value in run.model.parameters()} == {torch.float32}


@pytest.mark.usefixtures("bf16_host")
@pytest.mark.parametrize("config", [STATE, LESS], ids=["state", "BF16 weights"])
def test_resuming_from_a_checkpoint(config: memscale.Config, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path / "whole", config, **settings)
    resumed = trained(tmp_path / "cut", config, resume=tmp_path / "whole" / "checkpoint-2", **settings)
    assert is_patched(_optimizer_of(resumed))
    assert whole.executor.planning_seconds == 0.0  # saving brings no plan
    assert resumed.losses[-2:] == whole.losses[2:] and _same_weights(resumed, whole)


def test_a_model_made_when_training_begins(tmp_path: Path) -> None:
    from trainer_samples import GPT2
    from zoo.training import built

    run = trained(tmp_path, STATE, trainer={"model_init": lambda: built(GPT2)})
    assert is_patched(_optimizer_of(run))


def test_an_optimizer_that_cannot_have_it_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = memscale.Config(use_8bit_optimizer=True)
    run = trained(tmp_path, config, optim="adafactor")
    assert not is_patched(_optimizer_of(run))
    assert any("8-bit optimizer state: not used" in text for text in caplog.messages)
