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
    return [item.message for item in caplog.records if "waits for its backward" in item.message]


@pytest.mark.parametrize("forwards", [1, 2])
def test_two_forwards_before_a_backward_are_said_once(
    forwards: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memscale.wrap(nn.Linear(4, 4).train(), CONFIG)
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    losses = []
    for _ in range(3):
        losses = [model(torch.ones(2, 4)).sum() for _ in range(forwards)]
        torch.stack(losses).sum().backward()
    memscale.detach(model)
    assert len(warnings_of(caplog)) == forwards - 1


def test_a_dropped_output_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memscale.wrap(nn.Linear(4, 4).train(), CONFIG)
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    for _ in range(3):
        model(torch.ones(2, 4))
    memscale.detach(model)
    assert not warnings_of(caplog)
