# SPDX-License-Identifier: Apache-2.0
"""The training steps that prediction and stand-in runtime are compared on. Random weights; nothing is
downloaded.

Both sides import this file: one with the CPU build of PyTorch, one with the CUDA build on the stand-in
runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
"""Makes a model and the keyword arguments of one forward, both on the CPU."""


class Loss(nn.Module):
    """A module whose output is a tensor, and cross-entropy; gives a `.loss` like a language model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.body(x)
        return {"loss": F.cross_entropy(out.flatten(0, -2), labels.flatten())}


class Recurrent(nn.Module):
    """Embedding, recurrent layers, head."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, width)
        self.rnn = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def _tokens(words: int, batch: int, length: int) -> Tensor:
    return (torch.arange(batch * length) * 7919 % words).reshape(batch, length)


def _lm(make: Callable[[], nn.Module], words: int, batch: int, length: int) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        ids = _tokens(words, batch, length)
        return make(), {"input_ids": ids, "labels": ids.clone()}

    return build


def _gpt2(attention: str = "sdpa", dropout: float = 0.1, **sizes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    values = {"n_layer": 4, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024} | sizes
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**values, **drops, use_cache=False, attn_implementation=attention))


def _bert(dropout: float = 0.1) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(num_hidden_layers=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def _llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(values | sizes)))


def _qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=896,
            intermediate_size=2432,
            num_hidden_layers=4,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=50000,
            use_cache=False,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(num_layers=3, d_ff=2048, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    )


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=4, num_labels=1000))
    return model, {"pixel_values": torch.zeros(8, 3, 224, 224), "labels": torch.arange(8)}


def _moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=4,
            vocab_size=8000,
            use_cache=False,
        )
    )


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    body = nn.Sequential(
        nn.Linear(1024, 4096),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(4096, 4096),
        nn.GELU(),
        nn.Linear(4096, 1000),
    )
    return Loss(body), {"x": torch.zeros(256, 1024), "labels": torch.arange(256)}


def _encoder() -> tuple[nn.Module, dict[str, Any]]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    body = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(512, 1000))
    return Loss(body), {"x": torch.zeros(8, 256, 512), "labels": _tokens(1000, 8, 256)}


def _recurrent(kind: type[nn.RNNBase]) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        ids = _tokens(2000, 16, 64)
        return Loss(Recurrent(kind)), {"x": ids, "labels": ids.clone()}

    return build


def _conv() -> tuple[nn.Module, dict[str, Any]]:
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, 1, 1),
        nn.GroupNorm(8, 64),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return Loss(body), {"x": torch.zeros(16, 3, 64, 64), "labels": torch.arange(16) % 10}


MODELS: dict[str, Build] = {
    "gpt2": _lm(_gpt2, 50257, 4, 256),
    "gpt2-nodrop": _lm(lambda: _gpt2(dropout=0.0), 50257, 4, 256),
    "gpt2-eager": _lm(lambda: _gpt2("eager"), 50257, 4, 256),
    "bert": _lm(_bert, 30522, 8, 128),
    "llama": _lm(_llama, 32000, 4, 512),
    "qwen2": _lm(_qwen, 50000, 2, 512),
    "t5": _lm(_t5, 32128, 8, 128),
    "vit": _vit,
    "moe": _lm(_moe, 8000, 4, 256),
    "mlp": _mlp,
    "encoder": _encoder,
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "conv": _conv,
}
"""Small models of many kinds, with one batch each."""

PRECISIONS = ("fp32", "bf16-autocast", "bf16")


@dataclass(frozen=True)
class Case:
    """One training step.

    Attributes:
        model: a key of `MODELS`.
        precision: one of `PRECISIONS`: what the forward runs in.
        optimizer: "adamw", "adamw-fused", "adamw-loop", "sgd", "adam", ...
        share: memory budget as a share of the plain peak, in percent; 0: no MemScale.
    """

    model: str
    precision: str = "fp32"
    optimizer: str = "adamw"
    share: int = 0

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """Model and batch on the CPU, in the dtype of the case."""
        torch.manual_seed(0)
        model, batch = MODELS[self.model]()
        model.train()
        if self.precision == "bf16":
            model.bfloat16()
            batch = {
                key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()
            }
        return model, batch

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the case."""
        name, _, flavour = self.optimizer.partition("-")
        kinds: dict[str, Any] = {
            "adamw": torch.optim.AdamW,
            "adam": torch.optim.Adam,
            "sgd": torch.optim.SGD,
            "momentum": torch.optim.SGD,
            "rmsprop": torch.optim.RMSprop,
            "adagrad": torch.optim.Adagrad,
            "nadam": torch.optim.NAdam,
            "adafactor": torch.optim.Adafactor,
        }
        options: dict[str, Any] = {"lr": 1e-4}
        if name == "momentum":
            options["momentum"] = 0.9
        if flavour == "fused":
            options["fused"] = True
        elif flavour == "loop":
            options["foreach"] = False
        return kinds[name](model.parameters(), **options)

    def autocast(self, device: str) -> torch.autocast:
        """The context that the forward runs in."""
        return torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16-autocast")

    @classmethod
    def parse(cls, text: str) -> Case:
        """`model[:precision[:optimizer[:share]]]`."""
        parts = text.split(":")
        return cls(*parts[:3], share=int(parts[3]) if len(parts) > 3 else 0)
