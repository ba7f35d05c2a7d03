# SPDX-License-Identifier: Apache-2.0
"""Batches that need gradients: of prompts, of a generator's pictures, through frozen networks."""

from __future__ import annotations

import torch
from torch import nn

import memscale
from zoo.training import peak_bytes, seed


def test_a_batch_that_needs_gradients_is_planned_for() -> None:
    """A network whose weights are frozen saves nothing for real pictures, and all for generated ones."""
    seed(0)
    layers = (nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.SiLU()) for _ in range(6))
    model, made, x = nn.Sequential(*layers).requires_grad_(False), nn.Linear(128, 128), torch.randn(1024, 128)
    memscale.wrap(model, memscale.Config(memory_budget="6MB", enable_logging=False), sample_input=x)

    def step() -> None:
        model(made(x)).square().mean().backward()

    step()
    step()
    plan = memscale.executor_of(model).plan
    assert plan.fits and plan.active
    assert peak_bytes(step) <= plan.predicted.allocated_peak_bytes


def test_a_buffer_that_grows_is_planned_for() -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
            self.register_buffer("bank", torch.zeros(16, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) @ self.bank.T).logsumexp(1).mean()

    seed(0)
    model, x = Bank(), torch.randn(512, 128)
    memscale.wrap(model, memscale.Config(memory_budget="64MB", enable_logging=False), sample_input=x)

    def step() -> None:
        model(x).backward()
        model.zero_grad()

    step()
    model.bank = torch.randn(4096, 128)
    step()
    assert peak_bytes(step) <= memscale.executor_of(model).plan.predicted.allocated_peak_bytes
