# SPDX-License-Identifier: Apache-2.0
"""Custom autograd functions that ask more of a saved weight than its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

import memscale

WIDTH = 16
TABLE = WeakTensorKeyDictionary()
"""Factors by weight, as a library may keep them."""


def _gradient(x: Tensor, grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class WritesGrad(torch.autograd.Function):
    """Adds to the weight's `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        found = _gradient(x, grad * scale)
        weight.grad = found if weight.grad is None else weight.grad + found
        return (grad * scale) @ weight, None, None


class ReadsAttribute(WritesGrad):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        factor = getattr(weight, "factor", 1.0) * getattr(scale, "factor", 1.0)
        return (grad * scale) @ weight, factor * _gradient(x, grad * scale), None


class AddsToMainGrad(WritesGrad):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        weight.main_grad.add_(_gradient(x, grad * scale))
        return (grad * scale) @ weight, None, None


class LooksUp(WritesGrad):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        factor = TABLE.get(weight, 1.0)
        return (grad * scale) @ weight, factor * _gradient(x, grad * scale), None


FUNCTIONS: list[type[torch.autograd.Function]] = [WritesGrad, ReadsAttribute, AddsToMainGrad, LooksUp]


class Block(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(4 * WIDTH, 4 * WIDTH) / 8)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.weight.factor, self.scale.factor = 3.0, 5.0  # type: ignore[attr-defined]
        self.weight.main_grad = torch.zeros_like(self.weight)  # type: ignore[attr-defined]
        TABLE[self.weight] = 7.0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.function.apply(torch.tanh(self.up(x)), self.weight, self.scale)
        return x + self.down(torch.tanh(inner))


def model_of(function: type[torch.autograd.Function]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(function) for _ in range(4)))


def batch() -> Tensor:
    return torch.randn(32, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def wrapped(function: type[torch.autograd.Function]) -> nn.Module:
    config = memscale.Config(memory_budget=1, enable_logging=False)
    model = memscale.wrap(model_of(function), config, sample_input=(batch(),))
    assert memscale.executor_of(model).plan.active
    return model


def trained(model: nn.Module, between: Callable[[], object] = lambda: None) -> list[Any]:
    """Gradients of two steps, summed up."""
    for _ in range(2):
        loss = model(batch()).square().mean()
        between()
        loss.backward()
    values = [value.grad for value in model.parameters()]
    return values + [block.weight.main_grad for block in model]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gradients_are_plain_pytorchs(function: type[torch.autograd.Function]) -> None:
    assert_equal(trained(wrapped(function)), trained(model_of(function)))


def test_two_models_each_get_their_own() -> None:
    first, second = wrapped(WritesGrad), wrapped(ReadsAttribute)
    for model, function in ((second, ReadsAttribute), (first, WritesGrad)):
        assert_equal(trained(model), trained(model_of(function)))


def test_other_functions_see_what_they_saved() -> None:
    wrapped(WritesGrad)
    seen: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, None, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, nothing, y = ctx.saved_tensors
            seen.extend((x, y))
            assert nothing is None
            return grad * y, grad * x

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    Keeps.apply(x, y).sum().backward()
    assert seen[0] is x and seen[1] is y


def test_detached_models_leave_pytorchs_class_alone() -> None:
    model = wrapped(WritesGrad)
    assert "saved_tensors" in BackwardCFunction.__dict__
    memscale.detach(model)
    others = [other for other in memscale.torchkit.saved_weights._models if other is not model]
    assert ("saved_tensors" in BackwardCFunction.__dict__) == bool(others)
    assert_equal(trained(model), trained(model_of(WritesGrad)))


def test_detached_between_forward_and_backward() -> None:
    model = wrapped(WritesGrad)
    assert_equal(trained(model, lambda: memscale.detach(model)), trained(model_of(WritesGrad)))


def test_weights_exchanged_between_steps() -> None:
    found = []
    for model in (wrapped(ReadsAttribute), model_of(ReadsAttribute)):
        model(batch()).square().mean().backward()
        for block in model:
            other = nn.Parameter(block.weight.detach() * 2)
            other.factor, other.main_grad = 11.0, block.weight.main_grad  # type: ignore[attr-defined]
            block.weight = other
        found.append(trained(model))
    assert_equal(*found)
