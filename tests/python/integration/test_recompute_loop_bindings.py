# SPDX-License-Identifier: Apache-2.0
"""What the loop binds for a forward alone: the recompute finds it, and what is bound since stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale

WIDTH = 16
SCALE = 1.0
MASK: Any = None
SETTINGS = ModuleType("settings_of_a_test")
sys.modules["settings_of_a_test"] = SETTINGS
torch.test_scale = 1.0


def closed() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def scaled(h: Tensor) -> Tensor:
        return h * scale

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, put


scaled, put_closed = closed()


def shape(h: Tensor) -> Tensor:
    return h * shape.scale  # type: ignore[attr-defined, no-any-return]


def other_shape(h: Tensor) -> Tensor:
    return h.square()


shape.scale = 1.0  # type: ignore[attr-defined]


class Block(nn.Module):
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def inner(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        import settings_of_a_test  # type: ignore[import-not-found]

        h = self.inner(scaled(shape(self.up(x) * SCALE * self.of_class)))
        h = h * settings_of_a_test.scale * torch.test_scale
        return x + self.down(nn.functional.gelu(torch.tanh(h) if MASK is None else torch.tanh(h * MASK)))


@contextmanager
def bound(place: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(place)[name]
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def bound_in_closure() -> Iterator[None]:
    put_closed(2.0)
    try:
        yield
    finally:
        put_closed(1.0)


def other_linear(self: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, self.weight * 2.0, self.bias)


HERE = sys.modules[__name__]
BINDINGS: dict[str, Callable[[], Any]] = {
    "global": lambda: bound(HERE, "SCALE", 2.0),
    "large tensor": lambda: bound(HERE, "MASK", torch.rand(256, 4 * WIDTH)),
    "function": lambda: bound(HERE, "shape", other_shape),
    "attribute of a function": lambda: bound(shape, "scale", 2.0),
    "class": lambda: bound(Block, "of_class", 2.0),
    "method": lambda: bound(Block, "inner", lambda self, h: h.sigmoid()),
    "closure": bound_in_closure,
    "another Python module": lambda: bound(SETTINGS, "scale", 2.0),
    "name in torch": lambda: bound(torch, "test_scale", 2.0),
    "function of torch": lambda: bound(nn.functional, "gelu", torch.relu),
    "class of torch": lambda: bound(nn.Linear, "forward", other_linear),
}


def trained(binding: Callable[[], Any], is_wrapped: bool) -> list[Any]:
    SETTINGS.scale = 1.0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(256, WIDTH)
    if is_wrapped:
        memscale.wrap(model, memory_budget=1, sample_input=x, force_optimize=True, enable_logging=False)
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        with binding():
            loss = model(x).square().mean()
        present = [dict(vars(place)) for place in (Block, nn.Linear, SETTINGS)], SCALE, nn.functional.gelu
        loss.backward()
        after = [dict(vars(place)) for place in (Block, nn.Linear, SETTINGS)], SCALE, nn.functional.gelu
        assert after == present
        found.append(loss.item())
    if is_wrapped:
        assert model._memscale_executor.plan.active
        memscale.detach(model)
    return found + [parameter.grad.tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", BINDINGS)
def test_what_holds_for_a_forward(kind: str) -> None:
    assert trained(BINDINGS[kind], is_wrapped=True) == trained(BINDINGS[kind], is_wrapped=False)
