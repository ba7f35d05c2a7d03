# SPDX-License-Identifier: Apache-2.0
"""`AutoTuner` with real steps: the loop's state is what it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import memscale
from memscale.autotuning import AutoTuner
from memscale.plans.budget import budget_for
from tuning_samples import (
    Counting,
    Pictures,
    Words,
    assert_same,
    objects_of,
    pictures,
    plain_peak,
    state_of,
    step,
    tuned,
    words,
)

pytestmark = pytest.mark.usefixtures("few_timed_steps")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "wrapped"), [("adamw", False), ("sgd", True), ("with a setting that steps change", False)]
)
def test_in_the_middle_of_training_the_state_of_the_loop_is_untouched(kind: str, wrapped: bool) -> None:
    torch.manual_seed(0)
    model = Words().train()
    model.blocks[0].eval()  # flags that differ stay so
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    if kind == "with a setting that steps change":
        optimizer = Counting(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("step"))
    if wrapped:
        budget = budget_for(plain_peak(model, optimizer, 8)) - 100_000
        memscale.wrap(model, memory_budget=budget, optimizer=optimizer, enable_logging=False)
    for _ in range(2):
        step(model, optimizer)
        schedule.step()
    model(**words(4)).backward()  # in the middle of an accumulated batch
    called.clear()
    room = budget_for(plain_peak(model, optimizer, 4)) + 1
    before, objects = state_of(model, optimizer), objects_of(model, optimizer)
    plan = memscale.executor_of(model).plan if wrapped else None
    result = tuned(model, optimizer, room, confirm=2)
    assert result.confirmed and result.out_of_memory == 0
    assert_same(before, state_of(model, optimizer))
    assert objects == objects_of(model, optimizer)
    assert called == []
    assert (memscale.executor_of(model).plan if wrapped else None) is plan
    step(model, optimizer)  # and the loop goes on
    assert set(called) == {"step"}


def test_training_goes_on_bit_by_bit() -> None:
    def trained(tunes: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        random.seed(3)
        model = Words()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for number in range(3):
            if tunes and number == 1:
                assert tuned(model, optimizer, "8MiB", confirm=1).confirmed
            step(model, optimizer)
        return [value.detach() for value in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_graph_that_waits_for_its_backward_keeps_its_weights() -> None:
    model = Words().eval()
    loss = model(**words(2))
    assert tuned(model, torch.optim.SGD(model.parameters(), 0.1), "8MiB", 1).confirmed
    loss.backward()


def test_buffers_are_put_back_and_evaluation_mode_stays() -> None:
    model = Pictures().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state_of(model, optimizer)
    result = AutoTuner(model, optimizer, pictures, 8, memory_budget="64MiB").tune()
    assert result.confirmed and result.micro_batch == 8
    assert_same(before, state_of(model, optimizer))


@pytest.mark.usefixtures("bf16_host")
def test_weights_and_state_that_a_plan_converts_come_back() -> None:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step(model, optimizer)
    before, objects = state_of(model, optimizer), objects_of(model, optimizer)
    config = memscale.Config("aggressive", memory_budget=1_500_000, enable_logging=False)
    result = AutoTuner(model, optimizer, words, 4, config=config, confirm=1).tune()
    assert_same(before, state_of(model, optimizer))
    assert objects[:14] == objects_of(model, optimizer)[:14]  # parameters; the state was made again
    run = [one for one in result.candidates if one.confirmed is not None]
    assert run and "bf16_weights" in run[0].techniques
    assert result.out_of_memory == 0
