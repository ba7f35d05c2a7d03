# SPDX-License-Identifier: Apache-2.0
"""A loop that never calls the wrapped model trains without a plan, and hears of it once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale

_SAYS = "no plan was made"


class Model(nn.Module):
    """Has a loss of its own beside its forward, as a LightningModule has its `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.net(x))
        return result

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def _train(model: Model, loss: Callable[[Tensor], Tensor], trained: nn.Module | None = None) -> None:
    optimizer = torch.optim.SGD((trained or model).parameters(), 0.1)
    for _ in range(3):
        loss(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_warning_names_what_to_wrap(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Model(), memory_budget="1GiB")
    _train(model, model.training_step)
    said = [record.getMessage() for record in caplog.records if _SAYS in record.getMessage()]
    assert len(said) == 1
    assert "'net'" in said[0] and "'head'" not in said[0] and "memscale.wrap(model.net)" in said[0]


@pytest.mark.parametrize("way", ["called", "in a function transform", "another's optimizer", "detached"])
def test_others_hear_nothing(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model, other = memscale.wrap(Model(), memory_budget="1GiB"), nn.Linear(8, 1)
    if way == "called":
        _train(model, lambda x: model(x).mean())
    elif way == "another's optimizer":
        _train(model, lambda x: other(model.training_step(x).expand(1, 8)).mean(), other)
    elif way == "detached":
        _train(model, lambda x: other(model(x).detach().expand(4, 8)).mean(), other)
    else:
        weights = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, given, (x,)).square().mean()
            return result

        gradients = torch.func.grad(loss)(weights, torch.randn(4, 8))
        for name, weight in weights.items():
            weight.grad = gradients[name]
        optimizer.step()
    assert not [record for record in caplog.records if _SAYS in record.getMessage()]
