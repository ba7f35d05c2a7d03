# SPDX-License-Identifier: Apache-2.0
"""A plan for another method than `forward`: a whole step up to its loss, as trainers call one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.core.executor import Executor
from memscale.core.wrapping import begin
from memscale.torchkit.forward_slot import StandIn
from memscale.weights.saves import can_save
from weight_samples import Stack, batch, streamed
from zoo.training import SMALLEST, same_bits, seed


class Stepped(Stack):
    """Has a step beside its forward, which counts its calls."""

    seen = 0

    def step(self, tokens: Tensor, number: int = 0) -> Tensor:
        self.seen += 1
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def around(self, tokens: Tensor) -> Tensor:
        """Uses weights of the module itself, and never its forward."""
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class AsForward(nn.Module):
    """The same step as a forward."""

    def __init__(self, inner: Stepped) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(tokens).flatten(0, 1), tokens.flatten())


def made() -> Stepped:
    seed(3)
    return Stepped().train()


def trained(model: Stepped, method: str, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    torch.manual_seed(5)
    for number in range(steps):
        loss = getattr(model, method)(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), torch.get_rng_state()]
    return found + [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("method", ["step", "around"])
def test_training_is_bit_equal_and_the_model_left_as_it_was(method: str) -> None:
    plain, model = made(), made()
    before = dict(vars(model))
    begin(model, SMALLEST, None, method=method)
    expected, found = trained(plain, method), trained(model, method)
    executor: Executor = memscale.executor_of(model)
    assert executor.plan is not None and executor.plan.active
    assert all(map(same_bits, expected, found)) and model.seen == plain.seen
    memscale.detach(model)
    assert {**vars(model), "seen": 0} == {**before, "seen": 0}


def test_the_plan_counts_the_step_as_a_forward_of_the_same_code() -> None:
    as_forward = memscale.plan(AsForward(made()), config=Config(memory_budget="1GiB"), sample_input=batch(0))
    model = made()
    executor = begin(model, Config(memory_budget="1GiB", enable_logging=False), batch(0), method="step")
    assert executor.plan is not None
    assert executor.plan.plain.allocated_peak_bytes == as_forward.plain.allocated_peak_bytes
    assert memscale.verify(model, batch(0)).equal and model.seen == 0


def test_its_forward_alone_brings_no_plan() -> None:
    model = made()
    executor = begin(model, SMALLEST, None, method="step")
    model(batch(0)).sum().backward()
    assert executor.plan is None
    model.step(batch(0))
    assert executor.plan is not None


def test_copies_are_plain_and_a_second_wrap_takes_its_place() -> None:
    model = made()
    begin(model, SMALLEST, batch(0), method="step")
    twin = copy.deepcopy(model)
    assert "step" not in vars(twin) and same_bits(twin.step(batch(0)), made().step(batch(0)))
    memscale.wrap(model, SMALLEST)
    assert "step" not in vars(model) and "forward" in vars(model)


@pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")
@pytest.mark.parametrize("method", ["step", "around"])
def test_weights_are_streamed_where_only_that_method_runs(method: str) -> None:
    plain, model = made(), made()
    begin(model, Config(memory_budget="1GiB", enable_logging=False), None, method=method)
    with streamed(model) as stream:
        assert stream.units and isinstance(vars(model)[method].original, StandIn)  # the root's own
        assert all(map(same_bits, trained(plain, method), trained(model, method)))
    memscale.detach(model)
    assert method not in vars(model)
