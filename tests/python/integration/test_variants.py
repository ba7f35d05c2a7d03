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
import tallies
from memscale.techniques.step_table import StepTechnique
from memscale.torchkit.forward_slot import ForwardSlot, StandIn
from patched import use_techniques


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

    __module__ = "memscale.test"  # MemScale's own, which planning does not put back
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


class _Raises(StandIn):
    """Cannot run what the module is given."""

    def __init__(self, owner: Failing) -> None:
        super().__init__(owner.module, owner.module.forward)
        self.owner = owner

    def __call__(self, x: Tensor) -> Tensor:
        tallies.add("calls")  # planning restores all that code reaches
        raise RuntimeError(self.owner.message)


class Failing(Slices):
    """Raises in the traced step, with a message that may not name it."""

    message = "this does not go\nand here is more"

    def attach(self) -> None:
        self.slot = ForwardSlot(self.module, self.path)
        self.slot.put(_Raises(self))


class Telling(Failing):
    """Says who raises."""

    message = "the step refuses 'failing'\nand here is more"


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


def failing(kind: type[Failing], name: str) -> StepTechnique:
    return StepTechnique(name, "fails", True, False, lambda config: True, places(kind, name, "head"))


ASKED = dataclasses.replace(BOTH, asked=True)
INEXACT = dataclasses.replace(BOTH, exact=False)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def have(*techniques: StepTechnique) -> None:
        use_techniques(monkeypatch, techniques)

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
    executor = memscale.executor_of(model)
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


# ---- a technique that the step cannot be traced with -----------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"), [(Telling, "failing"), (Failing, "mlp_tile")], ids=["named by its error", "tiles"]
)
def test_what_the_step_cannot_be_traced_with_is_left_out(table: Any, kind: Any, name: str) -> None:
    table(BOTH)
    without = smallest()
    table(BOTH, failing(kind, name))
    plan = smallest()
    assert [step.technique for step in plan.steps] == ["slices"]
    assert plan.predicted == without.predicted and plan.digest == without.digest
    line = kind.message.partition("\n")[0]
    assert plan.notes.count(f"{name}: the step cannot be traced with it ({line})") == 1


def test_each_of_several_tiles_is_found(table: Any) -> None:
    table(BOTH, failing(Failing, "mlp_tile"), failing(Failing, "attention_tile"))
    plan = smallest()
    assert [step.technique for step in plan.steps] == ["slices"]
    both = "the step cannot be traced with attention_tile, mlp_tile (this does not go)"
    assert {f"mlp_tile: {both}", f"attention_tile: {both}"} <= set(plan.notes)


def test_it_is_found_out_once(table: Any) -> None:
    """However many ways there are."""
    counts = []
    for others in [(), (BOTH, dataclasses.replace(BOTH, name="again", find=places(Slices, "again", "head")))]:
        table(*others, failing(Telling, "failing"))
        tallies.clear()
        smallest()
        counts.append(tallies.of("calls"))
    assert counts[0] == counts[1] > 0


def test_where_nobody_can_tell_what_was_not_asked_for_is_left_out(table: Any) -> None:
    without = smallest()
    table(BOTH, failing(Failing, "strange"))
    plan = smallest()
    assert not plan.steps and plan.predicted == without.predicted
    why = "the step cannot be traced with slices, strange (this does not go)"
    assert {f"slices: {why}", f"strange: {why}"} <= set(plan.notes)


def test_what_was_asked_for_stays_without_what_fails(table: Any) -> None:
    table(ASKED, failing(Failing, "strange"))
    plan = smallest()
    assert [step.technique for step in plan.steps] == ["slices"]
    assert "strange: the step cannot be traced with it (this does not go)" in plan.notes


def test_what_was_asked_for_and_fails_is_an_error(table: Any) -> None:
    table(BOTH, dataclasses.replace(failing(Failing, "strange"), asked=True))
    with pytest.raises(Exception, match="this does not go"):
        smallest()


def test_sizes_are_told_without_what_fails(table: Any) -> None:
    model, sample = net(), batch()
    table(BOTH)
    without = memscale.predict(model, config=config("8MiB"), sample_input=sample).largest_batch()
    table(BOTH, failing(Telling, "failing"))
    assert memscale.predict(model, config=config("8MiB"), sample_input=sample).largest_batch() == without


class Forces(nn.Module):
    """Differentiates an energy in its forward, so that backward differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.head(self.energy(x)).sum(), x, create_graph=True)
        return (force.square().sum(-1) - 1).square().mean()


def test_a_model_that_differentiates_twice_is_planned_without_tiles() -> None:
    torch.manual_seed(0)
    plain, model = Forces(), Forces()
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    exact = config("1MiB", use_mixed_precision=False)  # a processor with BF16 would gain by it
    model, _ = memscale.apply_all_optimizations(model, optimizer, exact)
    losses = [net(batch()) for net in (plain, model)]
    for loss in losses:
        loss.backward()
    plan = memscale.executor_of(model).plan
    assert plan is not None and not plan.steps
    assert any(note.startswith("mlp_tile: the step cannot be traced with it (module") for note in plan.notes)
    assert torch.equal(*losses)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    memscale.detach(model)
