# SPDX-License-Identifier: Apache-2.0
"""Wrapped models may be traced and exported, with gradients or without: what comes out is the plain model."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

import memscale
from zoo.training import SMALLEST, seed


def _wrapped(x: torch.Tensor | None) -> nn.Module:
    seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU()) for _ in range(4))
    model: nn.Module = memscale.wrap(nn.Sequential(*layers), SMALLEST, sample_input=x)
    return model


@pytest.mark.parametrize("planned", [False, True])
def test_a_wrapped_model_is_traced_as_it_is(planned: bool) -> None:
    x = torch.randn(4, 8)
    model = _wrapped(x if planned else None)
    traced = torch.jit.trace(model, (x,))
    torch.jit._get_trace_graph(model, (x,))  # as exporters to ONNX do; it ended the process
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("planned", [False, True])
def test_a_wrapped_model_is_exported_as_it_is(planned: bool) -> None:
    x = torch.randn(4, 8)
    model = _wrapped(x if planned else None)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))


@pytest.mark.parametrize("planned", [False, True])
def test_a_module_that_holds_a_wrapped_model_has_its_graph_once(planned: bool) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.inner(x)
            return output

    x = torch.randn(4, 8)
    model = _wrapped(x if planned else None)
    traced = torch.fx.symbolic_trace(Outer(model))
    names = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert len(names) == len(set(names)) == 16
    assert torch.equal(traced(x), model(x))
