# SPDX-License-Identifier: Apache-2.0
"""Backward for many gradients at once, through modules that are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.torchkit.batched_backward import set_aside


class Draws(nn.Module):
    """Draws, and makes tensors."""

    __module__ = "memscale.test"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(1, 64)
        return x + self.drop(self.down(torch.tanh(self.up(x) + noise)))


def batched(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).sum(0)
    return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)[0]


def vectorized(model: nn.Module, x: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(lambda value: model(value).sum(0), x, vectorize=True)
    assert isinstance(found, Tensor)
    return found


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).sum(0)
    return torch.func.vmap(lambda grad: torch.autograd.grad(y, x, grad)[0])(torch.eye(4))


@pytest.mark.parametrize("derive", [batched, vectorized, mapped])
def test_every_bit(derive: Callable[[nn.Module, Tensor], Tensor]) -> None:
    def jacobian(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Draws() for _ in range(4)), nn.Linear(16, 4))
        x = torch.randn(32, 16, requires_grad=True)
        if wrapped:
            config = memscale.Config(memory_budget=1, enable_logging=False)
            memscale.wrap(model, config, sample_input=x)
            assert memscale.executor_of(model).plan.active
        torch.manual_seed(1)
        return [derive(model, x), torch.randn(3)]

    assert all(map(torch.equal, jacobian(False), jacobian(True)))


def test_what_is_set_aside_comes_back() -> None:
    def drawn(x: Tensor) -> Tensor:
        with set_aside():
            made = torch.rand(2)
            assert made.shape == (2,)
        with pytest.raises(RuntimeError, match="vmap"):
            torch.rand(2)
        return x * made.sum()

    assert torch.func.vmap(drawn)(torch.ones(3)).shape == (3,)
    with set_aside():
        assert torch.rand(2).shape == (2,)
