# SPDX-License-Identifier: Apache-2.0
"""What a forward changes outside of its modules is changed once, and a recompute finds what that found."""

from __future__ import annotations

import collections
import gc
import operator
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.state.loop_tables import KeptBindings

WIDTH = 16
COUNT = 0
SCALE = 1.0
LAZY: Any = None
SHARED = {"calls": 0, "inner": {"list": [0]}}
NAMES: set[str] = set()
TALLY = collections.Counter[torch.Size]()
LAST: Any = None
NUMPY: Any = None
PYTHON = random.Random()
LOCAL = threading.local()


class Registry:
    """A class of no module."""

    count = 0
    cache: dict[int, Tensor] = {}  # noqa: RUF012


def counts_in_closure() -> tuple[Callable[[], int], Callable[[int], None]]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    def reset(value: int) -> None:
        nonlocal number
        number = value

    return count, reset


count_closed, reset_closed = counts_in_closure()


def helper(x: Tensor, cache: dict[str, int] = {"calls": 0}) -> Tensor:  # noqa: B006
    cache["calls"] += 1
    helper.calls = getattr(helper, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * (1 + cache["calls"] % 3 + helper.calls % 2)  # type: ignore[attr-defined]


def reset() -> None:
    global COUNT, SCALE, LAZY, LAST, NUMPY
    COUNT, SCALE, LAZY, LAST, NUMPY = 0, 1.0, None, None, np.random.default_rng(3)
    SHARED.update(calls=0, inner={"list": [0]})
    NAMES.clear()
    TALLY.clear()
    PYTHON.seed(1)
    vars(LOCAL).clear()
    Registry.count = 0
    Registry.cache = {}
    reset_closed(0)
    vars(helper).clear()
    helper.__defaults__[0]["calls"] = 0  # type: ignore[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.mix(self.up(x)).sin()))


class Counts(Block):
    """Numbers that count up, each in another kind of place, and decide what is computed."""

    def mix(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        SHARED["calls"] += 1  # type: ignore[operator]
        SHARED["inner"]["list"][0] += 1  # type: ignore[index]
        NAMES.add(str(COUNT))
        TALLY[x.shape] += 1
        Registry.count += 1
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        total = COUNT + SHARED["calls"] + len(NAMES) + TALLY[x.shape] + Registry.count + LOCAL.calls
        return helper(x) * (1 + total % 7 + count_closed() % 2)


class Draws(Block):
    """Random numbers from generators of its own."""

    def mix(self, x: Tensor) -> Tensor:
        return x * float(NUMPY.random()) * PYTHON.random()


class FillsLazily(Block):
    """The first call of a step makes what all others take, with a graph of its own."""

    def mix(self, x: Tensor) -> Tensor:
        global LAZY
        if LAZY is None:
            LAZY = torch.linspace(0, 1, 4 * WIDTH).exp()
            Registry.cache[0] = LAZY.cos()
        return x * LAZY * Registry.cache[0]


class Keeps(Block):
    """Each call leaves something with a graph behind."""

    def mix(self, x: Tensor) -> Tensor:
        global LAST
        LAST = x.sum(0).sin()
        return x


class SetsAndResets(nn.Sequential):
    """A global holds for the time of a forward."""

    class Inside(Block):
        def mix(self, x: Tensor) -> Tensor:
            return x * SCALE

    def forward(self, x: Tensor) -> Tensor:
        global SCALE
        SCALE = 0.5
        try:
            return super().forward(x)
        finally:
            SCALE = 1.0


class SetsTensor(SetsAndResets):
    """A global is a tensor for the time of a forward."""

    def __init__(self, *blocks: nn.Module, has_graph: bool) -> None:
        super().__init__(*blocks)
        self.made = nn.Parameter(torch.rand(4 * WIDTH))
        self.has_graph = has_graph

    def forward(self, x: Tensor) -> Tensor:
        global SCALE
        made: Any = self.made.sigmoid()
        SCALE = made if self.has_graph else made.detach()
        try:
            return nn.Sequential.forward(self, x)
        finally:
            SCALE = 1.0


def state() -> list[Any]:
    """What is left in the process."""
    local = vars(LOCAL).copy()
    inner: Any = SHARED["inner"]
    kept = [
        COUNT,
        SCALE,
        SHARED["calls"],
        inner["list"][0],
        sorted(NAMES),
        dict(TALLY),
        Registry.count,
        local,
    ]
    kept += [vars(helper).copy(), dict(helper.__defaults__[0]), len(Registry.cache)]  # type: ignore[index]
    kept += [PYTHON.getstate(), str(NUMPY.bit_generator.state)]
    return kept


def trained(build: Callable[[], nn.Module], wrapped: bool, clear: bool = False) -> list[Any]:
    reset()
    torch.manual_seed(0)
    model, seen = build(), list[Any]()
    if wrapped:
        memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    for step in range(3):
        torch.manual_seed(step)
        if clear:
            global LAZY
            LAZY = None
        loss = model(torch.randn(256, WIDTH)).square().mean()
        seen.append(state())
        loss.backward()
        seen += [loss.item(), state()]
        seen += [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    if wrapped and Keeps not in map(type, model):  # what that one leaves behind is held anyway
        assert memscale.executor_of(model).plan.active
    return seen


@pytest.mark.parametrize("kind", [Counts, Draws, FillsLazily, Keeps])
def test_places_of_the_process(kind: type[Block]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(4)))

    assert trained(build, wrapped=False) == trained(build, wrapped=True)


def test_a_cache_that_each_step_fills_anew() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(FillsLazily() for _ in range(4)))

    assert trained(build, wrapped=False, clear=True) == trained(build, wrapped=True, clear=True)


def test_a_global_that_holds_for_a_forward() -> None:
    def build() -> nn.Module:
        return SetsAndResets(*(SetsAndResets.Inside() for _ in range(4)))

    assert trained(build, wrapped=False) == trained(build, wrapped=True)


@pytest.mark.parametrize("has_graph", [False, True])
def test_a_tensor_that_is_global_for_a_forward(has_graph: bool) -> None:
    def build() -> nn.Module:
        return SetsTensor(*(SetsAndResets.Inside() for _ in range(4)), has_graph=has_graph)

    assert trained(build, wrapped=False) == trained(build, wrapped=True)


def test_forwards_without_backward_do_not_hold_one_another() -> None:
    global LAST
    reset()
    model = nn.Sequential(*(Keeps() for _ in range(4)))
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    model(torch.randn(256, WIDTH)).sum().backward()
    kept = []
    for _ in range(4):
        model(torch.randn(256, WIDTH))
        kept.append(weakref.ref(LAST))
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, True, False]
    LAST = None


def test_only_names_are_looked_at_where_nothing_changes() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    memscale.wrap(model, memscale.Config(memory_budget=1), sample_input=(torch.randn(256, WIDTH),))
    places = memscale.executor_of(model).planned.trace.changes.in_process
    assert {type(place) for place in places} == {KeptBindings}
    tables = [table for place in places for table in place.tables()]
    assert all(map(operator.is_, tables, (table for place in places for table in place.tables())))
