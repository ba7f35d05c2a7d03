# SPDX-License-Identifier: Apache-2.0
"""Planning with an optimizer leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.optim.twins import apart, twin_of


class Own(torch.optim.Optimizer):
    """A package's: it has no "differentiable", and writes to what hangs in its defaults and groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "seen": []})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("come_since", True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"].append(len(self.defaults["seen"]))
            self.defaults["seen"].append(1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def old_adam(parameters: Any) -> torch.optim.Optimizer:
    """With counters that are numbers, as older files have them."""
    optimizer = torch.optim.Adam(parameters)
    for parameter in optimizer.param_groups[0]["params"]:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": 3, **moments}
    del optimizer.param_groups[0]["amsgrad"]
    return optimizer


def image(optimizer: torch.optim.Optimizer) -> str:
    groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    state = {
        id(key): {
            name: (id(value), value) if isinstance(value, Tensor) else value for name, value in part.items()
        }
        for key, part in optimizer.state.items()
    }
    return repr((optimizer.defaults, groups, state, sorted(vars(optimizer))))


@pytest.mark.parametrize("make", [Own, old_adam, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.SGD])
def test_planning_writes_to_nothing_of_an_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = make(model.parameters())
    before = image(optimizer)
    memscale.predict(model, optimizer, sample_input=torch.randn(3, 4))
    assert image(optimizer) == before


def test_a_twin_has_the_same_values_in_containers_of_its_own() -> None:
    optimizer = old_adam(nn.Linear(2, 2).parameters())
    twin = twin_of(optimizer)
    assert type(twin) is torch.optim.Adam and twin.defaults is not optimizer.defaults
    ((parameter, state), *_), twins = optimizer.state.items(), next(iter(twin.state.values()))
    assert parameter in twin.state and twins["exp_avg"] is state["exp_avg"]
    assert state["step"] == 3 and not isinstance(state["step"], Tensor) and float(twins["step"]) == 3
    assert apart({"a": [1, {"b": 2}], "c": (3,)}) == {"a": [1, {"b": 2}], "c": (3,)}


class Copied(Own):
    def __copy__(self) -> Copied:
        return Copied(self.param_groups[0]["params"])


def test_an_optimizer_that_knows_how_to_be_copied_is_asked() -> None:
    assert type(twin_of(Copied(nn.Linear(2, 2).parameters()))) is Copied
