# SPDX-License-Identifier: Apache-2.0
"""A loss outside of the model: given as `loss`, or learned from the loop's first step, it is in the plan."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import memscale
from memscale.errors import ProfileError
from zoo.training import peak_bytes

ROWS, WIDTH = 512, 64
Loss = Callable[[Any], Any]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    block = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
    )
    return nn.Sequential(*block).train()


class Pair(nn.Module):
    """Two encoders of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = blocks(), blocks()

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(left), self.right(right)


def contrastive(output: tuple[Tensor, Tensor]) -> Tensor:
    left, right = (F.normalize(part, dim=-1) for part in output)
    scores, places = 10 * left @ right.t(), torch.arange(len(left))
    return F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)


def pairwise(output: Tensor) -> Tensor:
    kind = torch.arange(len(output)) % 8
    same, distance = kind[:, None] == kind[None], torch.cdist(output, output)
    return distance[same].square().mean() + F.relu(1 - distance[~same]).square().mean()


def focal(output: Tensor) -> Tensor:
    scores = output.flatten(0, -2)
    each = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")
    shares = scores.softmax(-1)
    return ((1 - torch.exp(-each)) ** 2 * each).mean() + 1 - (2 * shares / (shares + 1)).mean()


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def one() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, WIDTH),)


CASES: dict[str, tuple[Callable[[], nn.Module], int, Loss]] = {
    "contrastive": (Pair, 2, contrastive),
    "pairwise": (blocks, 1, pairwise),
    "focal": (blocks, 1, focal),
    "square": (blocks, 1, square),
}
cases = pytest.mark.parametrize("name", CASES)


class Loop:
    """A model, its optimizer and batch, and a step with a loss of its own."""

    def __init__(self, model: nn.Module, count: int, loss: Loss, holds: bool = True) -> None:
        self.model, self.loss, self.holds = model, loss, holds
        self.batch = tuple(torch.randn(ROWS, WIDTH) for _ in range(count))
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(self) -> object:
        output = self.model(*self.batch)
        loss = self.loss(output)
        if not self.holds:
            output = None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def peak(self) -> int:
        held = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.batch))
        return held + peak_bytes(self.step)

    def predict(self, **more: Any) -> int:
        found = memscale.predict(self.model, self.optimizer, sample_input=self.batch, **more).plain
        assert found is not None
        return found.allocated_peak_bytes

    def wrap(self, budget: int, **more: Any) -> None:
        memscale.wrap(
            self.model,
            None,
            self.batch,
            optimizer=self.optimizer,
            memory_budget=budget,
            enable_logging=False,
            **{"learn_loss": True, **more},
        )

    @property
    def plan(self) -> memscale.Plan:
        plan = memscale.executor_of(self.model).plan
        assert isinstance(plan, memscale.Plan)
        return plan


def loop_of(name: str, holds: bool = True) -> Loop:
    make, count, loss = CASES[name]
    return Loop(make(), count, loss, holds)


@cases
def test_a_loss_that_is_given_is_predicted_to_the_byte(name: str) -> None:
    loop = loop_of(name)
    loop.step()
    assert loop.predict(loss=loop.loss) == loop.peak()


@cases
def test_outputs_that_the_loop_drops_do_not_count(name: str) -> None:
    loop = loop_of(name, holds=False)
    loop.step()
    predicted = loop.predict(loss=lambda output: (loop.loss(output), None))
    assert loop.peak() <= predicted <= 1.001 * loop.peak()


@pytest.mark.long
@cases
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("share", [0.9, 0.6])
def test_the_first_step_teaches_what_the_loss_takes(name: str, holds: bool, share: float) -> None:
    loop = loop_of(name, holds)
    loop.step()
    loop.wrap(int(share * loop.peak()))
    loop.step()
    for _ in range(2):
        peak = loop.peak()
        assert not loop.plan.fits or peak <= loop.plan.budget_bytes
        assert 0.99 * peak <= loop.plan.predicted.allocated_peak_bytes <= 1.02 * peak


@cases
def test_a_loss_that_is_given_keeps_the_first_step_within_the_budget(name: str) -> None:
    loop = loop_of(name)
    loop.step()
    loop.wrap(int(0.9 * loop.peak()), loss=loop.loss)
    plan, peak = loop.plan, loop.peak()
    assert not plan.fits or peak <= plan.budget_bytes
    assert loop.plan is plan  # which was right


def test_what_is_learned_changes_no_bit() -> None:
    expected, learned = loop_of("pairwise"), loop_of("pairwise")
    learned.batch = expected.batch
    learned.wrap(int(0.8 * expected.peak()))
    for parameter, other in zip(expected.model.parameters(), learned.model.parameters(), strict=True):
        other.data.copy_(parameter.data)
    for _ in range(3):
        expected.step()
        learned.step()
    both = zip(expected.model.parameters(), learned.model.parameters(), strict=True)
    assert learned.plan.active and all(torch.equal(*pair) for pair in both)


