# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer has the loss alone when backward begins: predictions count no logits then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import memscale
from trainer_samples import arguments
from zoo.training import peak_bytes

VOCABULARY, LENGTH, BATCH = 6000, 64, 8
LOGITS = BATCH * LENGTH * VOCABULARY * 4


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))


def _trainer(folder: Path, kind: type[Any] | None = None, **settings: Any) -> Any:
    from transformers import Trainer

    return (kind or Trainer)(
        model=_model(), args=arguments(folder, optim="adamw_torch", **settings), train_dataset=Texts()
    )


def _held(trainer: Any) -> int:
    values = (*trainer.model.parameters(), *trainer.model.buffers())
    return sum({value.untyped_storage().data_ptr(): value.nbytes for value in values}.values())


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulation"])
def test_the_logits_are_gone_in_backward(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, **settings)
    memscale.wrap(trainer, memscale.Config(memory_budget="1GiB", enable_logging=False))
    predicted = memscale.executor_of(trainer.model).plan.predicted.allocated_peak_bytes
    held = _held(trainer)
    measured = held + peak_bytes(trainer.train)
    assert measured <= predicted * 1.001
    assert predicted <= measured * 1.02
    assert memscale.executor_of(trainer.model).plan.predicted.allocated_peak_bytes == predicted


def test_a_loss_of_its_own_may_hold_them(tmp_path: Path) -> None:
    from transformers import Trainer

    class Keeping(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.latest = model(**inputs)
            return self.latest.loss

    peaks = []
    for kind in (Trainer, Keeping):
        trainer = _trainer(tmp_path, kind)
        batch = dict(torch.utils.data.default_collate([Texts()[index] for index in range(BATCH)]))
        config = memscale.Config(memory_budget="1GiB", enable_logging=False)
        memscale.wrap(trainer, config, sample_input=batch)
        peaks.append(memscale.executor_of(trainer.model).plan.predicted.allocated_peak_bytes)
    assert peaks[1] - peaks[0] == LOGITS
