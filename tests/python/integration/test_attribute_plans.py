# SPDX-License-Identifier: Apache-2.0
"""A step that was planned with one value of an attribute, and runs with another: one plan for each value."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import Config

X = torch.linspace(-1, 1, 8 * 16 * 32).view(8, 16, 32)


class Block(nn.Module):
    """An adapter that runs or not, by any of some attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.adapter = nn.Linear(32, 64, bias=False)
        self.enabled, self.mode, self.extra, self.active = True, "on", None, ["a"]
        self.label = ""
        self.cache: Tensor | None = None

    @property
    def is_on(self) -> bool:
        return self.enabled and self.mode == "on" and self.extra is None and "a" in self.active

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.ones(32)
        hidden = self.up(x)
        if self.is_on:
            hidden = torch.tanh(hidden + self.adapter(x))
        result: Tensor = x + self.down(torch.tanh(hidden)) * self.cache
        return result


def train(wrapped: bool, steps: int, change: Callable[[list[Any], int], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 8))
    if wrapped:
        memscale.wrap(model, Config(memory_budget=1, enable_logging=False))
    found = []
    for number in range(steps):
        change(list(model)[:3], number)
        model.zero_grad()
        loss = model(X + number).square().mean()
        loss.backward()
        found += [loss.detach(), *(value.grad for value in model.parameters() if value.grad is not None)]
    return found


def check(steps: int, change: Callable[[list[Any], int], None]) -> None:
    found, expected = train(True, steps, change), train(False, steps, change)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def every(name: str, values: list[Any]) -> Callable[[list[Any], int], None]:
    def change(blocks: list[Any], number: int) -> None:
        for block in blocks:
            setattr(block, name, values[number % len(values)])

    return change


def test_a_step_that_stays_as_it_is_is_planned_once(plans: list[object]) -> None:
    """Its forward fills a cache, which is no other step."""
    check(4, lambda blocks, number: None)
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("enabled", [True, False]),
        ("mode", ["on", "off"]),
        ("extra", [None, torch.ones(1)]),
        ("active", [["a"], ["b"], ["a", "b"]]),
    ],
)
def test_a_switch_between_steps_has_a_plan_for_each_value(
    name: str, values: list[Any], plans: list[object]
) -> None:
    check(3 * len(values), every(name, values))
    assert len(plans) == len(values)


def test_a_switch_in_one_block_of_several(plans: list[object]) -> None:
    check(6, lambda blocks, number: setattr(blocks[1], "enabled", number % 2 == 0))
    assert len(plans) == 2


def test_a_list_that_is_changed_in_place(plans: list[object]) -> None:
    def change(blocks: list[Any], number: int) -> None:
        blocks[0].active[:] = ["a"] if number < 2 else []

    check(4, change)
    assert len(plans) == 2


def test_a_word_that_changes_at_every_step_is_planned_for_no_more(plans: list[object]) -> None:
    def change(blocks: list[Any], number: int) -> None:
        blocks[0].label = f"step {number}"

    check(8, change)
    assert len(plans) <= 4  # the first, one with filled caches, and two that were the same as that


def test_a_number_that_counts_is_planned_for_no_more(plans: list[object]) -> None:
    def change(blocks: list[Any], number: int) -> None:
        blocks[0].steps = number
        blocks[1].rate = 1 / (1 + number)

    check(6, change)
    assert len(plans) <= 4  # the attributes come once


class Shallow(nn.Module):
    """Runs as many of its blocks as a number says: on itself, or in its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.depth, self.config = 1, SimpleNamespace(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: min(self.depth, self.config.depth)]:
            x = block(x)
        return x


@pytest.mark.parametrize("inner", [False, True])
def test_a_number_that_decides_how_much_runs(inner: bool, plans: list[object]) -> None:
    model = Shallow()
    model.depth = 4 if inner else 1
    memscale.wrap(model, Config(memory_budget=1, enable_logging=False))
    for depth in (1, 1, 4, 4, 2, 1, 4):
        (model.config if inner else model).depth = depth
        model(X).square().mean().backward()
        model.zero_grad()
        active = {choice.module.split(".")[1] for choice in memscale.executor_of(model).plan.active}
        assert active <= {str(number) for number in range(depth)} and len(active) >= depth - 1
    assert len(plans) <= 4  # a cache of the blocks that run first may come to one


def test_a_switch_beside_a_word_that_changes(plans: list[object]) -> None:
    """The word must not hide the switch, nor ask for plans for ever."""

    def change(blocks: list[Any], number: int) -> None:
        blocks[0].label = f"step {number}"
        blocks[0].enabled = number % 2 == 0

    check(24, change)
    assert len(plans) < 21