def views(model: nn.Module, batches: Sequence[Tensor]) -> None:
    whole = torch.cat([F.normalize(model(batch), dim=1) for batch in batches])
    scores = whole @ whole.t()
    F.cross_entropy(scores, torch.arange(len(whole)).roll(ROWS)).backward()
    model.zero_grad()


def test_a_loss_of_several_forwards_is_learned() -> None:
    model, batches = blocks(), one() + one()
    run = functools.partial(views, model, batches)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *batches))
    optimizer = torch.optim.SGD(model.parameters())
    plain = held + peak_bytes(run)
    budget = int(0.8 * plain)
    memscale.wrap(
        model,
        None,
        batches[0],
        optimizer=optimizer,
        memory_budget=budget,
        learn_loss=True,
        enable_logging=False,
    )
    run()
    peak, plan = held + peak_bytes(run), memscale.executor_of(model).plan
    assert plan.fits and plan.active
    assert 0.999 * peak <= plan.predicted.allocated_peak_bytes <= plan.budget_bytes


def test_larger_batches_of_a_loss_over_pairs_are_expected_to_take_the_square() -> None:
    loop = loop_of("pairwise")
    loop.wrap(1 << 40)
    loop.step()
    loop.batch = (torch.randn(2 * ROWS, WIDTH),)
    loop.model(*loop.batch)
    before, peak = loop.plan, loop.peak()
    assert 0.99 * peak <= before.predicted.allocated_peak_bytes <= 1.1 * peak


def penalty(output: Tensor, batch: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return output.mean() + (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("learn_loss", [False, True])
def test_a_penalty_on_gradients_is_in_the_plan(learn_loss: bool) -> None:
    loop = Loop(blocks(), 1, lambda output: penalty(output, loop.batch[0]))
    loop.batch[0].requires_grad_()
    loop.step()
    peak = loop.peak()
    assert loop.predict(loss=loop.loss) == peak
    loop.wrap(int(0.9 * peak), learn_loss=learn_loss)
    loop.step()
    measured = loop.peak()
    assert measured <= loop.plan.budget_bytes or not loop.plan.fits
    assert 0.99 * measured <= loop.plan.predicted.allocated_peak_bytes <= 1.05 * measured


def test_a_profiler_of_the_program_begins_while_a_loss_is_measured() -> None:
    loop = loop_of("pairwise")
    loop.wrap(1 << 40)
    output = loop.model(*loop.batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop.loss(output).backward()
    assert any(event.key == "aten::_euclidean_dist" for event in profiler.key_averages())
    loop.optimizer.zero_grad()
    del output
    loop.step()  # is measured instead
    peak = loop.peak()
    assert 0.99 * peak <= loop.plan.predicted.allocated_peak_bytes


def test_nothing_is_measured_any_more_after_detach() -> None:
    loop = loop_of("square")
    loop.wrap(1 << 40)
    output = loop.model(*loop.batch)
    memscale.detach(loop.model)
    with torch.autograd.profiler.profile() as profiler:
        loop.loss(output).backward()
    assert profiler.key_averages()


@pytest.mark.parametrize("ends", ["the step", "the model"])
def test_pytorchs_profiler_is_as_it_was(ends: str) -> None:
    before = torch.autograd.profiler._enable_profiler
    loop = loop_of("square")
    loop.wrap(1 << 40)
    if ends == "the step":
        loop.step()
    else:
        loop.model(*loop.batch)
        assert torch.autograd.profiler._enable_profiler is not before  # it is measured
        del loop
        gc.collect()
    assert torch.autograd.profiler._enable_profiler is before
    with torch.autograd.profiler.profile() as profiler:
        torch.ones(2).add(1)
    assert profiler.key_averages()


def test_pytorch_says_nothing_of_the_profiler(capfd: pytest.CaptureFixture[str]) -> None:
    loop = loop_of("square")
    loop.wrap(1 << 40)
    for _ in range(4):
        loop.step()
    assert "unknown size" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output: output, r"float32\[512, 64\]"),
        (lambda output: output.detach().mean(), "without a gradient"),
        (lambda output: None, "a NoneType"),
    ],
)
def test_a_function_that_gives_no_loss_is_refused(loss: Loss, words: str) -> None:
    loop = loop_of("square")
    with pytest.raises(
        ProfileError, match=f"loss has returned .*{words}.*; allowed: a tensor of one element"
    ):
        loop.predict(loss=loss)
    with pytest.raises(ProfileError, match="loss has returned"):
        loop.wrap(1 << 40, loss=loss)
    assert memscale.executor_of(loop.model) is None


