# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep something from one call to the next, so running them twice is not running them once."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.blocks import WIDTH, Block, Stack


class _Slots:
    __slots__ = ("later", "mean")

    def __init__(self) -> None:
        self.mean = torch.zeros(WIDTH)


class Statistic(Block):
    """Keeps a running statistic in a buffer, an attribute or a container: in place, or as a new tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.plain = torch.zeros(WIDTH)
        self.held = {"mean": torch.zeros(WIDTH)}
        self.listed = [torch.zeros(WIDTH)]
        self.slots = _Slots()

    def forward(self, x: Tensor) -> Tensor:
        new = 0.1 * x.detach().mean(0)
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(new)
        elif self.kind == "rebound":
            self.mean = 0.9 * self.mean + new
        elif self.kind == "plain":
            self.plain.mul_(0.9).add_(new)
        elif self.kind == "plain-rebound":
            self.plain = 0.9 * self.plain + new
        elif self.kind == "held":
            self.held["mean"].mul_(0.9).add_(new)
        elif self.kind == "held-rebound":
            self.held["mean"] = 0.9 * self.held["mean"] + new
        elif self.kind == "listed":
            self.listed[0].mul_(0.9).add_(new)
        elif self.kind == "listed-rebound":
            self.listed[0] = 0.9 * self.listed[0] + new
        elif self.kind == "slots":
            self.slots.mean = 0.9 * self.slots.mean + new
        others = self.held["mean"] + self.listed[0] + self.slots.mean
        return super().forward(x + self.mean + self.plain + others)


class Hidden(Block):
    """Has a module in a list, where nobody finds it, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.list = [nn.BatchNorm1d(WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.list[0](x) * self.list[0].num_batches_tracked


class Decays(Block):
    """Changes its weights before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(0.99)
        return super().forward(x)


class WrittenByParent(Stack):
    """A buffer that blocks read and the model changes after they ran."""

    def __init__(self) -> None:
        super().__init__(functools.partial(Statistic, "buffer"))
        self.register_buffer("scale", torch.ones(()))
        for block in self.blocks:
            block.kind, block.mean = "read", self.mean_of(block)

    @staticmethod
    def mean_of(block: nn.Module) -> Tensor:
        return block.get_buffer("mean")

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        for block in self.blocks:
            block.mean.add_(0.5)
        return out


class _Counter:
    number = 0

    def next(self) -> int:
        self.number += 1
        return self.number


def _closure() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Counting(Block):
    """Counts its calls, and computes with the count: a recompute would compute something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.number, self.object = 0, _Counter()
        self.counter: collections.Counter[str] = collections.Counter(before=2)
        self.nested: dict[str, list[int]] = {"calls": []}
        self.deep = {"a": {"b": {"c": {"d": {"calls": 0}}}}}
        self.iterator = itertools.count() if kind == "iterator" else None
        self.closure, self.method = _closure(), _Counter().next

    def forward(self, x: Tensor) -> Tensor:
        deepest = self.deep["a"]["b"]["c"]["d"]
        if self.kind == "number":
            self.number += 1
        elif self.kind == "object":
            self.object.number += 1
        elif self.kind == "counter":
            self.counter["now"] += self.counter["before"]
        elif self.kind == "nested":
            self.nested["calls"].append(1)
        elif self.kind == "deep":
            deepest["calls"] += 1
        calls = self.number + self.object.number + self.counter["now"] + len(self.nested["calls"])
        calls += deepest["calls"] + (0 if self.iterator is None else next(self.iterator))
        calls += self.closure() if self.kind == "closure" else 0
        calls += self.method() if self.kind == "method" else 0
        return super().forward(x) * (1 + 0.1 * calls)


def counting_class() -> type[Block]:
    """A new class that counts the calls of all its instances, and keeps what the last one saw."""

    class CountingClass(Block):
        calls, last = 0, torch.zeros(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            kind = type(self)
            kind.calls += 1
            last, kind.last = kind.last, x.detach().mean(0)
            return super().forward(x + last) * (1 + 0.1 * kind.calls)

    return CountingClass


class OwnGenerator(Block):
    """Draws from generators of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import numpy

        self.kind = kind
        self.torch_rng = torch.Generator().manual_seed(1)
        self.numpy_rng, self.python_rng = numpy.random.default_rng(1), random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return super().forward(x * torch.rand(x.shape, generator=self.torch_rng))
        drawn = self.numpy_rng.random() if self.kind == "numpy" else self.python_rng.random()
        return super().forward(x * (1 + float(drawn)))


class ChangesBatch(nn.Module):
    """Changes the batch that it is given."""

    def __init__(self, look: bool) -> None:
        super().__init__()
        self.look = look
        self.embedding, self.stack = nn.Embedding(64, WIDTH), Stack()

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        ids.add_(1)
        x.mul_(2)
        if self.look and float(x.sum()) > 1e9:
            return x
        return self.stack(self.embedding(ids) + x)
