# SPDX-License-Identifier: Apache-2.0
"""What code asks of a forward that is a bound method, asked of one that is stood in for."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.torchkit.forward_slot import ForwardSlot, StandIn


class Block(nn.Module):
    """A block with a default, and something set on its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * scale


Block.forward.flavour = "plain"  # type: ignore[attr-defined]


class Rebound(StandIn):
    """One that stays where methods are bound anew."""

    stays_when_rebound = True
    calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return self.original(*args, **kwargs)


def put(module: nn.Module, *kinds: type[StandIn]) -> StandIn:
    for kind in kinds:
        slot = ForwardSlot(module, "block")
        stand_in = kind(module, slot.present)
        slot.put(stand_in)
    return stand_in


def test_planned_blocks_have_methods_for_forwards() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    memscale.wrap(
        model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=torch.ones(64, 16)
    )
    assert any(isinstance(block.forward, StandIn) for block in model)
    for block in model:
        assert block.forward.__self__ is block
        assert block.forward.__func__ is Block.forward
    assert model.forward.__self__ is model
    assert model.forward.__func__ == nn.Sequential.forward


@pytest.mark.parametrize("kinds", [(StandIn,), (StandIn, StandIn), (Rebound, StandIn)])
def test_attributes_of_a_method(kinds: tuple[type[StandIn], ...]) -> None:
    block = Block()
    names = ["__self__", "__func__", "__code__", "__name__", "__qualname__", "__doc__", "__module__"]
    names += ["__defaults__", "__kwdefaults__", "__closure__", "__globals__", "__annotations__", "flavour"]
    plain = {name: getattr(block.forward, name) for name in names}
    signature = inspect.signature(block.forward)
    put(block, *kinds)
    assert {name: getattr(block.forward, name) for name in names} == plain
    assert inspect.signature(block.forward) == signature
    assert not hasattr(block.forward, "nothing_of_the_kind")


def test_a_plain_function_has_no_function_or_module() -> None:
    block = Block()
    block.forward = lambda x: x  # type: ignore[method-assign,assignment]
    put(block, StandIn)
    assert not hasattr(block.forward, "__func__")
    assert not hasattr(block.forward, "__self__")
    assert block.forward.__code__.co_varnames == ("x",)


def test_bound_anew_it_stays() -> None:
    block = Block()
    stand_in = put(block, Rebound)
    function = stand_in.__func__
    assert function == Block.forward
    assert {Block.forward: 1}[function] == 1
    block.forward = MethodType(function, block)  # type: ignore[method-assign]
    block(torch.ones(2, 16), scale=2.0)
    assert stand_in.calls == 1  # type: ignore[attr-defined]
    other = Block()
    other.forward = function.__get__(other)  # type: ignore[method-assign]
    other(torch.ones(2, 16))
    assert stand_in.calls == 1  # type: ignore[attr-defined]
    assert function.__get__(None) is function
    assert copy.deepcopy(function) is Block.forward
    assert pickle.loads(pickle.dumps(function)) is Block.forward
    assert function.__defaults__ == (1.0,)
    assert not hasattr(function, "__wrapped__")