def test_an_error_of_the_function_says_what_it_was_given() -> None:
    loop = loop_of("square")
    with pytest.raises(ValueError, match="batch_size") as caught:
        loop.predict(loss=lambda output: F.cross_entropy(output, torch.zeros(3, dtype=torch.long)))
    notes = [*getattr(caught.value, "__notes__", []), str(caught.value)]
    assert any("loss has raised this, given the model's output (float32[512, 64])" in note for note in notes)


def test_what_is_no_function_is_refused() -> None:
    loop = loop_of("square")
    with pytest.raises(TypeError, match="loss is a Tensor; allowed: a function of the model's output"):
        loop.predict(loss=torch.zeros(()))
    with pytest.raises(TypeError, match="loss is a str"):
        loop.wrap(1 << 40, loss="mse")


def test_the_largest_batch_counts_the_loss() -> None:
    loop = loop_of("pairwise")
    found = [
        memscale.predict(
            loop.model, loop.optimizer, sample_input=loop.batch, memory_budget="64MiB", loss=loss
        ).largest_batch(with_plan=False)
        for loss in (None, loop.loss)
    ]
    assert 0 < found[1] < found[0] // 2


def test_a_step_that_a_profiler_has_kept_from_being_measured_is_followed_by_another_try() -> None:
    loop = loop_of("pairwise")
    loop.wrap(1 << 40)
    with torch.autograd.profiler.profile():
        loop.step()
    loop.step()  # is measured, or this would be the third
    with torch.autograd.profiler.profile():
        loop.step()
    peak = loop.peak()
    assert 0.99 * peak <= loop.plan.predicted.allocated_peak_bytes


def test_two_models_whose_steps_lie_within_each_other_are_both_measured() -> None:
    first, second = loop_of("pairwise"), loop_of("pairwise")
    for loop in (first, second):
        loop.wrap(1 << 40)
    for _ in range(2):
        for loop in (first, second):  # the second begins before the first's optimizer has stepped
            loop.loss(loop.model(*loop.batch)).backward()
        for loop in (first, second):
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    for loop in (first, second):
        peak = loop.peak()
        assert 0.98 * peak <= loop.plan.predicted.allocated_peak_bytes


def test_an_evaluation_after_a_step_without_an_optimizer_is_not_measured() -> None:
    loop = loop_of("square")
    loop.wrap(1 << 40)
    loop.loss(loop.model(*loop.batch)).backward()
    with torch.no_grad():
        loop.model(*loop.batch)
    with torch.autograd.profiler.profile() as profiler:
        torch.ones(2).add(1)
    before = torch.autograd.profiler._enable_profiler
    assert profiler.key_averages() and before.__module__ != "memscale.trace.loss_meter"


@pytest.mark.parametrize("ends", ["", "raise SystemExit(3)", "output = None"])
def test_a_program_may_end_in_the_middle_of_a_step_that_is_measured(ends: str) -> None:
    program = f"""
import torch, memscale
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
config = memscale.Config(memory_budget="1GiB", learn_loss=True, enable_logging=False)
memscale.wrap(model, config, torch.ones(4, 8))
output = model(torch.ones(4, 8))
{ends}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == (3 if "Exit" in ends else 0), done.stderr
    assert "Error" not in done.stderr and "unknown size" not in done.stderr


def test_processes_that_train_together_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    before = torch.autograd.profiler._enable_profiler
    loop = loop_of("pairwise")
    loop.wrap(1 << 40)
    plan = loop.plan
    loop.model(*loop.batch)
    assert torch.autograd.profiler._enable_profiler is before
    loop.step()
    loop.step()
    assert loop.plan is plan


def test_a_step_that_never_comes_to_a_backward_keeps_no_other_model_from_being_measured() -> None:
    first, loop = loop_of("square"), loop_of("pairwise")
    first.wrap(1 << 40)
    output = first.model(*first.batch)
    loop.wrap(1 << 40)
    loop.step()
    peak = loop.peak()
    assert output.requires_grad
    assert 0.99 * peak <= loop.plan.predicted.allocated_peak_bytes


def test_a_model_that_another_thread_collects_leaves_no_profiler_running() -> None:
    loop = loop_of("square")
    loop.wrap(1 << 40)
    loop.model(*loop.batch)  # is measured, and goes on being
    holder = [loop]
    del loop

    def collect() -> None:
        holder.clear()
        gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.ones(1000).add(1)
    assert any(event.key == "aten::add" for event in profiler.key_averages())
    assert not torch._C._autograd._profiler_enabled()
    another = loop_of("pairwise")
    another.wrap(1 << 40)
    another.step()
    peak = another.peak()
    assert 0.99 * peak <= another.plan.predicted.allocated_peak_bytes
