# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers with a wrapped model: every bit, packed texts included."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from zoo.training import SMALLEST, same_bits

trl = pytest.importorskip("trl")

WORDS = [f"w{number}" for number in range(40)]
ROWS = 16


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(WORDS) + 3}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1))


def text(seed: int, length: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(length))


def data(**columns: Callable[[int], str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({name: [of(row) for row in range(ROWS)] for name, of in columns.items()})


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "max_length": 16,
    }  # fmt: skip


def fine_tuned(folder: Path, config: memscale.Config | None, **more: Any) -> Any:
    texts = data(text=lambda row: text(row, 5 + row % 20))
    arguments = trl.SFTConfig(**settings(folder), **more)
    trainer = trl.SFTTrainer(model(), arguments, train_dataset=texts, processing_class=tokenizer())
    return run(trainer, config)


def preferred(folder: Path, config: memscale.Config | None) -> Any:
    columns = {name: lambda row, at=at: f" {text(100 * at + row, 4 + row % 5)}" for at, name in enumerate(
        ("prompt", "chosen", "rejected"))}  # fmt: skip
    arguments = trl.DPOConfig(**settings(folder))
    trainer = trl.DPOTrainer(
        model(), model(), arguments, train_dataset=data(**columns), processing_class=tokenizer()
    )
    return run(trainer, config)


def run(trainer: Any, config: memscale.Config | None) -> Any:
    if config is not None:
        memscale.wrap(trainer, config)
    trainer.train()
    return trainer


def assert_same(plain: Any, planned: Any) -> None:
    logs = [[entry["loss"] for entry in it.state.log_history if "loss" in entry] for it in (plain, planned)]
    assert logs[0] == logs[1] and len(logs[0]) == 2
    pairs = zip(plain.model.state_dict().values(), planned.model.state_dict().values(), strict=True)
    assert all(same_bits(*pair) for pair in pairs)
    assert memscale.executor_of(planned.model).plan.active


PACKED = {"packing": True, "packing_strategy": "bfd", "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("more", [{}, PACKED], ids=["padded", "packed, accumulated"])
def test_supervised(more: dict[str, Any], tmp_path: Path) -> None:
    assert_same(fine_tuned(tmp_path, None, **more), fine_tuned(tmp_path, SMALLEST, **more))


def test_preferences(tmp_path: Path) -> None:
    """The reference model runs beside the one that is trained."""
    assert_same(preferred(tmp_path, None), preferred(tmp_path, SMALLEST))
