# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop changes through `.data` between forward and backward, as plain PyTorch lets it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.techniques.checkpoint import data_reads

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 4 * WIDTH, bias=False)

    def merge(self) -> None:
        self.up.weight.data += self.high.weight.data @ self.low.weight.data

    def unmerge(self) -> None:
        self.up.weight.data -= self.high.weight.data @ self.low.weight.data

    def forward(self, x: Tensor) -> Tensor:
        scale = self.down.bias.data.sum()  # a read of the model's own
        return x + self.down(nn.functional.gelu(self.up(x) + self.high(self.low(x)))) * scale.cos()


class Model(nn.Sequential):
    """A block has a weight of another one, and one runs twice."""

    def __init__(self) -> None:
        blocks = [Block() for _ in range(4)]
        blocks[2].down.weight = blocks[1].down.weight
        super().__init__(*blocks, blocks[0])


def halved(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def merged_for_a_look(model: Any) -> None:
    for block in model:
        block.merge()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    for block in model:
        block.unmerge()


def zeroed(model: Any) -> None:
    model[1].up.bias.data.zero_()


def given(model: Any) -> None:
    model[1].up.weight.data = model[2].up.weight.detach() * 0.5


def moved(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()


def to_and_fro(model: Any) -> None:
    model.double().float()


CHANGES: dict[str, Callable[[Any], None]] = {
    "all": halved,
    "merge": merged_for_a_look,
    "one": zeroed,
    "other data": given,
    "moved": moved,
    "to another type and back": to_and_fro,
}


def wrapped(model: nn.Module, x: Tensor) -> None:
    memscale.wrap(model, memory_budget=1, sample_input=x, force_optimize=True, enable_logging=False)
    assert memscale.executor_of(model).plan.active


def trained(change: Callable[[Any], None], is_wrapped: bool, forwards: int) -> list[Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if is_wrapped:
        wrapped(model, torch.randn(256, WIDTH))
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = torch.zeros(())
        for _ in range(forwards):
            loss = loss + model(torch.randn(256, WIDTH)).square().mean()
            change(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        found += [loss.item(), *(value.tolist() for value in model.parameters())]
        optimizer.zero_grad()
    if is_wrapped:
        memscale.detach(model)
    return found


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_written_between_forward_and_backward(kind: str, forwards: int) -> None:
    change = CHANGES[kind]
    assert trained(change, is_wrapped=True, forwards=forwards) == trained(
        change, is_wrapped=False, forwards=forwards
    )


class Normalises(Block):
    """From some step on."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        data = self.up.weight.data
        norm = data.norm(dim=1, keepdim=True)
        if Normalises.how == "in place":
            data.div_(norm)
        elif Normalises.how == "other data":
            self.up.weight.data = data / norm
        return super().forward(x)


@pytest.mark.parametrize("how", ["in place", "other data"])
def test_a_forward_that_begins_to_write(how: str) -> None:
    def run(is_wrapped: bool) -> list[Any]:
        torch.manual_seed(0)
        model, found = nn.Sequential(*(Normalises() for _ in range(4))), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if is_wrapped:
            wrapped(model, torch.randn(256, WIDTH))
        for step in range(4):
            Normalises.how = how if step > 1 else ""
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(256, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            found += [loss.item(), *(value.tolist() for value in model.parameters())]
        Normalises.how = ""
        if is_wrapped:
            memscale.detach(model)
        return found

    assert run(is_wrapped=True) == run(is_wrapped=False)


def test_a_loop_that_reads_nothing_pays_nothing() -> None:
    model, x = Model(), torch.randn(256, WIDTH)
    wrapped(model, x)
    loss = model(x).sum() + model(x).sum()
    waiting = [copies for copies in data_reads._waiting if copies.lacks(model[1].up.weight)]
    assert waiting
    assert not any(copies._before for copies in waiting)
    loss.backward()
    assert not any(copies._before for copies in waiting)
    del waiting, loss
    gc.collect()
    assert not [copies for copies in data_reads._waiting if copies.lacks(model[1].up.weight)]
    memscale.detach(model)


def test_the_attribute_is_as_before_after_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    if "data" in vars(nn.Parameter):  # another test has left a model attached
        monkeypatch.delattr(nn.Parameter, "data")
    monkeypatch.setattr(data_reads, "_watched", weakref.WeakSet())
    model = Model()
    wrapped(model, torch.randn(256, WIDTH))
    assert "data" in vars(nn.Parameter)
    memscale.detach(model)
    assert "data" not in vars(nn.Parameter)
