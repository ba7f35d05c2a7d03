# SPDX-License-Identifier: Apache-2.0
"""Buffers that the first forward fills and later ones do not, or only in part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memscale


class Codebook(nn.Module):
    """Fills its codes from the first batch, then moves them slowly; no version counter moves."""

    __module__ = "memscale.test"

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.codes: Tensor
        self.filled: Tensor
        self.up, self.down, self.out = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("filled", torch.tensor([False]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(x)))
        seen = hidden.detach()
        if not self.filled:
            self.codes.data.add_(seen[:8])
            self.filled.data.fill_(True)
        nearest = nn.functional.embedding(torch.cdist(seen, self.codes).argmin(1), self.codes)
        if self.moves:
            self.codes.data.mul_(0.9).add_(seen[:8], alpha=0.1)
        return x + torch.tanh(self.out(hidden + (nearest - hidden).detach()))


@pytest.mark.parametrize("moves", [True, False], ids=["moving", "filled once"])
@pytest.mark.parametrize("sample", [True, False], ids=["sample", "first batch"])
def test_every_bit(moves: bool, sample: bool) -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Codebook(moves) for _ in range(3)))
        if wrapped:
            config = memscale.Config(memory_budget=1, enable_logging=False)
            memscale.wrap(model, config, sample_input=torch.ones(64, 16) if sample else None)
        seen = []
        for _ in range(3):
            loss = model(torch.randn(64, 16)).square().mean()
            loss.backward()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            seen += [buffer.clone() for buffer in model.buffers()]
            model.zero_grad()
        if wrapped:
            assert memscale.executor_of(model).plan.active
        return seen

    assert all(map(torch.equal, train(False), train(True)))
