# SPDX-License-Identifier: Apache-2.0
"""Contents that change in place between forward and backward, of which plain autograd has saved nothing."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import memscale
from memscale.errors import RecomputeError

WIDTH = 16
LARGE = 10_000


class Lowered(dict[str, float]):
    """Reads and writes its own way."""

    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key.lower())

    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(key.lower(), value)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Block(nn.Module):
    """Reads numbers of tensors that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attribute = torch.ones(())
        self.large: Tensor
        self.register_buffer("scale", torch.ones(1))
        self.array, self.own, self.gate = (
            np.ones(4, dtype="float32"),
            Lowered(scale=1.0),
            torch.ones(4 * WIDTH),
        )
        self.bytes, self.numbers = bytearray(b"a"), array.array("f", [1.0])
        self.register_buffer("large", torch.ones(LARGE))

    def factor(self) -> float:
        return self.attribute.item() * float(self.scale) * self.large[0].item()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.factor())


class Computes(Block):
    """Reads what fakes have, too."""

    __slots__ = ("rate",)
    rate: float

    def factor(self) -> Any:
        scale = float(self.array[0]) * self.own["SCALE"] * getattr(self.gate, "scale", 1.0)
        return scale * len(self.bytes) * self.numbers[0] * getattr(self, "rate", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.gate) * self.factor())


def trained(
    wrapped: bool,
    before: Callable[[Any], Any],
    after: Callable[[Any], Any],
    steps: int = 3,
    build: Callable[[], nn.Module] = Block,
) -> list[Any]:
    """Losses and gradients, and the errors that backward has raised."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(*(build() for _ in range(3))), list[Any]()
    if wrapped:
        memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    for step in range(steps):
        torch.manual_seed(step)
        for block in model:
            before(block)
        loss = model(torch.randn(256, WIDTH)).square().mean()
        for block in model:
            after(block)
        try:
            loss.backward()
        except RuntimeError as error:
            seen.append(error)
        else:
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        seen += [block.attribute for block in model] + [block.scale for block in model]
        model.zero_grad()
        if wrapped and step == 0:
            assert memscale.executor_of(model).plan.active
    return seen


@pytest.mark.parametrize("name", ["attribute", "scale"])
def test_a_small_tensor_is_copied(name: str) -> None:
    def set_to(value: float) -> Callable[[Any], Any]:
        return lambda block: getattr(block, name).fill_(value)

    plain = trained(False, set_to(0.5), set_to(3.0))
    assert all(map(torch.equal, plain, trained(True, set_to(0.5), set_to(3.0))))


OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array of NumPy": (lambda block: block.array.fill(0.5), lambda block: block.array.fill(3.0)),
    "slot of its class": (
        lambda block: setattr(block, "rate", 0.5),
        lambda block: delattr(block, "rate"),
    ),
    "bytes": (lambda block: block.bytes.extend(b"bc"), lambda block: block.bytes.__delitem__(slice(1, 3))),
    "array": (
        lambda block: block.numbers.__setitem__(0, 0.5),
        lambda block: block.numbers.__setitem__(0, 3.0),
    ),
    "dictionary": (
        lambda block: block.own.__setitem__("Scale", 0.5),
        lambda block: block.own.__setitem__("SCALE", 3.0),
    ),
    "attribute of a tensor": (
        lambda block: setattr(block.gate, "scale", 0.5),
        lambda block: delattr(block.gate, "scale"),
    ),
    "tensor that a sum reads": (lambda block: block.gate.fill_(0.5), lambda block: block.gate.fill_(3.0)),
    "class of a child": (
        lambda block: setattr(block.up, "__class__", Doubled),
        lambda block: setattr(block.up, "__class__", nn.Linear),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_else_holds_for_a_forward(kind: str) -> None:
    def values(wrapped: bool) -> list[Any]:
        return trained(wrapped, *OTHERS[kind], build=Computes)

    assert all(map(torch.equal, values(False), values(True)))


def test_of_a_large_one_backward_tells() -> None:
    """And the module is kept afterwards."""

    def large(value: float) -> Callable[[Any], Any]:
        return lambda block: block.large.fill_(value)

    plain, seen = trained(False, large(0.5), large(3.0), 6), trained(True, large(0.5), large(3.0), 6)
    errors = [item for item in seen if isinstance(item, Exception)]
    assert errors
    assert len({error.module for error in errors}) == len(errors) <= 3
    for error in errors:
        assert isinstance(error, RecomputeError)
        assert "modified by an inplace operation" in str(error)
        assert f'Config(exclude=("{error.module}",))' in str(error)
    assert all(map(torch.equal, plain[-10:], seen[-10:]))


def test_a_parametrization_that_goes() -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    def parametrized() -> nn.Module:
        block = Block()
        parametrize.register_parametrization(block.up, "weight", Half())
        return block

    def take_off(block: Any) -> None:
        if parametrize.is_parametrized(block.up):
            parametrize.remove_parametrizations(block.up, "weight")

    seen = trained(True, lambda block: None, take_off, 1, parametrized)
    assert isinstance(seen[0], RecomputeError)
    assert "Config(exclude=" in str(seen[0])
