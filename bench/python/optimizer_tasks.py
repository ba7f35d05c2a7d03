# SPDX-License-Identifier: Apache-2.0
"""The tasks of `optimizer_convergence.py`: three small models with data that is made or read here.

    bytes     a language model over bytes, on the source text of Python's own standard library
    shapes    an image classifier: which of six shapes, somewhere in a noisy picture
    copy      sequence to sequence: an encoder and a decoder that copy symbols in reverse

The last two use label smoothing, so that a loss that has been reached is not zero and can be compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SMOOTHING = 0.1
_FILES = (
    "argparse",
    "ast",
    "codecs",
    "datetime",
    "difflib",
    "doctest",
    "enum",
    "functools",
    "inspect",
    "pathlib",
)


@dataclass
class Task:
    """A model and what it learns.

    Attributes:
        name: for the table.
        steps: to train.
        model: makes the model, with the random numbers of now.
        loss: of a model on a new batch that the generator draws; the second kind is held out.
        lr: highest learning rate.
    """

    name: str
    steps: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator, bool], Tensor]
    lr: float


def _text() -> Tensor:
    folder = Path(os.__file__).parent
    data = b"".join(
        (folder / f"{name}.py").read_bytes() for name in _FILES if (folder / f"{name}.py").exists()
    )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class _Decoder(nn.Module):
    """A transformer of few layers over symbols, causal."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of the next symbol."""
        length = symbols.shape[1]
        x = self.words(symbols) + self.places.weight[:length]
        mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
        logits: Tensor = self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))
        return logits


def language_model(length: int = 48, batch: int = 16) -> Task:
    """Bytes; the last tenth of the text is held out."""
    text = _text()
    edge = len(text) * 9 // 10

    def loss(model: nn.Module, generator: torch.Generator, held_out: bool) -> Tensor:
        low, high = (edge, len(text)) if held_out else (0, edge)
        begins = torch.randint(low, high - length - 1, (batch, 1), generator=generator)
        window = text[begins + torch.arange(length + 1)]
        return F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())

    return Task("bytes", 400, lambda: _Decoder(256, 96, 2, length), loss, 2e-3)


def _pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy pictures of 24 by 24 of discs, rings, squares, frames, crosses and triangles."""
    kinds = torch.randint(6, (count,), generator=generator)
    places = 8 + 8 * torch.rand(count, 2, 1, 1, generator=generator)
    size = 4 + 3 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.arange(24.0)
    dy, dx = grid.view(1, 24, 1) - places[:, 0], grid.view(1, 1, 24) - places[:, 1]
    round_, square = (dy.square() + dx.square()).sqrt(), torch.maximum(dy.abs(), dx.abs())
    shapes = [
        round_ < size,
        (round_ - size).abs() < 1.2,
        square < size,
        (square - size).abs() < 1.0,
        (torch.minimum(dy.abs(), dx.abs()) < 1.2) & (square < size),
        (dy.abs() < size) & (dx.abs() * 2 < dy + size),
    ]
    inside = torch.stack([shape.float() for shape in shapes], 1)[torch.arange(count), kinds]
    noise = torch.randn(count, 24, 24, generator=generator)
    return (inside + 0.4 * noise).unsqueeze(1), kinds


def classifier(batch: int = 32) -> Task:
    """Shapes in noise."""

    def model() -> nn.Module:
        stages: list[nn.Module] = []
        for before, after in ((1, 24), (24, 48), (48, 64)):
            stages += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        return nn.Sequential(*stages, nn.Flatten(), nn.Linear(64 * 9, 6))

    def loss(model: nn.Module, generator: torch.Generator, held_out: bool) -> Tensor:
        pictures, kinds = _pictures(batch, generator)
        logits = model(pictures.to(next(model.parameters()).dtype)).float()
        return F.cross_entropy(logits, kinds, label_smoothing=_SMOOTHING)

    return Task("shapes", 500, model, loss, 2e-3)


class _Copier(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words + 1, width), nn.Embedding(length, width)
        self.both = nn.Transformer(width, 4, 1, 1, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, words)
        self.begin = words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target, each from what is before it."""
        begin = torch.full_like(target[:, :1], self.begin)
        before = torch.cat([begin, target[:, :-1]], 1)
        places = self.places.weight[: source.shape[1]]
        mask = torch.full((target.shape[1],) * 2, -math.inf, dtype=places.dtype).triu(1)
        out = self.both(self.words(source) + places, self.words(before) + places, tgt_mask=mask)
        logits: Tensor = self.head(out)
        return logits


def copier(words: int = 24, length: int = 12, batch: int = 32) -> Task:
    """Symbols in reverse."""

    def loss(model: nn.Module, generator: torch.Generator, held_out: bool) -> Tensor:
        source = torch.randint(words, (batch, length), generator=generator)
        target = source.flip(1)
        logits = model(source, target).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=_SMOOTHING)

    return Task("copy", 500, lambda: _Copier(words, 64, length), loss, 2e-3)


TASKS = (language_model, classifier, copier)
