# SPDX-License-Identifier: Apache-2.0
"""What the tests of our optimizer state share: optimizers by name, a small network, a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

OUR_ADAMW = pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.AdamW([torch.zeros(1)]).defaults,
    reason="AdamW does not say how it decays weights: PyTorch before 2.7, where its state stays PyTorch's",
)
"""For tests whose AdamW has our state."""


class Lion(torch.optim.Optimizer):
    """The settings and the step of lion-pytorch's."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.decoupled_wd = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = average.clone().mul_(first).add_(parameter.grad, alpha=1 - first).sign_()
                parameter.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(parameter.grad, alpha=1 - second)
        return loss


Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.01, betas=(0.8, 0.98), eps=1e-6),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small network, always the same."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    return layers.to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1, backwards: int = 1
) -> list[Tensor]:
    """Runs some steps. Returns copies of the weights."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        for _ in range(backwards):
            out = model(torch.randn(16, 24, generator=generator).to(dtype))
            (out.float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all bits are the same."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
