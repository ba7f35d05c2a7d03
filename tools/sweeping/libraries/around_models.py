# SPDX-License-Identifier: Apache-2.0
"""Small models for what loops and libraries do around models: every kind of layer that situations need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 24, 32, 67


class Block(nn.Module):
    """Attention by PyTorch's function, dropout, an MLP."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Transformer(nn.Module):
    """Ids to logits; the head is tied to the embedding where `tied`."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if x.dtype == torch.long else x
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class ConvNet(nn.Module):
    """Images to classes, with batch normalisation and dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.1)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Mlp(nn.Module):
    """Smooth everywhere and without dropout: for second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


@dataclass(frozen=True)
class Kind:
    """A model and its batches.

    Attributes:
        build: the model.
        batch: step number → inputs and targets.
        block: names of the modules that repeat.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    block: str = "blocks"


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def _ids(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=_generator(step))
    return ids[:, :-1], ids[:, 1:]


def _images(step: int) -> tuple[Tensor, Tensor]:
    generator = _generator(step)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(
        0, 10, (BATCH,), generator=generator
    )


def _rows(step: int) -> tuple[Tensor, Tensor]:
    generator = _generator(step)
    return torch.randn(64, WIDTH, generator=generator), torch.randint(0, 10, (64,), generator=generator)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3,
        n_embd=WIDTH,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


KINDS: dict[str, Kind] = {
    "transformer": Kind(Transformer, _ids),
    "tied": Kind(lambda: Transformer(tied=True), _ids),
    "convnet": Kind(ConvNet, _images),
    "mlp": Kind(Mlp, _rows),
    "gpt2": Kind(_gpt2, _ids, "transformer.h"),
    "llama": Kind(_llama, _ids, "model.layers"),
}


def logits(output: Any) -> Tensor:
    """Of any of the models."""
    found = getattr(output, "logits", output)
    assert isinstance(found, Tensor)
    return found


def loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    scores = logits(output)
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())
