# SPDX-License-Identifier: Apache-2.0
"""While a forward runs again, what its state is of is there twice: both are predicted, to the byte."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from zoo.training import peak_bytes


class Block(nn.Module):
    """Draws random numbers, changes buffers, and peaks in the midst of its forward."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(32, 512)
        self.norm = nn.BatchNorm1d(512) if norm else nn.Identity()
        self.down = nn.Linear(512, 32)

    def forward(self, x: Tensor) -> Tensor:
        drawn = F.dropout(x, 0.5)
        scale = (drawn.detach().repeat(1, 256) * 2).mean(dim=1, keepdim=True)
        hidden = self.norm(torch.tanh(self.up(drawn) * scale))
        return x + self.down(torch.sigmoid(hidden))


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("norm", [False, True], ids=["generator", "generator and buffers"])
def test_the_peak_inside_a_second_run_is_predicted(norm: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(norm).train(), torch.randn(128, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = memscale.predict(model, optimizer, sample_input=x, device="cpu").plain.allocated_peak_bytes
    config = memscale.Config(memory_budget=plain // 2, enable_logging=False)
    memscale.wrap(model, config, x, optimizer=optimizer)

    def train() -> None:
        for _ in range(2):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

    train()
    before = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers(), x))
    plan = memscale.executor_of(model).plan
    assert "blocks.0" in [choice.module for choice in plan.active]
    assert peak_bytes(train) + before == plan.predicted.allocated_peak_bytes
