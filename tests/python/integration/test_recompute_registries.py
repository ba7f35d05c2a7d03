# SPDX-License-Identifier: Apache-2.0
"""A recompute finds the children, buffers, parameters and slots of its forward, and leaves those of now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from memscale.state.attribute_tables import AttributeTables

WIDTH = 16


@dataclass(slots=True)
class Knobs:
    scale: float = 1.0
    mask: Tensor | None = None


class Block(nn.Module):
    """Runs whatever hangs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.chain = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b")})
        self.knobs = Knobs()
        self.register_buffer("gate", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for name in ("early", "extra"):
            h = h * getattr(self, name) if name in self._buffers or name in self._parameters else h
        h = h * self.knobs.scale * getattr(self.up.weight, "scale", 1.0)
        for values in (self.gate, self.knobs.mask):
            h = h if values is None else h * values
        h = self.chain(self.act(h))
        for adapter in self.adapters.values():
            x = F.silu(adapter(x))
        return x + self.down(h)


def ramp() -> Tensor:
    return torch.linspace(0.5, 1, 4 * WIDTH)


def reversed_chain(block: Block) -> None:
    first = block.chain[0]
    del block.chain[0]
    block.chain.add_module("0", first)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "child": (lambda b: setattr(b, "act", nn.Softplus()), lambda b: setattr(b, "act", nn.GELU())),
    "child of a container": (
        lambda b: b.chain.__setitem__(0, nn.Softplus()),
        lambda b: b.chain.__setitem__(0, nn.Tanh()),
    ),
    "child that goes": (
        lambda b: vars(b).update(kept=b.adapters.pop("a")),
        lambda b: b.adapters.update({"a": vars(b).pop("kept")}),
    ),
    "child that comes": (
        lambda b: b.chain.append(nn.Softplus()),
        lambda b: b.chain.__delitem__(2),
    ),
    "order of children": (reversed_chain, reversed_chain),
    "buffer that comes": (lambda b: b.register_buffer("extra", ramp()), lambda b: delattr(b, "extra")),
    "buffer that is filled": (lambda b: setattr(b, "gate", ramp()), lambda b: setattr(b, "gate", None)),
    "parameter that comes": (
        lambda b: b.register_parameter("extra", nn.Parameter(ramp())),
        lambda b: delattr(b, "extra"),
    ),
    "slot": (lambda b: setattr(b.knobs, "scale", 0.5), lambda b: setattr(b.knobs, "scale", 1.0)),
    "tensor in a slot": (
        lambda b: setattr(b.knobs, "mask", ramp()),
        lambda b: setattr(b.knobs, "mask", None),
    ),
    "attribute of a parameter": (
        lambda b: setattr(b.up.weight, "scale", 0.5),
        lambda b: delattr(b.up.weight, "scale"),
    ),
}


def registries(model: nn.Module) -> list[tuple[str, ...]]:
    return [
        tuple(registry)
        for module in model.modules()
        for registry in (module._modules, module._buffers, module._parameters, vars(module))
    ]


@pytest.mark.parametrize("when", ["for the forward", "since the forward"])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_registered_for_one_forward(kind: str, when: str) -> None:
    change, back = CHANGES[kind] if when == "for the forward" else CHANGES[kind][::-1]
    names: list[list[tuple[str, ...]]] = []

    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, seen = nn.Sequential(*(Block() for _ in range(4))), []
        x = torch.randn(8, 4, WIDTH)
        if when == "since the forward":
            for block in model:
                back(block)
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=(x,))
        for _ in range(2):
            for block in model:
                change(block)
            loss = model(x).square().mean()
            for block in model:
                back(block)
            if wrapped:
                assert memscale.executor_of(model).plan.active
                before = registries(model)
            loss.backward()
            if wrapped:
                assert registries(model) == before
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        if wrapped:
            memscale.detach(model)
        names.append(registries(model))
        return seen

    assert all(map(torch.equal, train(False), train(True)))
    assert names[0] == names[1]


@pytest.mark.parametrize("pre", [False, True])
def test_a_hook_that_came_since_the_forward_does_not_fire_in_the_recompute(pre: bool) -> None:
    calls: list[str] = []
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 4, WIDTH)
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=(x,))
    loss = model(x).square().mean()
    for block in model:
        register = block.up.register_forward_pre_hook if pre else block.up.register_forward_hook
        register(lambda module, *_: calls.append("call"))
    loss.backward()
    assert not calls
    model(x)
    assert len(calls) == 4


def test_tensors_in_plain_attributes_are_noted() -> None:
    """What is written to them in place shows only if they are looked at."""
    block = nn.Linear(2, 2)
    block.teacher = torch.ones(2)
    assert any(tensor is block.teacher for tensor in AttributeTables([block]).tensors)
