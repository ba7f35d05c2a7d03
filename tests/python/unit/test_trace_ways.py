# SPDX-License-Identifier: Apache-2.0
"""Which way a static trace takes where numbers decide it; what advice an optimizer can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

import memscale
from memscale.trace.fake_optimizer import free_switches
from zoo.training import peak_bytes

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw with a tensor": lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(0.1), fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


class Drops(nn.Module):
    """Layers that a random number leaves out, below or above a share."""

    def __init__(self, above: bool, draws: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.above, self.draws = above, draws

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draws:
                draw = torch.rand([])
                if (draw > 0.1) if self.above else (draw < 0.9):
                    continue
            x = torch.tanh(layer(x))
        return x.sum() + sum(layer.bias.sum() for layer in self.layers)


class Masked(nn.Module):
    """A mask of ones that the model makes for itself, and a way around it if it hides nothing."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 64)
        mask[:, :0] = 0
        if not bool(mask.bool().all()):
            x = torch.exp(x * mask)
        return torch.tanh(x).sum()


def peak(model: nn.Module) -> int:
    sample = torch.ones(64, 64, requires_grad=True)
    return memscale.predict(model, sample_input=(sample,), device="cpu").plain.allocated_peak_bytes


@pytest.mark.parametrize("above", [False, True])
def test_every_layer_counts_whatever_is_drawn(above: bool) -> None:
    torch.manual_seed(0)
    found = {peak(Drops(above)) for _ in range(4)}
    assert len(found) == 1
    whole = peak(Drops(above, draws=False))
    assert whole <= found.pop() <= whole + 64  # the number itself


def test_a_mask_of_ones_is_known() -> None:
    trace = memscale.predict(Masked(), sample_input=(torch.ones(64, 64, requires_grad=True),), device="cpu")
    assert "tanh" in {holder.operation for holder in trace.plain.holders}
    assert "exp" not in {holder.operation for holder in trace.plain.holders}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_is_planned_and_not_run(name: str) -> None:
    """PyTorch has no kernel for fakes of most of them, and would run them on tensors of the same sizes."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    weights = sum(value.nbytes for value in model.parameters())
    plans = []

    def work() -> None:
        torch.empty(7)  # so that there is something to see
        plans.append(memscale.plan(model, FUSED[name](model.parameters()), sample_input=torch.ones(2, 300)))

    assert peak_bytes(work) < weights // 10
    state = plans[0].predicted.by_category["optimizer_state"]
    assert weights <= state if name == "sgd" else 2 * weights <= state


def test_switches_of_an_optimizer() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    assert free_switches(None, by_default=False) == ("fused", "8bit")
    assert free_switches(torch.optim.AdamW(weights), by_default=True) == ("fused", "foreach", "8bit")
    assert free_switches(torch.optim.AdamW(weights, foreach=False), by_default=True) == ("fused", "8bit")
    assert free_switches(torch.optim.RMSprop(weights), by_default=False) == ()
    assert free_switches(torch.optim.SGD(weights, fused=True), by_default=True) == ("8bit",)

    class AdamW8bit(torch.optim.AdamW):
        """Takes the arguments, and has no such thing."""

    assert free_switches(AdamW8bit(weights), by_default=True) == ()


class AskedAgain(nn.Module):
    """Asks numbers that lie where a mask of ones has been."""

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        torch.ones(words.shape)  # is gone at once
        if bool((words.float() > 0).any()):
            x = torch.exp(x)
        return torch.tanh(x).sum()


def test_memory_of_a_mask_says_nothing_of_the_next_tensor_there() -> None:
    weight = torch.ones(4, 64, requires_grad=True)
    config = memscale.Config(use_empirical_fallback=False)
    for _ in range(5):
        with pytest.raises(DataDependentOutputException):
            memscale.plan(AskedAgain(), None, config, (weight, torch.ones(4, dtype=torch.int64)))


def test_a_search_for_nans_asks_a_trace_for_no_values() -> None:
    """Or the plan would come from a real step, which may take more than the budget."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = memscale.Config(use_empirical_fallback=False)
    expected = memscale.plan(model, None, config, torch.ones(8, 64)).predicted
    with torch.autograd.set_detect_anomaly(True):
        found = memscale.plan(model, None, config, torch.ones(8, 64)).predicted
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert found == expected
