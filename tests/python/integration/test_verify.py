# SPDX-License-Identifier: Apache-2.0
"""`verify` and `Config(verify_correctness=True)` find what cannot be run twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from test_restore import assert_as_before, image
from torch import Tensor

import memscale
import tallies
from memscale import Config
from memscale.errors import RecomputeError, VerificationError
from zoo.blocks import Block, Stack, inputs
from zoo.models import MAIN, case
from zoo.training import SMALLEST, Loop, assert_same, built, reference, seed, train

VERIFIED = Config(memory_budget=1, enable_logging=False, verify_correctness=True)


def far_counter() -> Callable[[], Block]:
    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            tallies.add("calls")  # what code can reach is for each run as it was for the first
            return super().forward(x) * (1 + 0.01 * tallies.of("calls"))

    return Counts


@pytest.fixture(autouse=True)
def no_calls() -> None:
    tallies.clear()


def clock() -> Callable[[], Block]:
    class Clock(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + time.perf_counter() % 10)

    return Clock


@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_verify_says_equal_and_leaves_the_model_alone(case: object) -> None:
    model = built(case)  # type: ignore[arg-type]
    before = image(model)
    report = memscale.verify(model, case.batch(0))  # type: ignore[attr-defined]
    assert report.equal and report.first_difference is None and report.checkpointed > 0
    assert {row.kind for row in report.rows} >= {"loss", "gradient"}
    assert_as_before(before, image(model))


def test_a_wrapped_model_is_verified_with_its_own_plan() -> None:
    gpt2 = case("gpt2")
    model = memscale.wrap(built(gpt2), SMALLEST, gpt2.batch(0))
    plan = memscale.executor_of(model).plan
    report = memscale.verify(model, gpt2.batch(1))
    assert report.equal and report.checkpointed == len(plan.active)
    assert memscale.executor_of(model).plan is plan
    assert [path for path, module in model.named_modules() if "forward" in module.__dict__] == [
        "", *(choice.module for choice in plan.active)
    ]  # fmt: skip


class Detached(Stack):
    """Its weights have gradients only as far as `kept` says."""

    kept = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.kept else y.detach()


@pytest.mark.parametrize("kept", [False, True])
def test_a_step_without_gradients_is_not_called_a_comparison_of_them(kept: bool) -> None:
    seed()
    model = Detached().train()
    model.kept = kept
    report = memscale.verify(model, inputs(0))
    assert any(row.kind == "gradient" for row in report.rows) == kept
    for text in (report.summary(), report.table(), repr(report)):
        assert ("no parameter got a gradient" in text) != kept
        assert ("verified: loss, " in text) == kept  # without gradients there is no loss either


def test_training_is_equal_with_the_check_on() -> None:
    for name in ("gpt2", "convnet"):
        planned = train(case(name), Loop(steps=3), VERIFIED)
        assert_same(reference(case(name), Loop(steps=3)), planned)


@pytest.mark.parametrize("block", [far_counter, clock])
class TestWhatCannotBeRunTwice:
    def test_verify_reports_it(self, block: Callable[[], Callable[[], Block]]) -> None:
        seed()
        report = memscale.verify(Stack(block()).train(), inputs(0))
        assert not report.equal
        assert report.first_difference is not None and "NOT EQUAL" in report.table()
        with pytest.raises(VerificationError):
            report.require()

    @pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
    def test_the_check_before_training_raises(
        self, block: Callable[[], Callable[[], Block]], sample: bool
    ) -> None:
        seed()
        model = Stack(block()).train()
        before = image(model)
        with pytest.raises((VerificationError, RecomputeError)):
            memscale.wrap(model, VERIFIED, inputs(0) if sample else None)
            model(*inputs(0)).mean().backward()
        if memscale.executor_of(model) is not None:
            with pytest.raises((VerificationError, RecomputeError)):  # nor does the next step train wrong
                model(*inputs(0)).mean().backward()
            memscale.detach(model)
        before["rng"] = torch.get_rng_state()
        assert_as_before(before, image(model))
