# SPDX-License-Identifier: Apache-2.0
"""Models that do what models should not: still equal to plain PyTorch, or left alone by the planner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from zoo.blocks import Stack, inputs
from zoo.models import Case, mean_square
from zoo.odd import LAZY, ODD, SPARSE
from zoo.settling import FIRST_CALLS, Exchanges, FirstCall
from zoo.training import SMALLEST, Loop, assert_checkpointed, assert_same, reference, train

THREE = Loop(steps=3)

_STATEFUL = (
    "statistic",
    "counts",
    "hidden",
    "decays",
    "in-place",
    "buffer",
    "own",
    "changes",
    "exchanges",
    "first",
)
KEEP_SOMETHING = [case for case in ODD if case.name.startswith(_STATEFUL)]


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_equal(case: Case, sample: bool) -> None:
    planned = train(case, THREE, SMALLEST, sample)
    assert_same(reference(case, THREE), planned)
    if case.checkpoints:
        assert_checkpointed(planned)
    if case.profile is not None:
        assert planned.plan.profile == case.profile, planned.plan.notes


@pytest.mark.parametrize("case", KEEP_SOMETHING, ids=lambda case: case.name)
def test_equal_where_a_step_really_runs(case: Case) -> None:
    """It is thrown away, with all that the model keeps of it."""
    planned = train(case, THREE, SMALLEST.replace(use_static_profiling=False), True)
    assert planned.plan.profile == "empirical"
    assert_same(reference(case, THREE), planned)


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
def test_sparse_gradients(sample: bool) -> None:
    loop = Loop(steps=3, optimizer=torch.optim.SGD)
    planned = train(SPARSE, loop, SMALLEST, sample)
    assert_same(reference(SPARSE, loop), planned)
    assert_checkpointed(planned)


def test_parameters_that_the_first_batch_makes() -> None:
    planned = train(LAZY, THREE, SMALLEST)
    assert_same(reference(LAZY, THREE), planned)


@pytest.mark.parametrize("static", [False, True], ids=["real", "fakes"])
@pytest.mark.parametrize("block", [*map(FirstCall, FIRST_CALLS), Exchanges("decay"), Exchanges("weight")],
                         ids=lambda block: f"{type(block).__name__}-{block.kind}")  # fmt: skip
def test_planning_leaves_what_a_first_forward_makes_to_the_first_step(block: nn.Module, static: bool) -> None:
    model = nn.Sequential(block)

    def look() -> Any:
        parts = {name: set(vars(part)) for name, part in model.named_modules()}
        tensors = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
        return parts, {name: None for name, _ in model.named_buffers()}, tensors

    before = look()
    memscale.plan(model, config=SMALLEST.replace(use_static_profiling=static), sample_input=inputs(0))
    after = look()
    assert before[:2] == after[:2] and before[2].keys() == after[2].keys()
    for name, (address, value) in after[2].items():
        assert before[2][name][0] == address and torch.equal(before[2][name][1], value)


class InThreads(Stack):
    """Runs its blocks at once."""

    def forward(self, x: Tensor) -> Any:
        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda block: block(x), self.blocks))


def test_blocks_in_threads_of_their_own_are_not_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would see what they take."""
    with pytest.raises(memscale.errors.ProfileError, match="thread"):
        memscale.plan(InThreads(), config=SMALLEST, sample_input=inputs(0))
    case = Case("threads", InThreads, inputs, mean_square)
    assert_same(reference(case, THREE), train(case, THREE, SMALLEST))
    assert any("runs unchanged: ProfileError" in record.getMessage() for record in caplog.records)


def test_hooks_that_collect_do_not_keep_their_blocks() -> None:
    model, seen = Stack().train(), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(1))
    plan = memscale.plan(model, config=SMALLEST, sample_input=inputs(0))
    assert "blocks.0" in {choice.module for choice in plan.active}
