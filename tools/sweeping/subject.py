# SPDX-License-Identifier: Apache-2.0
"""What a library contributes: names of its models, and how to build one and make a batch for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Recipe = dict[str, Any]
"""What `Library.make` needs beside the name, found out by trying. It travels as JSON."""

Attempts = Generator[Recipe, str, None]
"""Recipes to try, best first; each is answered by the error that it ended with."""


class Unsupported(Exception):
    """A class of a library that is no model to train; the message is the reason for the table."""


@dataclass(frozen=True)
class Made:
    """A model ready to train.

    Attributes:
        model: in training mode.
        batch: step number → positional and keyword arguments of `model`.
        loss: output → scalar.
    """

    model: nn.Module
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Tensor]


class Library(Protocol):
    """A module of `sweeping.libraries`."""

    def names(self) -> list[str]:
        """Every model, in an order that does not change."""

    def attempts(self, name: str) -> Attempts:
        """Recipes for one of them."""

    def make(self, name: str, recipe: Recipe) -> Made:
        """Builds it; raises whatever the library raises."""


def seed(number: int) -> None:
    """Every generator that a model may draw from."""
    import numpy

    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a nested output with their paths; objects such as caches are not looked into."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{path}.{field.name}")


def usual_loss(output: Any) -> Tensor:
    """The model's own loss where it has one, else cross entropy or, for images, the mean squared error.

    That is what MemScale assumes of a loss that it cannot see; with another, predictions would be compared
    with a step that they are not about.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own if own.dim() == 0 else own.mean()
    parts = [_usual(item) for _, item in leaves(output) if item.requires_grad and item.numel()]
    if not parts:
        raise Unsupported("no output depends on a trainable weight")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _usual(output: Tensor) -> Tensor:
    if output.is_complex():
        return output.abs().square().mean()
    if output.dim() < 2:
        return output.float().sum()
    if output.dim() >= 4:
        return F.mse_loss(output.float(), torch.zeros(output.shape))
    scores = output.float().flatten(0, -2)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
