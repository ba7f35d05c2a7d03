# SPDX-License-Identifier: Apache-2.0
"""Planning runs no backward through graphs that were there before it, and changes no object it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import ProfileError
from memscale.torchkit import earlier_graphs

CONFIG = memscale.Config(memory_budget=1, enable_logging=False)


class Holder:
    """An argument that is no container to PyTorch."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value


class Reads(nn.Module):
    """Is given a tensor with a graph inside an object."""

    __module__ = "memscale.test"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, held: Holder) -> Tensor:
        if held.value is None:
            raise ValueError
        return x + self.down(torch.tanh(self.up(x) * held.value))


class Keeps(Reads):
    """Keeps what it makes in an object, as caches do."""

    __module__ = "memscale.test"
    looks = False

    def forward(self, x: Tensor, held: Holder) -> Tensor:
        keys = self.up(x)
        if self.looks and keys.sum().item() > 1e9:
            raise ValueError
        if held.value is not None:
            keys = torch.tanh(keys * held.value)
        held.value = keys
        return x + self.down(torch.tanh(keys))


class LooksAtValues(Keeps):
    """The same, recorded by running it."""

    __module__ = "memscale.test"
    looks = True


class Net(nn.Module):
    """Blocks with one object each, or one for all."""

    __module__ = "memscale.test"

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor, held: list[Holder]) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, held[number % len(held)])
        return x


def same(train: Callable[[bool], list[Tensor]]) -> bool:
    plain, planned = train(False), train(True)
    return len(plain) == len(planned) and all(map(torch.equal, plain, planned))


@pytest.mark.parametrize("shared", [False, True], ids=["another model's", "the model's leaf too"])
def test_a_tensor_with_a_graph_in_an_object(shared: bool) -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, maker, gain = Net(Reads), nn.Linear(16, 64), torch.ones(64, requires_grad=True)
        fired: list[int] = []
        if wrapped:
            memscale.wrap(model, CONFIG)
        x = torch.randn(8, 16)
        value = torch.tanh(maker(x) * gain)
        value.register_hook(lambda grad: fired.append(1))
        held = [Holder(value), Holder(gain)] if shared else [Holder(value)]
        model(x, held).square().mean().backward()
        assert fired == [1]
        parameters = [*model.parameters(), *maker.parameters(), gain]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    assert same(train)


@pytest.mark.parametrize("kind", [Keeps, LooksAtValues])
def test_two_forwards_and_one_backward_through_both(kind: type[Keeps]) -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(kind)
        x, held = torch.randn(8, 16), [Holder() for _ in range(3)]
        if wrapped:
            memscale.wrap(model, CONFIG, sample_input=(x, [Holder() for _ in range(3)]))
        one = model(x, held)
        two = model(x, held)
        (one.square().mean() + two.square().mean()).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert same(train)


def test_a_step_that_would_run_into_an_earlier_graph_is_not_recorded() -> None:
    model = Net(LooksAtValues)
    x, held = torch.randn(8, 16), [Holder() for _ in range(3)]
    one = model(x, held)
    kept = [item.value for item in held]
    with pytest.raises(ProfileError, match="an earlier one"):
        memscale.predict(model, sample_input=(x, held), config=CONFIG)
    assert all(item.value is value for item, value in zip(held, kept, strict=True))
    one.sum().backward()


def test_objects_among_the_arguments_stay_as_they_were() -> None:
    model, held = Net(Keeps), [Holder() for _ in range(3)]
    memscale.predict(model, sample_input=(torch.randn(8, 16), held), config=CONFIG)
    assert all(vars(item) == {"value": None} for item in held)


def _extent(begin: Callable[[], Any]) -> tuple[earlier_graphs.Extent, Tensor]:
    weight = torch.ones(2, requires_grad=True)
    before = (weight * 2).tanh()
    since = begin()
    fresh = torch.ones(2, requires_grad=True)
    return earlier_graphs.extent_of((before * fresh).sum() + weight.sum(), since), fresh


def test_where_a_graph_ends() -> None:
    extent, fresh = _extent(earlier_graphs.nodes_so_far)
    assert [edge.node.name() for edge in extent.edges] == ["TanhBackward0"]
    assert [leaf is fresh for leaf in extent.own_leaves()] == [True]
    extent, _ = _extent(lambda: 0)
    assert not extent.edges
    assert len(extent.own_leaves()) == 2


def test_nodes_of_another_thread_are_named() -> None:
    weight = torch.ones(2, requires_grad=True)
    before = weight.tanh()
    extent = earlier_graphs.extent_of(before.exp().sum(), 0, [before.grad_fn])
    assert len(extent.edges) == 1
    assert not extent.own_leaves()
