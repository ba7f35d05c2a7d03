# SPDX-License-Identifier: Apache-2.0
"""A graph that waits for its backward is seen, without being held."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.open_graph import OpenGraph
from zoo.training import peak_bytes

CONFIG = memscale.Config(memory_budget="1GiB")


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("model", [nn.Linear(4, 4), _Double.apply], ids=["module", "function of one's own"])
def test_waits_until_a_backward_has_run(model: object) -> None:
    assert callable(model)
    output = model(torch.ones(2, 4, requires_grad=True))
    graph = OpenGraph({"first": output, "second": [output * 2]})
    loss = output.sum()
    assert graph.waits
    loss.backward(retain_graph=True)
    assert not graph.waits


def test_is_not_held() -> None:
    output = nn.Linear(4, 4)(torch.ones(2, 4))
    graph, storage = OpenGraph(output), weakref.ref(output.untyped_storage())
    kept = output.sum()
    del output
    assert graph.waits
    del kept
    gc.collect()
    assert not graph.waits and storage() is None


def test_an_output_without_a_graph_waits_for_nothing() -> None:
    assert not OpenGraph([torch.ones(3), torch.ones(3, requires_grad=True), None]).waits


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.message for item in caplog.records if "wait for their backward: plans count" in item.message]


@pytest.mark.parametrize("forwards", [1, 2, 10])
def test_more_forwards_than_are_counted_are_said_once(
    forwards: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memscale.wrap(nn.Linear(4, 4).train(), CONFIG)
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    losses = []
    for _ in range(3):
        losses = [model(torch.ones(2, 4)).sum() for _ in range(forwards)]
        torch.stack(losses).sum().backward()
    assert model.__dict__["_memscale_executor"].open.planned == min(forwards, 8)
    memscale.detach(model)
    assert len(warnings_of(caplog)) == (forwards > 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(torch.sigmoid(self.up(x)))))


def train(model: nn.Module, batches: list[Tensor], steps: int) -> list[Tensor]:
    """Steps with all forwards before the one backward; the gradients of the last."""
    torch.manual_seed(5)
    gradients: list[Tensor] = []
    for _ in range(steps):
        gradients.clear()
        model.zero_grad()
        outputs = [model(x) for x in batches]
        loss = sum(output.pow(2).mean() for output in outputs)
        assert isinstance(loss, Tensor)
        loss.backward()
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        del outputs, loss
    return gradients


@pytest.mark.parametrize("rows", [(256, 256), (256, 128, 256)], ids=str)
def test_all_forwards_before_a_backward_are_in_the_plan(
    rows: tuple[int, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in contrastive losses: from the second step on the budget holds."""
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6))).train()
    batches = [torch.randn(count, 64) for count in rows]
    expected = [value.clone() for value in train(model, batches, 2)]
    model.zero_grad()
    before = sum(tensor.nbytes for tensor in (*model.parameters(), *batches))
    plain = peak_bytes(lambda: train(model, batches, 1)) + before
    model.zero_grad()
    config = memscale.Config(memory_budget=plain * 65 // 100, enable_logging=False)
    optimizer = torch.optim.SGD(model.parameters())
    memscale.wrap(model, config, batches[0], optimizer=optimizer)
    train(model, batches, 1)
    assert sum("peak above the prediction" in item.message for item in caplog.records) == 1
    model.zero_grad()
    assert all(map(torch.equal, expected, train(model, batches, 2)))
    model.zero_grad()
    peak = peak_bytes(lambda: train(model, batches, 2)) + before
    plan = model.__dict__["_memscale_executor"].plan
    assert plan.fits and plan.active
    assert peak <= plan.predicted.allocated_peak_bytes < plan.budget_bytes
    if len(set(rows)) == 1:
        assert peak == plan.predicted.allocated_peak_bytes


def test_a_dropped_output_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memscale.wrap(nn.Linear(4, 4).train(), CONFIG)
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    for _ in range(3):
        model(torch.ones(2, 4))
    memscale.detach(model)
    assert not warnings_of(caplog)
