# SPDX-License-Identifier: Apache-2.0
"""Ways to compute a step: which step techniques a plan has, what it says of them, that they come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core import step_ways
from memscale.techniques.forward_slot import ForwardSlot, StandIn
from memscale.techniques.step_table import StepTechnique


class Wide(nn.Module):
    """Makes a wide intermediate and saves it. `small` does the same with less memory and more work."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 40 * width), nn.Linear(40 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Wide(), Wide(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))).square().mean()


class _Again(StandIn):
    """Runs the module in slices, under PyTorch's own checkpoint."""

    def __init__(self, owner: Slices) -> None:
        super().__init__(owner.module, owner.module.forward)
        self.owner = owner

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.original(x)
        self.owner.used = True
        parts = [
            torch.utils.checkpoint.checkpoint(self.original, part, use_reentrant=False) for part in x.chunk(8)
        ]
        return torch.cat(parts)


class Slices:
    """A step technique for this test."""

    beneath: StandIn | None = None
    reason = ""

    def __init__(self, name: str, module: nn.Module, path: str) -> None:
        self.name, self.module, self.path = name, module, path
        self.used = False

    def attach(self) -> None:
        self.used = False
        self.slot = ForwardSlot(self.module, self.path)
        self.slot.put(_Again(self))

    def undo(self) -> None:
        self.slot.remove()


class Idle(Slices):
    """Finds a place and then stands aside."""

    reason = "the module is too small"

    def attach(self) -> None:
        pass

    def undo(self) -> None:
        pass


class Disturbing(Slices):
    """Stands aside, after it has done something."""

    reason = "it draws random numbers"

    @property
    def used(self) -> bool:
        return False

    @used.setter
    def used(self, used: bool) -> None:
        pass


def places(kind: type[Slices], name: str, *paths: str) -> Callable[..., list[Slices]]:
    def find(model: nn.Module, hardware: Any) -> list[Slices]:
        return [kind(name, model.get_submodule(path), path) for path in paths if hasattr(model, path)]

    return find


BOTH = StepTechnique(
    "slices", "in slices", True, False, lambda config: True, places(Slices, "slices", "first", "second")
)
NOTHING = StepTechnique(
    "idle", "does nothing", True, False, lambda config: True, places(Idle, "idle", "head")
)
ABSENT = StepTechnique(
    "absent", "is nowhere", True, False, lambda config: True, lambda *_: [], lambda *_: "no such hardware"
)
DISTURBING = StepTechnique(
    "slices", "in slices", True, False, lambda config: True, places(Disturbing, "slices", "first", "second")
)
ASKED = dataclasses.replace(BOTH, asked=True)
INEXACT = dataclasses.replace(BOTH, exact=False)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def have(*techniques: StepTechnique) -> None:
        monkeypatch.setattr(step_ways, "STEP_TECHNIQUES", techniques)

    return have


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2048, 16)


def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def config(budget: int | str, **fields: Any) -> memscale.Config:
    return memscale.Config(memory_budget=budget, enable_logging=False, **fields)


def smallest(**fields: Any) -> memscale.Plan:
    return memscale.plan(net(), config=config("1MiB", **fields), sample_input=batch())


def test_attached_where_the_budget_demands_it(table: Any) -> None:
    without = smallest()
    table(BOTH)
    plan = smallest()
    assert [step.technique for step in plan.steps] == ["slices"]
    step = plan.steps[0]
    assert step.modules == ("first", "second") and step.types == ("Wide",)
    assert step.bytes == without.predicted.device_used_peak_bytes - plan.predicted.device_used_peak_bytes > 0
    assert plan.smallest_peak_bytes == plan.predicted.device_used_peak_bytes
    assert plan.digest != without.digest
    assert plan.plain == dataclasses.replace(without.plain, smallest_peak_bytes=plan.smallest_peak_bytes)


def test_not_attached_where_the_plain_step_fits(table: Any) -> None:
    table(BOTH)
    assert not memscale.plan(net(), config=config("1GiB"), sample_input=batch()).does_something


def test_what_the_user_asked_for_is_attached_in_any_case(table: Any) -> None:
    table(ASKED)
    plan = memscale.plan(net(), config=config("1GiB"), sample_input=batch())
    assert [step.technique for step in plan.steps] == ["slices"] and plan.steps[0].other_fits
    assert not plan.active


def test_inexact_techniques_need_exact_to_be_off(table: Any) -> None:
    table(INEXACT)
    assert not smallest().steps
    plan = smallest(exact=False)
    assert plan.steps and not plan.exact


def test_a_plan_rests_on_no_trace_of_what_stood_aside(table: Any) -> None:
    without = smallest()
    table(DISTURBING)
    plan = smallest()
    assert not plan.steps and "slices: it draws random numbers" in plan.notes
    assert plan.predicted == without.predicted and plan.digest == without.digest


def test_those_that_stand_aside_say_why_and_leave_no_trace(table: Any) -> None:
    table(NOTHING, ABSENT)
    plan = smallest()
    assert not plan.steps
    assert "idle: the module is too small" in plan.notes and "absent: no such hardware" in plan.notes


def test_a_useless_technique_is_left_out(table: Any) -> None:
    """Slices of the head cost time and free nothing."""
    find = places(Slices, "useless", "head")
    table(BOTH, StepTechnique("useless", "nothing much", True, False, lambda config: True, find))
    assert [step.technique for step in smallest().steps] == ["slices"]


def test_explained_and_round_trip(table: Any) -> None:
    table(BOTH)
    plan = smallest()
    text = plan.explain()
    assert "slices 2 × Wide: first, second" in text
    assert "slices: in slices (bit-equal at this precision)" in text
    assert memscale.Plan.from_json(plan.to_json()) == plan


def test_training_is_as_planned_and_detach_restores(table: Any) -> None:
    table(BOTH)
    plain, model = net(), net()
    loss = plain(batch())
    loss.backward()
    memscale.wrap(model, config("1MiB"))
    ours = model(batch())
    ours.backward()
    assert torch.equal(loss, ours)
    for (name, mine), theirs in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)  # summed over slices
    executor = model._memscale_executor
    assert executor.plan.steps and "forward" in model.first.__dict__
    with executor.bare(keep=("slices",)):
        assert isinstance(model.first.forward, _Again)
    with executor.bare():
        assert "forward" not in model.first.__dict__
    assert "forward" in model.first.__dict__
    memscale.detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_predictions_and_sizes_know_of_them(table: Any) -> None:
    model, sample = net(), batch()
    before = memscale.predict(model, config=config("8MiB"), sample_input=sample)
    table(BOTH)
    after = memscale.predict(model, config=config("8MiB"), sample_input=sample)
    assert after.allocated_peak_bytes < before.allocated_peak_bytes
    assert after.largest_batch() > before.largest_batch()
    assert after.largest_batch(with_plan=False) == before.largest_batch(with_plan=False)
