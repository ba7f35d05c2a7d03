# SPDX-License-Identifier: Apache-2.0
"""A real step recorded: what chance decides in it decides nothing about its plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale

AMPLE = memscale.Config(memory_budget="4GiB", use_static_profiling=False, enable_logging=False)
Decide = Callable[[], object]


class Block(nn.Module):
    """Drops what it has made of its input, or not."""

    def __init__(self, decide: Decide | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        if self.decide is not None and not self.decide():
            return x
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks of which each runs only if a number says so: the model's number, or its own."""

    def __init__(self, decide: Decide, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(decide if inside else None) for _ in range(6))
        self.decide = (lambda: True) if inside else decide

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.decide():
                x = block(x)
        return x.sum()


def peak(decide: Decide, inside: bool, seed: int = 0) -> int:
    """Of a plain step, by a profile of real steps."""
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    plan = memscale.plan(Model(decide, inside), config=AMPLE, sample_input=torch.ones(32, 8))
    assert plan.profile == "empirical"
    torch.manual_seed(seed)
    assert torch.equal(torch.get_rng_state(), state)
    return plan.predicted.allocated_peak_bytes


CHANCES: dict[str, Decide] = {
    "high": lambda: torch.rand(()) > 0.5,
    "low": lambda: torch.rand([]) < 0.5,
    "like": lambda: torch.rand_like(torch.zeros(1)).item() < 0.5,
}


@pytest.mark.parametrize(
    ("chance", "inside"), [("high", False), ("low", False), ("low", True), ("like", True)]
)
def test_layers_that_chance_leaves_out_are_planned_for(chance: str, inside: bool) -> None:
    whole = peak(lambda: True, inside)
    first, second = (peak(CHANCES[chance], inside, seed) for seed in (0, 1))
    assert first == second
    # A block that draws is recorded with the generator's state, which its checkpoint keeps.
    states = 6 * (torch.get_rng_state().nbytes + 512) if inside else 0
    assert whole <= first <= whole + states
    assert peak(lambda: False, inside) < whole
