# SPDX-License-Identifier: Apache-2.0
"""The zoo: small models of every kind that the promises are tested on, and what to feed them.

Small, but with activations that outweigh the weights: otherwise there would be nothing to checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 96
WIDTH = 32
ROWS = 8
LENGTH = 48

Batch = dict[str, Any] | tuple[Any, ...]


def own_loss(output: Any) -> Tensor:
    """The loss of a model that computes it itself."""
    loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    assert isinstance(loss, Tensor)
    return loss


def mean_square(output: Any) -> Tensor:
    return output.float().pow(2).mean()


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Attributes:
        name: of the case.
        build: makes the model; called after `torch.manual_seed`.
        batch: makes the batch of a step.
        loss: makes the loss of the model's output.
        profile: "static", "empirical", or None where either will do.
        checkpoints: whether the smallest plan must checkpoint something.
        frozen: prefixes of parameters that a partly frozen model trains without.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor] = own_loss
    profile: str | None = "static"
    checkpoints: bool = True
    frozen: tuple[str, ...] = ()


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(step: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator(step))


def language_batch(step: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    ids = tokens(step, rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def numbers(*shape: int) -> Callable[[int], tuple[Tensor]]:
    return lambda step: (torch.randn(*shape, generator=generator(step)),)


def gpt2(layers: int = 3) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 4 * WIDTH,
    }
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=64))


_LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 3 * WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_LLAMA, attention_dropout=0.1))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 4 * WIDTH, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0)
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 4 * WIDTH,
    }
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, image_size=32, patch_size=4, num_labels=5))


def image_batch(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    pixels = torch.randn(rows, 3, 32, 32, generator=generator(step))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 5}


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}
    return MambaForCausalLM(
        MambaConfig(**sizes, use_mambapy=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    )


def _speech() -> nn.Module:
    from transformers import HubertConfig, HubertForCTC

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 4 * WIDTH,
    }
    convolutions = {
        "conv_dim": (16, 16),
        "conv_kernel": (8, 4),
        "conv_stride": (5, 4),
        "num_conv_pos_embeddings": 8,
    }
    masking = {
        "mask_time_prob": 0.3,
        "mask_time_length": 3,
        "layerdrop": 0.3,
        "num_conv_pos_embedding_groups": 2,
    }
    return HubertForCTC(HubertConfig(**sizes, **convolutions, **masking, vocab_size=16, pad_token_id=0))


def speech_batch(step: int) -> dict[str, Tensor]:
    sound = torch.randn(4, 1600, generator=generator(step))
    return {"input_values": sound, "labels": torch.randint(1, 16, (4, 6), generator=generator(step))}


class ConvBlock(nn.Module):
    """BatchNorm, in-place ReLU, dropout, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers, nn.Dropout(0.1), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + x)


class ConvNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(width) for _ in range(4)))
        self.head = nn.Linear(width, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        features = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return {"loss": F.cross_entropy(self.head(features), labels)}


class Recurrent(nn.Module):
    """A language model around an LSTM or a GRU; the loss is left to the loop."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        logits: Tensor = self.head(hidden)
        return logits


def next_token_loss(logits: Tensor) -> Tensor:
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, torch.arange(len(flat)) % VOCABULARY)


MAIN = (
    Case("gpt2", gpt2, language_batch, frozen=("transformer.wte", "transformer.wpe", "transformer.h.0")),
    Case("bert", _bert, language_batch, frozen=("bert.embeddings", "bert.encoder.layer.0")),
    Case("llama", _llama, language_batch, frozen=("model.layers.1",)),
    Case(
        "t5",
        _t5,
        lambda step: {key: value for key, value in language_batch(step).items()},
        frozen=("encoder",),
    ),
    Case("vit", _vit, image_batch, frozen=("vit.embeddings",)),
    Case("convnet", ConvNet, image_batch, frozen=("stem", "blocks.0")),
    Case(
        "lstm",
        lambda: Recurrent(nn.LSTM),
        lambda step: (tokens(step),),
        next_token_loss,
        frozen=("embedding",),
    ),
)
"""The models for which every promise is tested, memory included."""

LIBRARY = (
    Case("mixtral", _mixtral, language_batch, profile=None),
    Case("mamba", _mamba, lambda step: {k: v[:4, :16] for k, v in language_batch(step).items()}),
    Case("hubert", _speech, speech_batch, profile=None),
    Case("gru", lambda: Recurrent(nn.GRU), lambda step: (tokens(step, length=12),), next_token_loss),
)
"""More models from libraries, for equality."""


def case(name: str) -> Case:
    """A case of the zoo by its name."""
    return next(case for case in MAIN + LIBRARY if case.name == name)
