# SPDX-License-Identifier: Apache-2.0
"""`wrap` on a Hugging Face `Trainer`, and on anything that looks like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from zoo.models import case
from zoo.training import SMALLEST, built, same_bits

GPT2 = case("gpt2")


class FakeTrainer:
    """Has `.model` and `.train`, and its own loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for step in range(3):
            self.model(**GPT2.batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal(plain: nn.Module, planned: nn.Module) -> None:
    assert all(same_bits(a, b) for a, b in zip(weights(plain), weights(planned), strict=True))


def test_a_trainer_comes_back_and_its_model_is_wrapped() -> None:
    plain, trainer = FakeTrainer(built(GPT2)), FakeTrainer(built(GPT2))
    assert memscale.wrap(trainer, SMALLEST) is trainer
    assert trainer.model._memscale_executor.plan is None
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    trainer.train()
    assert trainer.model._memscale_executor.plan.active
    assert_equal(plain.model, trainer.model)
    memscale.detach(trainer)
    assert "_memscale_executor" not in trainer.model.__dict__


@pytest.mark.parametrize("bad", [{"model": 3}, {"model": None}, {}])
def test_a_trainer_without_a_model(bad: dict[str, Any]) -> None:
    trainer = type("Trainer", (), {"train": lambda self: None, **bad})()
    with pytest.raises(TypeError, match="trainer"):
        memscale.wrap(trainer)


class Lines(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in GPT2.batch(index).items()}


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_transformers_trainer_trains_equal(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # requirements/test.txt has it; transformers alone runs without
    from transformers import Trainer, TrainingArguments

    def trained(wrapped: bool) -> nn.Module:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=8, report_to=[], seed=3,
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, **settings,
        )  # fmt: skip
        trainer = Trainer(model=built(GPT2), args=arguments, train_dataset=Lines())
        if wrapped:
            assert memscale.wrap(trainer, SMALLEST) is trainer
        trainer.train()
        assert isinstance(trainer.model, nn.Module)
        return trainer.model

    plain, planned = trained(False), trained(True)
    assert_equal(plain, planned)
    assert planned._memscale_executor.plan.active
    memscale.detach(planned)
    assert not any("_memscale_executor" in module.__dict__ for module in planned.modules())
    (planned.train()(**GPT2.batch(0))).loss.backward()
