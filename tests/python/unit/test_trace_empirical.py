# SPDX-License-Identifier: Apache-2.0
"""A real step recorded: what chance decides in it decides nothing about its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale
from amounts import also

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("chance", "inside"), [("high", False), ("low", True), *also(("low", False), ("like", True))]
)
def test_layers_that_chance_leaves_out_are_planned_for(chance: str, inside: bool) -> None:
    peak(lambda: True, inside)  # the first recording of a process holds one tensor for longer
    whole = peak(lambda: True, inside)
    first, second = (peak(CHANCES[chance], inside, seed) for seed in (0, 1))
    assert first == second
    # A block that draws is recorded with the generator's state, which its checkpoint keeps.
    states = 6 * (torch.get_rng_state().nbytes + 512) if inside else 0
    assert whole <= first <= whole + states
    assert peak(lambda: False, inside) < whole


class Unlike(nn.Module):
    """No two of its modules are alike, and what they are given is not saved: nothing runs checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.second = nn.LSTM(64, 64, batch_first=True)
        self.third = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 320), nn.GELU(), nn.Linear(320, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x * 2) + 1)[0] * 2)
        return x.pow(2).mean()


class Alike(nn.Module):
    """Blocks that run checkpointed meanwhile, draw random numbers, have buffers, and keep what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 64)
            )
            for _ in range(4)
        )
        self.seen: list[Tensor] = []
        self.blocks[1].register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        for block in self.blocks:
            x = block(x * 2) + 1
        return x.pow(2).mean()


@pytest.mark.parametrize("kind", [Unlike, Alike])
def test_what_is_recorded_is_what_fakes_tell(kind: Callable[[], nn.Module]) -> None:
    """Plain, and with a plan: neither what the recording holds itself nor what checkpoints do is in it."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, 64) if kind is Unlike else torch.randn(256, 64)
    for budget in ("4GiB", 1):
        plans = []
        for static in (True, False):
            config = AMPLE.replace(memory_budget=budget, use_static_profiling=static)
            plans.append(memscale.plan(kind().train(), config=config, sample_input=x))
        expected, recorded = plans
        assert (expected.profile, recorded.profile) == ("static", "empirical")
        assert bool(recorded.active) == (budget == 1)
        assert [item.module for item in expected.active] == [item.module for item in recorded.active]
        assert expected.predicted.allocated_peak_bytes == recorded.predicted.allocated_peak_bytes


@pytest.mark.parametrize("share", [60, 200])
def test_a_recording_above_the_budget_is_said(
    share: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    x = torch.randn(8, 32, 64)
    plain = memscale.plan(Unlike().train(), config=AMPLE, sample_input=x).predicted.allocated_peak_bytes
    model = memscale.wrap(Unlike().train(), AMPLE.replace(memory_budget=plain * share // 100), x)
    said = [record.message for record in caplog.records if "recording may have peaked" in record.message]
    assert len(said) == (share < 100)
    memscale.detach(model)
