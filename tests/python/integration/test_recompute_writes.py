# SPDX-License-Identifier: Apache-2.0
"""What blocks begin to write in place after a plan was made is written once per step, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.techniques.checkpoint.written_tensors import tensors_beside
from zoo.training import SMALLEST

WIDTH = 32
STEPS, BEGINS = 5, 3

_held = [torch.zeros(4)]
_large = torch.zeros(1 << 15)


class Global:
    """A tensor in a global list."""

    @staticmethod
    def tensors() -> list[Tensor]:
        return [_held[0]]


class LargeGlobal:
    """A tensor too large to be copied at each call."""

    @staticmethod
    def tensors() -> list[Tensor]:
        return [_large]


class Attribute:
    """A plain attribute, beside an entry of a dictionary."""

    def __init__(self) -> None:
        self.count = torch.zeros(4)
        self.counts = {"other": torch.zeros(4)}

    def tensors(self) -> list[Tensor]:
        return [self.count, self.counts["other"]]


class Teacher:
    """A module that is hidden in a list, with children of its own."""

    def __init__(self) -> None:
        self.hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))]
        nn.init.constant_(self.hidden[0][0].weight, 1.0)
        nn.init.constant_(self.hidden[0][1][0].weight, 2.0)

    def tensors(self) -> list[Tensor]:
        return [self.hidden[0][0].weight, self.hidden[0][1][0].weight]


class Block(nn.Module):
    """An MLP that writes to tensors first of all, once it has begun to."""

    def __init__(self, place: Any, way: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.place, self.way = place, way

    def forward(self, x: Tensor) -> Tensor:
        if Block.begun:
            for tensor in self.place.tensors():
                if self.way == "data":
                    tensor.data.mul_(0.5).add_(1.0)
                else:
                    with torch.no_grad():
                        tensor.mul_(0.5).add_(1.0)
        hidden: Tensor = self.narrow(torch.relu(self.wide(x)))
        return x + hidden

    begun = False


def _run(kind: type, way: str, wrapped: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """Gradients of all steps, contents and versions in the end, and how many blocks were recomputed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind(), way) for _ in range(3)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(256, WIDTH)
    for tensor in (*_held, _large):
        tensor.zero_()
    if wrapped:
        Block.begun = False
        memscale.wrap(model, SMALLEST, sample_input=x)
    gradients = []
    for step in range(STEPS):
        Block.begun = step >= BEGINS
        model(x).square().mean().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    recomputed = len(memscale.executor_of(model).plan.active) if wrapped else 0
    tensors = [tensor for block in list(model)[:3] for tensor in block.place.tensors()]
    contents = [tensor.detach().clone() for tensor in tensors]
    if wrapped:
        memscale.detach(model)
    return gradients, contents, recomputed


@pytest.mark.parametrize("way", ["no_grad", "data"])
@pytest.mark.parametrize("kind", [Global, LargeGlobal, Attribute, Teacher])
def test_what_begins_later_is_written_once(kind: type, way: str) -> None:
    gradients, contents, _ = _run(kind, way, wrapped=False)
    found, held, recomputed = _run(kind, way, wrapped=True)
    assert recomputed
    assert all(map(torch.equal, found, gradients))
    assert all(map(torch.equal, held, contents))


def test_versions_move_as_in_plain() -> None:
    before = _large._version
    _run(LargeGlobal, "no_grad", wrapped=False)
    plain = _large._version - before
    before = _large._version
    _run(LargeGlobal, "no_grad", wrapped=True)
    assert _large._version - before == plain


def test_a_model_that_its_layers_know_is_not_walked_through() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    teacher = nn.Linear(8, 8)
    assert tensors_beside([model[1], model[1][0]], [model]) == []
    assert list(map(id, tensors_beside([model[1]], [teacher]))) == [id(teacher.weight), id(teacher.bias)]
