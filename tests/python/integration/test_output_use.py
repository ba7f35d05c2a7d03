# SPDX-License-Identifier: Apache-2.0
"""What a loop does with outputs is learned: unused ones keep their graphs, dropped ones take nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from memscale.core.output_use import LearnedUse, OutputUse, SeenUse, one_alone, reached
from zoo.training import peak_bytes

ROWS, WIDTH = 512, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stages(nn.Module):
    """Returns what two stages make, and as a third what nothing is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block() for _ in range(3)))
        self.second = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = self.first(x)
        return early, self.second(early), x.detach() + 1


class WithLoss(nn.Module):
    """Returns a loss and large scores, which the loop may drop."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 2000)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(x))
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
        return {"loss": loss, "scores": scores}


def wrapped(model: nn.Module, x: Tensor, share: float) -> tuple[Executor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plain = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes
    config = memscale.Config(memory_budget=int(share * plain), enable_logging=False)
    memscale.wrap(model, config, sample_input=x, optimizer=optimizer)
    executor: Executor = model._memscale_executor
    return executor, optimizer


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, loss_of: Callable[..., Tensor]
) -> object:
    output = model(x)
    loss_of(output).backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


def measured(model: nn.Module, x: Tensor, run: Callable[[], object]) -> int:
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    return held + peak_bytes(run)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_loss_of_one_output_stays_within_the_budget(place: int, share: float) -> None:
    torch.manual_seed(0)
    model, x = Stages().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, share)
    plans = [executor.plan]

    def run() -> object:
        return step(model, optimizer, x, lambda output: output[place].square().mean())

    for _ in range(3):
        peak = measured(model, x, run)
        assert all(plan is not None for plan in plans)
        assert not plans[-1].fits or peak <= plans[-1].budget_bytes  # type: ignore[union-attr]
        plans.append(executor.plan)
    assert plans[-1] is plans[-2]  # learned once


def test_what_is_dropped_is_not_counted_from_the_second_step_on() -> None:
    torch.manual_seed(0)
    model, x = WithLoss().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, 2.0)

    def run() -> None:
        loss = model(x)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    assert executor.plan is not None
    assumed = executor.plan.predicted.allocated_peak_bytes
    run()
    learned = executor.plan.predicted.allocated_peak_bytes
    scores = ROWS * 2000 * 4
    assert assumed - learned >= 0.9 * scores
    peak = measured(model, x, run)
    assert peak <= 1.001 * learned <= 1.02 * peak


def test_a_loop_that_changes_its_mind_is_planned_for_the_worst() -> None:
    torch.manual_seed(0)
    model, x = Stages().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, 0.95)
    for turn in range(5):
        step(model, optimizer, x, lambda output, turn=turn: output[turn % 2].square().mean())
    assert executor._learned.use is None
    assert executor.planned is not None and executor.planned.trace.use is not None
    assert executor.planned.trace.use.used == (True, False, False)


def seen(used: list[int], held: list[bool]) -> SeenUse:
    leaves = [torch.zeros(100) for _ in held]
    found = SeenUse(leaves)
    kept = [leaf for leaf, is_held in zip(leaves, held, strict=True) if is_held]
    del leaves
    found.note(used)
    assert found.use is not None and found.use.held == tuple(held)
    del kept
    return found


def test_held_in_any_step_is_held() -> None:
    learned, assumed = LearnedUse(), OutputUse((True, True), (True, True))
    learned.learn(seen([0, 1], [True, True]), assumed, 0)
    assert learned.use is None  # as assumed
    learned.learn(seen([0, 1], [True, False]), assumed, 0)
    assert learned.use == OutputUse((True, True), (True, False))
    learned.learn(seen([0, 1], [False, True]), assumed, 0)
    assert learned.use == OutputUse((True, True), (True, True))
    learned.learn(seen([0], [True, True]), assumed, 0)
    assert learned.use is None
    learned.learn(seen([0, 1], [False, False]), assumed, 0)
    assert learned.use is None  # no rule from now on


def test_small_outputs_are_held_and_no_backward_shows_nothing() -> None:
    learned, assumed = LearnedUse(), OutputUse((True,), (True,))
    learned.learn(seen([0], [False]), assumed, 1000)
    assert learned.use is None
    learned.learn(SeenUse([torch.zeros(100)]), assumed, 0)
    assert learned.use is None


def test_which_outputs_a_loss_goes_through() -> None:
    early = torch.randn(4, requires_grad=True) * 2
    late = early.exp()
    for _ in range(20):
        late = late.sin()
    assert reached(early.sum(), [early, late]) == (True, False)
    assert reached(late.sum(), [early, late]) == (True, True)
    assert one_alone((early, late)) == OutputUse((True, False), (True, True))
    assert one_alone((late, early)) == OutputUse((False, True), (True, True))
    assert one_alone((late, late * 2)) is None
    assert one_alone(late) is None
