# SPDX-License-Identifier: Apache-2.0
"""A graph that waits for its backward is seen, without being held."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.torchkit.open_graph import OpenGraph
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


def test_is_open_until_its_backward_has_ended() -> None:
    """Also of a backward that another thread runs."""
    seen: list[tuple[bool, bool, bool]] = []

    def look() -> None:
        me = threading.get_ident()
        seen.append((graph.is_open, graph.is_open_elsewhere(me), graph.is_open_elsewhere(-1)))

    x = torch.ones(2, 4, requires_grad=True)
    x.register_hook(lambda gradient: look())
    graph = OpenGraph(output := x * 2)
    look()
    thread = threading.Thread(target=output.sum().backward, kwargs={"retain_graph": True})
    thread.start()
    thread.join()
    look()
    assert seen == [(True, False, True), (True, False, True), (False, False, False)]


def test_a_backward_that_failed_is_over() -> None:
    """Though it does not say so: whoever looks at the model then need not wait for another forward."""
    model = nn.Linear(4, 4)
    memscale.wrap(model, CONFIG, torch.ones(2, 4))
    graphs = memscale.executor_of(model).open
    x = torch.ones(2, 4, requires_grad=True)
    handle = x.register_hook(lambda gradient: 1 / 0)
    output = model(x)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    handle.remove()
    (graph,) = graphs._graphs
    assert not graph.is_open and not graph.waits and not graphs.are_of_others
    memscale.detach(model)


@pytest.mark.parametrize("when", ["before its backward", "in its backward"])
@pytest.mark.parametrize("call", [memscale.plan, memscale.predict, memscale.verify])
def test_a_model_is_not_laid_bare_beside_another_threads_step(call: Any, when: str) -> None:
    """The backward would find tensors without data, or a forward without what the plan has put there."""
    (model, plain), x = (nn.Sequential(Block(), Block()) for _ in range(2)), torch.ones(64, 64)
    plain.load_state_dict(model.state_dict())
    config = memscale.Config(memory_budget=1, enable_logging=False)
    memscale.wrap(model, config, x)
    found: list[Any] = []

    def ask(*unused: Any) -> None:
        def run() -> None:
            try:
                found.append(call(model, config=config, sample_input=x))
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    inputs = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = model(inputs)
    if when == "before its backward":
        ask()
    else:
        inputs.register_hook(ask)
    output.square().mean().backward()
    assert "another thread is in the middle of a step" in str(found.pop())
    torch.manual_seed(1)
    plain(x).square().mean().backward()
    for value, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert value.grad is not None and other.grad is not None and torch.equal(value.grad, other.grad)
    ask()
    assert not isinstance(found[0], Exception)


@pytest.mark.parametrize("waits", [True, False])
def test_what_another_thread_holds_is_no_part_of_this_ones_step(waits: bool) -> None:
    """Neither an output that waits for its backward, nor one that has had it."""
    model, x = nn.Linear(256, 256), torch.ones(256, 256)  # an output is 256 KiB
    memscale.wrap(model, CONFIG, x)
    executor = memscale.executor_of(model)
    before, held = executor.plan, []

    def other() -> None:
        held.append(model(x))
        if not waits:
            torch.autograd.grad(held[0].sum(), model.weight)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    for _ in range(2):
        torch.autograd.grad(model(x).sum(), model.weight)
    assert executor.plan is before and not executor._has_warned_of_threads
    memscale.detach(model)


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
    assert memscale.executor_of(model).open.planned == min(forwards, 8)
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
    plan = memscale.executor_of(model).plan
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
