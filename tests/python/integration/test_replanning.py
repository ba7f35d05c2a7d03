# SPDX-License-Identifier: Apache-2.0
"""A step that is no longer the one planned for is re-planned before it runs, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from zoo.blocks import WIDTH, Block, Stack
from zoo.models import case, generator
from zoo.training import SMALLEST, Loop, assert_same, built, peak_bytes, reference, seed, train

CONFIG = memscale.Config(memory_budget="64MiB", enable_logging=False)


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=generator(0))


class Trainer:
    """A wrapped stack and a step."""

    def __init__(self, model: nn.Module | None = None, config: memscale.Config = CONFIG) -> None:
        seed()
        self.model = memscale.wrap((model or Stack()).train(), config)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.model(*args, **kwargs).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def plan(self) -> memscale.Plan:
        executor: Executor = memscale.executor_of(self.model)
        assert executor.plan is not None
        return executor.plan


def test_equal_steps_are_planned_once(plans: list[object]) -> None:
    trainer = Trainer()
    for _ in range(4):
        trainer.step(rows(64))
    assert len(plans) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_shapes_that_take_turns_are_planned_once_each(
    count: int, plans: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(config=memscale.Config(memory_budget="64MiB"))
    caplog.set_level("INFO", "memscale")
    for turn in range(12):
        batch, length = ((16, 8), (8, 16), (4, 32))[turn % count]
        trainer.step(torch.randn(batch, length, WIDTH))
    assert len(plans) == count
    assert "re-planned" not in caplog.text  # all of them fit as they are


def test_a_known_plan_that_covers_is_taken(plans: list[object]) -> None:
    trainer = Trainer()
    for shape in ((16, 8), (8, 16), (16, 7), (7, 16), (16, 8)):
        trainer.step(torch.randn(*shape, WIDTH))
    assert len(plans) == 2


def test_where_packed_sequences_begin_asks_for_no_plan(plans: list[object]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Stack()

        def forward(self, x: Tensor, starts: Tensor, longest: int) -> Tensor:
            return self.layers(x) / len(starts) * longest

    trainer = Trainer(Packed())
    for turn in range(24):
        starts = torch.arange(3 + 5 * turn % 17, dtype=torch.int32)
        trainer.step(rows(64), starts, longest=64 + turn % 11)
    assert len(plans) <= 5


def test_a_larger_batch_is_planned_before_it_runs_a_smaller_one_is_not(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.step(rows(64))
    small = trainer.plan.predicted.allocated_peak_bytes
    trainer.step(rows(32))
    assert len(plans) == 1
    trainer.step(rows(256))
    assert len(plans) == 2
    assert trainer.plan.predicted.allocated_peak_bytes > small
    trainer.step(rows(64))
    trainer.step(rows(255))
    assert len(plans) == 2


def test_the_first_large_batch_stays_within_the_budget() -> None:
    def work(config: memscale.Config | None, plans: list[memscale.Plan]) -> None:
        seed()
        model = Stack(depth=6).train()
        if config is not None:
            memscale.wrap(model, config)
        optimizer = torch.optim.AdamW(model.parameters())
        for count in (64, 64, 2048, 2048):
            model(rows(count)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if config is not None:
            plans.append(memscale.executor_of(model).plan)

    plain, plans = peak_bytes(lambda: work(None, [])), []
    budget = plain * 7 // 10
    peak = peak_bytes(lambda: work(memscale.Config(memory_budget=budget, enable_logging=False), plans))
    assert plans[0].fits and plans[0].active
    assert peak <= budget


def test_an_optimizer_with_less_state_is_noticed(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.step(rows(64))
    assumed = trainer.plan.predicted.by_category
    trainer.step(rows(64))
    assert len(plans) == 2
    assert trainer.plan.predicted.by_category.get("optimizer_state", 0) < assumed["optimizer_state"]
    trainer.step(rows(64))
    assert len(plans) == 2


def test_another_models_optimizer_is_not(plans: list[object]) -> None:
    trainer, other = Trainer(), nn.Linear(3, 3)
    trainer.step(rows(64))
    other(torch.zeros(1, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    trainer.step(rows(64))
    assert len(plans) == 1


def test_optimize_plans_for_the_optimizer_it_is_given(plans: list[object]) -> None:
    model = Stack().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memscale.optimize(model, optimizer, CONFIG, rows(64)) as executor:
        assert executor.plan is not None
        assert not executor.plan.predicted.by_category.get("optimizer_state")
        model(rows(64)).mean().backward()
        optimizer.step()
        model(rows(64))
    assert len(plans) <= 2  # the gradients were kept


def test_gradient_accumulation_is_planned_once_more(plans: list[object]) -> None:
    trainer = Trainer()
    for _ in range(3):
        trainer.model(rows(64)).mean().backward()
        trainer.step(rows(64))
    assert len(plans) == 2


def test_an_output_that_is_still_held_is_noticed(plans: list[object]) -> None:
    trainer = Trainer()
    for _ in range(4):
        output = trainer.model(rows(16384))
        output.mean().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    assert len(plans) == 2


def test_a_held_loss_and_a_stateful_optimizer(plans: list[object], caplog: pytest.LogCaptureFixture) -> None:
    """The everyday loop that keeps `loss` until the next one replaces it."""
    gpt2 = case("gpt2")
    model = memscale.wrap(built(gpt2), SMALLEST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        output = model(**gpt2.batch(step))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "cannot plan" not in caplog.text
    assert len(plans) <= 2


def test_unfreezing_parameters(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.model.blocks[0].requires_grad_(False)
    trainer.step(rows(64))
    frozen = trainer.plan.predicted.by_category
    trainer.model.blocks[0].requires_grad_(True)
    trainer.step(rows(64))
    assert len(plans) == 2
    assert trainer.plan.predicted.by_category["optimizer_state"] > frozen["optimizer_state"]


def test_autocast_is_part_of_what_was_planned(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.step(rows(64))
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step(rows(64))
    assert len(plans) == 2
    trainer.step(rows(64))
    assert len(plans) == 2  # known


def test_evaluation_does_not_plan(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.step(rows(64))
    digest = trainer.plan.digest
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(rows(4096))
    trainer.model.train()
    with torch.inference_mode():
        trainer.model(rows(4096))
    trainer.step(rows(64))
    assert len(plans) == 1 and trainer.plan.digest == digest


def test_train_and_eval_switches_train_equal() -> None:
    convnet = case("convnet")

    def use(wrapped: bool) -> list[Tensor]:
        model = built(convnet)
        if wrapped:
            memscale.wrap(model, SMALLEST)
        results = []
        for step in range(4):
            model.train(step % 2 == 0)
            loss = model(**convnet.batch(step))["loss"]
            loss.backward()
            results += [
                loss.detach(),
                *(p.grad.clone() for p in model.parameters()),
                *(b.clone() for b in model.buffers()),
            ]
            model.zero_grad()
        return results

    assert all(torch.equal(a, b) for a, b in zip(use(False), use(True), strict=True))


def test_training_in_evaluation_mode_is_planned_or_said(
    plans: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    seed()
    model = memscale.wrap(Stack().eval(), SMALLEST)
    for _ in range(3):
        model(rows(256)).mean().backward()
    assert memscale.executor_of(model).plan is not None or "eval" in caplog.text


def test_hooks_that_come_to_parts_of_a_block_are_planned_for(plans: list[object]) -> None:
    trainer, seen = Trainer(config=SMALLEST), []
    trainer.step(rows(256))
    assert "blocks.0" in [choice.module for choice in trainer.plan.active]
    handle = trainer.model.blocks[0].up.register_forward_hook(lambda *args: seen.append(1))
    trainer.step(rows(256))
    trainer.step(rows(256))
    assert len(plans) == 2
    assert seen == [1, 1]
    handle.remove()
    trainer.step(rows(256))
    assert len(plans) == 2


class HooksItself(Stack):
    """Puts a hook on a layer for the time of some forwards."""

    hooked = False

    def forward(self, x: Tensor) -> Any:
        if not type(self).hooked:
            return super().forward(x)
        handle = self.blocks[0].up.register_forward_hook(lambda module, args, out: out * 2)
        try:
            return super().forward(x)
        finally:
            handle.remove()


def test_a_hook_that_comes_within_a_step_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(HooksItself(), SMALLEST)
    trainer.step(rows(256))
    monkeypatch.setattr(HooksItself, "hooked", True)
    for _ in range(3):
        trainer.step(rows(256))
    assert [record.getMessage() for record in caplog.records if "forward hook" in record.getMessage()] == [
        "a forward hook came to a part of 'blocks.0' while the model ran: its calls are not checkpointed "
        "while the hook is there, and take more memory than planned"
    ]


class TakesNumber(Stack):
    def forward(self, x: Tensor, step: int = 0, share: float = 1.0) -> Any:
        return super().forward(x) * (1 + step * share)


def test_a_number_that_changes_with_every_step_is_not_planned_for_ever(plans: list[object]) -> None:
    trainer = Trainer(TakesNumber())
    for step in range(8):
        trainer.step(rows(16), step=step, share=step / 10)
    assert len(plans) < 8


def test_many_shapes_do_not_pile_up() -> None:
    loop = Loop(steps=6)
    growing = case("lstm")
    longer = type(growing)(
        "growing",
        growing.build,
        lambda step: (growing.batch(step)[0][:, : 8 + 4 * step],),
        growing.loss,
        None,
    )
    planned = train(longer, loop, SMALLEST)
    assert_same(reference(longer, loop), planned)


def test_a_rejected_batch_is_the_users_error_and_the_next_is_planned(plans: list[object]) -> None:
    trainer = Trainer(config=SMALLEST)
    with pytest.raises(RuntimeError, match=r"shape|normalized"):
        trainer.step(torch.zeros(3, WIDTH + 1))
    trainer.step(rows(256))
    assert trainer.plan.active


def test_a_strict_budget_that_a_larger_batch_breaks_is_an_error_before_it_runs() -> None:
    config = memscale.Config(memory_budget="1MiB", strict_budget=True, enable_logging=False)
    trainer, ran = Trainer(config=config), []
    trainer.step(rows(8))
    trainer.model.blocks[0].register_forward_hook(lambda *args: ran.append(1))
    with pytest.raises(memscale.errors.BudgetError):
        trainer.step(rows(8192))
    trainer.step(rows(8))
    assert isinstance(trainer.model.blocks[0], Block)


class TestWhatStandsAboveTheForward:
    """Planning happens inside the first forward: what the owner put around it must not run a second time."""

    def test_an_autocast_around_the_forward(self) -> None:
        gpt2 = case("gpt2")

        def use(wrapped: bool) -> list[Tensor]:
            model = built(gpt2)
            if wrapped:
                memscale.wrap(model, SMALLEST)
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
            results = []
            for step in range(2):
                model(**gpt2.batch(step)).loss.backward()
                assert not torch.is_autocast_enabled("cpu")
                results += [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
            return results

        assert all(torch.equal(a, b) for a, b in zip(use(False), use(True), strict=True))

    def test_hooks_of_the_model_see_one_call_per_step(self) -> None:
        seen: list[str] = []

        def scale(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            seen.append("pre")
            return (torch.cat([args[0], args[0]], dim=0),)

        seed()
        model = memscale.wrap(Stack().train(), SMALLEST)
        model.register_forward_pre_hook(scale)
        model.register_forward_hook(lambda *args: seen.append("post"))
        model(rows(256)).mean().backward()
        assert seen == ["pre", "post"]
        assert memscale.executor_of(model).plan.active


def test_every_optimizer_of_a_model_is_counted(plans: list[object]) -> None:
    def work(config: memscale.Config | None, found: list[memscale.Plan]) -> None:
        seed()
        model = Stack(depth=6).train()
        if config is not None:
            memscale.wrap(model, config)
        matrices = [item for item in model.parameters() if item.dim() > 1]
        vectors = [item for item in model.parameters() if item.dim() < 2]
        first, second = torch.optim.AdamW(matrices), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)
        for _ in range(4):
            model(rows(16)).pow(2).mean().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        if config is not None:
            found.append(memscale.executor_of(model).plan)

    found: list[memscale.Plan] = []
    peak = peak_bytes(lambda: work(CONFIG, found))
    predicted = found[0].predicted.allocated_peak_bytes
    assert peak <= predicted <= peak * 1.02
    assert len(plans) == 2  # an AdamW for all is assumed first


def test_an_optimizer_for_a_part_of_the_model_is_no_optimizer_for_all(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.optimizer = torch.optim.AdamW([next(trainer.model.parameters())])
    trainer.step(rows(64))
    assumed = trainer.plan.predicted.by_category["optimizer_state"]
    trainer.step(rows(64))
    assert len(plans) == 2 and trainer.plan.predicted.by_category["optimizer_state"] < assumed


def test_a_new_optimizer_takes_the_place_of_the_old_one(plans: list[object]) -> None:
    trainer = Trainer()
    old = trainer.optimizer
    trainer.step(rows(64))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.step(rows(64))
    trainer.step(rows(64))
    assert trainer.plan.predicted.by_category.get("optimizer_state", 0) < sum(
        value.nbytes for state in old.state.values() for value in state.values()
    )
    assert len(plans) == 2


@pytest.mark.parametrize("change", ["a larger head", "double precision"])
def test_other_weights_are_planned_for(plans: list[object], change: str) -> None:
    trainer = Trainer(nn.Sequential(Block(), nn.Linear(WIDTH, 8)))
    trainer.step(rows(64))
    before = trainer.plan.predicted.by_category["parameter"]
    if change == "a larger head":
        trainer.model[1] = nn.Linear(WIDTH, 800)
        batch = rows(64)
    else:
        trainer.model.double()
        batch = rows(64).double()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
    trainer.step(batch)
    assert len(plans) == 2 and trainer.plan.predicted.by_category["parameter"] > before


def test_a_batch_laid_out_otherwise_is_planned_for(plans: list[object]) -> None:
    trainer = Trainer(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)))
    images = torch.randn(4, 3, 8, 8, generator=generator(0))
    trainer.step(images[:1].expand(4, 3, 8, 8).contiguous())
    trainer.step(images)
    assert len(plans) == 1
    trainer.step(images.to(memory_format=torch.channels_last))
    assert len(plans) == 2


def test_an_expanded_sample_does_not_cover_a_batch(plans: list[object]) -> None:
    trainer = Trainer()
    trainer.step(torch.ones(1).expand(64, WIDTH))
    trainer.step(rows(64))
    assert len(plans) == 2


def test_a_sample_that_is_given_in_inference_mode_is_planned_as_training() -> None:
    model, batch = Stack().train(), rows(64)
    plain = memscale.plan(model, config=SMALLEST, sample_input=batch)
    with torch.inference_mode():
        plan = memscale.plan(model, config=SMALLEST, sample_input=batch)
    assert plan.predicted.allocated_peak_bytes == plain.predicted.allocated_peak_bytes and plan.active


class Part:
    """A technique that a plan changes in place, and that can only spare something."""

    name, path, reason = "part", "", ""
    used = stays = True
    apart_from: frozenset[str] = frozenset()
    beneath = None

    def __init__(self, resident: frozenset[str]) -> None:
        self.resident = resident

    def traced(self, step: Any) -> Any:
        return step

    def parts(self) -> list[Any]:
        return []

    def attach(self) -> None:
        pass

    def undo(self) -> None:
        pass

    def become(self, other: Any) -> None:
        self.resident = other.resident
        if not self.resident:
            raise OSError("no room")


def test_what_was_in_force_comes_back_when_a_technique_cannot_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(config=SMALLEST)
    trainer.step(rows(64))
    executor = memscale.executor_of(trainer.model)
    assert isinstance(executor, Executor) and executor.planned is not None
    in_force, present = executor.in_force, Part(frozenset({"one"}))
    in_force.path, before = [present], list(in_force.attached)
    monkeypatch.setattr(in_force, "attach", lambda _: in_force.have_path([Part(frozenset())]))
    with pytest.raises(OSError, match="no room"):
        in_force.exchange(executor.planned)
    assert before and in_force.attached == before
    assert in_force.path == [present] and present.resident == {"one"}
