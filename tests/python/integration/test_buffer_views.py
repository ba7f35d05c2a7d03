# SPDX-License-Identifier: Apache-2.0
"""Buffers that are views of one memory, written in a forward that runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.techniques.checkpoint.buffer_copies import copies_of

CONFIG = memscale.Config(memory_budget=1, enable_logging=False)


class Statistics(nn.Module):
    """Running statistics in one flat buffer; views of it are buffers, attributes, or in a list."""

    __module__ = "memscale.test"

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        flat = torch.zeros(128)
        self.register_buffer("flat", flat)
        if where == "buffers":
            self.register_buffer("mean", flat[:64])
            self.register_buffer("shift", flat[64:])
        elif where == "attributes":
            self.mean, self.shift = flat[:64], flat[64:]
        else:
            self.views = {"all": [flat[:64], flat[64:]]}

    def forward(self, x: Tensor) -> Tensor:
        mean, shift = self.views["all"] if self.where == "nested" else (self.mean, self.shift)
        hidden = torch.tanh(self.up(x) + shift)
        with torch.no_grad():
            mean.mul_(0.9).add_(hidden.mean(0))
            shift.add_(self.flat[:64])
        return x + self.down(hidden * (1 + self.flat[:64].clone()))


@pytest.mark.parametrize("where", ["buffers", "attributes", "nested"])
def test_every_bit_with_buffers_on_one_memory(where: str) -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Statistics(where) for _ in range(3)))
        if wrapped:
            memscale.wrap(model, CONFIG, sample_input=torch.ones(32, 16))
            assert memscale.executor_of(model).plan.active
        seen = []
        for _ in range(2):
            loss = model(torch.randn(32, 16)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            seen += [buffer.clone() for buffer in model.buffers()]
            model.zero_grad()
        block = model[0]
        mine = block.views["all"][0] if where == "nested" else block.mean
        assert mine.untyped_storage()._cdata == block.flat.untyped_storage()._cdata
        return seen

    assert all(map(torch.equal, train(False), train(True)))


def test_copies_span_no_more_than_is_needed() -> None:
    base = torch.arange(1000.0)
    one, other, alone = base[100:110], base.view(torch.int32)[104:120:2], torch.ones(3)
    copies = copies_of([one, other, alone])
    copied, beside = copies[id(one)], copies[id(other)]
    assert copied.untyped_storage()._cdata == beside.untyped_storage()._cdata
    assert copied.untyped_storage().nbytes() <= 4 * 24
    assert torch.equal(copied, one)
    assert torch.equal(beside, other)
    copied.zero_()
    assert beside[:3].tolist() == [0, 0, 0]
    assert one[0] == 100
    assert copies[id(alone)] is not alone
