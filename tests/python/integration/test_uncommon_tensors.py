# SPDX-License-Identifier: Apache-2.0
"""Tensors without one storage or one shape, in batches and outputs: at worst there is no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from zoo.training import SMALLEST, seed


class Model(nn.Module):
    def __init__(self, other: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.other = other

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        if x.is_nested:
            x = x.to_padded_tensor(0.0)
        y = self.body(x)
        return y.square().mean(), self.other(y)


def _steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss, _other = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda y: torch.eye(4).to_sparse(), id="sparse"),
        pytest.param(lambda y: torch.eye(4).to_sparse_csr(), id="csr"),
        pytest.param(lambda y: y.to_sparse(), id="sparse with gradients"),
        pytest.param(lambda y: torch.zeros(3).to_mkldnn(), id="mkldnn"),
        pytest.param(lambda y: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
    ],
)
def test_outputs(other: Callable[[Tensor], Any]) -> None:
    x = torch.randn(32, 16)
    seed(0)
    expected = _steps(Model(other), x)
    seed(0)
    model = memscale.wrap(Model(other), SMALLEST)
    assert all(map(torch.equal, _steps(model, x), expected))


def test_nested_batches() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    seed(0)
    expected = _steps(Model(lambda y: None), x)
    seed(0)
    model = memscale.wrap(Model(lambda y: None), SMALLEST)
    assert all(map(torch.equal, _steps(model, x), expected))
