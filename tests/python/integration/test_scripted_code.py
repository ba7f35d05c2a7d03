# SPDX-License-Identifier: Apache-2.0
"""TorchScript counts its calls, and its bits follow from their number: plain PyTorch's calls, no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.torchkit.scripted import script_calls, uncounted_scripts
from zoo.training import SMALLEST

WIDTH = 64


def _activation() -> Callable[[Tensor], Tensor]:
    """Of this call alone: TorchScript knows a Python function that it has compiled."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    return gelu


def _module() -> nn.Module:
    """Of a class of this call alone: TorchScript compiles a class once."""

    class Gelu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    return Gelu()


def _scripted() -> Any:
    return torch.jit.script(_activation())


def _traced() -> Any:
    return torch.jit.trace(_activation(), torch.ones(2), check_trace=False)


def _scripted_module() -> Any:
    return torch.jit.script(_module())


def _traced_module() -> Any:
    return torch.jit.trace(_module(), torch.ones(2), check_trace=False)


class Block(nn.Module):
    """An MLP with a scripted activation, or another one."""

    def __init__(self, activation: Any, factor: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        return x + self.down(self.activation(self.up(x)))


def _model(script: Any) -> nn.Module:
    """All scripted blocks call one script, as functions of a Python module are called."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(torch.tanh, 32) if number % 2 else Block(script) for number in range(6)))


def _bits(model: nn.Module) -> list[Tensor]:
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
        torch.manual_seed(10 + step)
        loss = model(torch.randn(256, WIDTH)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("script", [_scripted, _traced, _scripted_module, _traced_module])
def test_planning_and_recomputes_are_no_calls_of_a_script(script: Callable[[], Any]) -> None:
    expected = _bits(_model(script()))
    model, sample = _model(script()), torch.randn(256, WIDTH)
    memscale.wrap(model, SMALLEST, sample_input=sample)
    assert memscale.verify(model, sample_input=sample).equal
    for bits, plain_bits in zip(_bits(model), expected, strict=True):
        assert torch.equal(bits, plain_bits)
    plan = memscale.executor_of(model).plan
    rules = {choice.module: choice.rule for choice in plan.choices}
    assert plan.active
    assert not {"0", "2", "4"} & set(plan.active)
    assert {rules[path] for path in ("0", "2", "4")} == {"scripted"}


def test_tiles_of_rows_call_no_script() -> None:
    from memscale.techniques.tiles.row_search import find, reasons

    model = nn.Sequential(Block(_scripted(), 8), Block(torch.tanh, 8))
    assert [found.path for found in find(model)] == ["1"]
    assert reasons(model)["0"] == "it calls scripted code"


def test_types_of_scripts_are_as_they_were() -> None:
    kinds = torch._C.ScriptFunction, torch._C.ScriptMethod
    before = [vars(kind)["__call__"] for kind in kinds]
    calls: list[str] = []
    script = _scripted()
    with script_calls(lambda: calls.append("outer")), uncounted_scripts():
        script(torch.ones(2))
        with script_calls(lambda: calls.append("inner")):
            script(torch.ones(2))
        script(torch.ones(2))
    script(torch.ones(2))
    assert calls == ["outer", "inner", "outer"]
    assert [vars(kind)["__call__"] for kind in kinds] == before
    assert torch._C._get_graph_executor_optimize()


def test_what_a_watcher_raises_ends_the_call() -> None:
    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), script_calls(refuse):
        _scripted()(torch.ones(2))
    assert _scripted()(torch.ones(2)).shape == (2,)
