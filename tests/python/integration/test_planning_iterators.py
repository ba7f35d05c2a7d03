# SPDX-License-Identifier: Apache-2.0
"""Planning takes nothing from iterators, wherever they lie, and leaves modules alone that a model hides."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import ProfileError
from memscale.state.iterators import copy_of

WIDTH = 8
GLOBAL: dict[str, Any] = {}

MAKERS: dict[str, Callable[[], Iterator[Any]]] = {
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "cycle of a chain": lambda: itertools.cycle(itertools.chain([1], [2], [3])),
    "list": lambda: iter([1, 2, 3, 4, 5]),
    "map": lambda: map(str, [1, 2, 3, 4]),
    "zip": lambda: zip([1, 2, 3], itertools.count(), strict=False),
    "enumerate": lambda: enumerate("abcdef"),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "islice": lambda: itertools.islice(itertools.count(), 2, 9),
    "tee": lambda: itertools.tee([1, 2, 3, 4])[0],
    "accumulate": lambda: itertools.accumulate([1, 2, 3]),
}


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_takes_nothing_from_the_original(kind: str, taken: int) -> None:
    original, other = MAKERS[kind](), MAKERS[kind]()
    for _ in range(taken):
        next(original)
        next(other)
    again, want = copy_of(original), list(itertools.islice(other, 5))
    assert list(itertools.islice(again, 5)) == want
    assert list(itertools.islice(original, 5)) == want


class Holder:
    """An object that nobody knows."""


class Slotted:
    __slots__ = ("inside",)


def in_dict(model: Any, iterator: Any) -> Callable[[], Any]:
    model.held = {"inner": {"iterator": iterator}}
    return lambda: model.held["inner"]["iterator"]


def in_list(model: Any, iterator: Any) -> Callable[[], Any]:
    model.held = [[iterator]]
    return lambda: model.held[0][0]


def in_object(model: Any, iterator: Any) -> Callable[[], Any]:
    model.held = Holder()
    model.held.inside = iterator
    return lambda: model.held.inside


def in_slot(model: Any, iterator: Any) -> Callable[[], Any]:
    model.held = Slotted()
    model.held.inside = iterator
    return lambda: model.held.inside


def in_global(model: Any, iterator: Any) -> Callable[[], Any]:
    GLOBAL["iterator"] = iterator
    return lambda: GLOBAL["iterator"]


def in_closure(model: Any, iterator: Any) -> Callable[[], Any]:
    return lambda: iterator


PLACES = [in_dict, in_list, in_object, in_slot, in_global, in_closure]


class Taking(nn.Module):
    def __init__(self, place: Callable[..., Any], iterator: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.find = place(self, iterator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) * next(self.find())))


@pytest.mark.parametrize("place", PLACES)
def test_an_iterator_stays_where_it_is(place: Callable[..., Any]) -> None:
    iterator = itertools.cycle([1.0, 0.5, 0.25])
    model = Taking(place, iterator)
    memscale.wrap(model, memscale.Config(memory_budget=1), sample_input=(torch.randn(4, WIDTH),))
    assert model.find() is iterator
    assert next(iterator) == 1.0


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_not_used_up(place: Callable[..., Any]) -> None:
    generator = (value for value in (1.0, 0.5, 0.25))
    model = Taking(place, generator)
    with pytest.raises(ProfileError, match="cannot be copied"):
        memscale.wrap(model, memscale.Config(memory_budget=1), sample_input=(torch.randn(4, WIDTH),))
    assert model.find() is generator
    assert next(generator) == 1.0


class WithTeacher(nn.Module):
    """Needs values, so a real step is recorded."""

    def __init__(self, is_global: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.hidden = [] if is_global else [copy.deepcopy(self.net)]
        GLOBAL["teacher"] = copy.deepcopy(self.net)

    @property
    def teacher(self) -> nn.Module:
        return self.hidden[0] if self.hidden else GLOBAL["teacher"]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if x.sum().item() > 1e9:
                x = x + 1
            for mean, value in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.data = mean.data * 0.9 + value.data * 0.2
                mean.mul_(0.99)
            target = self.teacher(x)
        return self.net(x) - target


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hidden_teacher_is_as_it_was(is_global: bool) -> None:
    model = WithTeacher(is_global)
    before = [value.clone() for value in model.teacher.parameters()]
    memory = [value.data_ptr() for value in model.teacher.parameters()]
    memscale.wrap(model, memscale.Config(memory_budget=1), sample_input=(torch.randn(4, WIDTH),))
    assert memscale.executor_of(model).planned.trace.method == "empirical"
    assert all(map(torch.equal, before, model.teacher.parameters()))
    assert memory == [value.data_ptr() for value in model.teacher.parameters()]
