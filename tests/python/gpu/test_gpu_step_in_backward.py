# SPDX-License-Identifier: Apache-2.0
"""Steps inside of backward on a card: bits of single, list and fused steps, predicted peaks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gpu_training import context_bytes
from offloaded_runs import Chain, Make, Run, card, equal, measured
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.optim import cards

WIDTH, LAYERS = 640, 12
NAME = "step_in_backward"


class Mixed(Chain):
    """The last weight is of another type, in a list of its own, where `mixed`."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__(WIDTH, LAYERS)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16 if mixed else torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).square().mean()  # type: ignore[no-any-return]


def trained(make: Make, budget: int = 1 << 36, mixed: bool = False, **more: Any) -> Run:
    """A short training, with and without the promise."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model, x = Mixed(mixed).cuda(), torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).cuda()
    optimizer = make(model.parameters())
    memscale.wrap(model, Config(memory_budget=budget, enable_logging=False, **more), x, optimizer=optimizer)
    return measured(model, optimizer, x, steps=3)


ADAMW = partial(torch.optim.AdamW, lr=1e-3)
OPTIMIZERS: dict[str, Make] = {
    "default": ADAMW,
    "fused": partial(ADAMW, fused=True),
    "single": partial(ADAMW, foreach=False),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "plain": partial(torch.optim.SGD, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_bits_and_predicted_peaks(how: str, mixed: bool) -> None:
    plain = trained(OPTIMIZERS[how], mixed=mixed)
    mine = trained(OPTIMIZERS[how], mixed=mixed, step_in_backward=True)
    assert mine.plan is not None and {step.technique for step in mine.plan.steps} == {NAME}
    assert equal(plain.found, mine.found)
    predicted = mine.plan.predicted
    assert 0.98 * predicted.allocated_peak_bytes <= mine.allocated_bytes <= predicted.allocated_peak_bytes
    assert 0.98 * predicted.reserved_peak_bytes <= mine.reserved_bytes <= predicted.reserved_peak_bytes
    assert mine.allocated_bytes < plain.allocated_bytes


def test_state_in_8_bits() -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    more = {"use_8bit_optimizer": True}
    plain = trained(ADAMW, **more)
    mine = trained(ADAMW, step_in_backward=True, **more)
    assert mine.plan is not None and equal(plain.found, mine.found)
    predicted = mine.plan.predicted.allocated_peak_bytes
    assert 0.98 * predicted <= mine.allocated_bytes <= predicted


@pytest.mark.parametrize("how", ["default", "fused"])
def test_with_state_on_the_host(how: str) -> None:
    plain = trained(OPTIMIZERS[how])
    budget = context_bytes() + plain.reserved_bytes * 45 // 100
    mine = trained(OPTIMIZERS[how], budget, step_in_backward=True, async_offload=True)
    assert mine.plan is not None
    assert {step.technique for step in mine.plan.steps} == {NAME, "state_offload"}
    assert equal(plain.found, mine.found)
    predicted = mine.plan.predicted
    assert 0.95 * predicted.allocated_peak_bytes <= mine.allocated_bytes <= predicted.allocated_peak_bytes
    assert mine.reserved_bytes <= predicted.reserved_peak_bytes


def test_an_odd_state_in_a_list_is_refused() -> None:
    """It would change the kernel of the whole list, of which some have been stepped."""
    model, x = Mixed().cuda(), torch.ones(2, WIDTH).cuda()
    optimizer = ADAMW(model.parameters())
    memscale.wrap(model, Config(step_in_backward=True, enable_logging=False), x, optimizer=optimizer)
    model(x).backward()
    optimizer.step()
    state = optimizer.state[model.body[0].weight]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    with pytest.raises(RuntimeError, match=r"step_in_backward: .*'body.0.weight' is in another order"):
        model(x).backward()
    memscale.detach(model)


def test_a_sparse_gradient_in_a_list() -> None:
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8)).cuda()
    words = torch.arange(4).cuda()
    for foreach, stands_aside in ((None, True), (False, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        config = Config(step_in_backward=True, enable_logging=False)
        wrapped: Any = memscale.wrap(model, config, words, optimizer=optimizer)
        plan = memscale.executor_of(wrapped).plan
        assert any("step_in_backward: sparse" in note for note in plan.notes) is stands_aside
        wrapped(words).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        memscale.detach(model)


def test_a_prediction_needs_no_card() -> None:
    """The same plan for a model that lies on the host."""
    x, found = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), []
    for device in ("cpu", "cuda"):
        model = Mixed().to(device)
        config = Config(step_in_backward=True)
        optimizer = ADAMW(model.parameters())
        found.append(memscale.predict(model, optimizer, config, x.to(device), device=torch.device("cuda")))
    assert found[0].allocated_peak_bytes == found[1].allocated_peak_bytes
    assert found[0].reserved_peak_bytes == found[1].reserved_peak_bytes
    assert [step.technique for step in found[0].plan.steps] == [NAME]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_the_host_steps_8_bit_state(inside: bool, half: bool) -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    more = {"use_8bit_optimizer": True, "use_mixed_precision": half, "exact": False}
    plain = trained(ADAMW, **more)
    less = {"async_offload": True, "step_in_backward": inside}
    budget = context_bytes() + plain.reserved_bytes * 70 // 100
    theirs = trained(ADAMW, budget, **more, **less, step_on_host=False)
    mine = trained(ADAMW, budget, **more, **less, step_on_host=True)
    assert theirs.plan is not None and mine.plan is not None
    used = [{step.technique for step in plan.steps} for plan in (theirs.plan, mine.plan)]
    assert "state_offload" in used[1]
    assert used[0] & {"autocast", "bf16_weights"} == used[1] & {"autocast", "bf16_weights"}
    why = [step.reason for step in mine.plan.steps if step.technique == "state_offload"]
    assert "whose cores step it" in why[0]
    assert equal(theirs.found, mine.found)
    for run, keep_resident in (
        (mine, 0),
        (theirs, 256 << 10),
    ):  # rests of BF16 weights are rounded in the first step
        assert run.plan is not None
        predicted = run.plan.predicted
        assert 0.95 * predicted.allocated_peak_bytes <= run.allocated_bytes
        assert run.allocated_bytes <= predicted.allocated_peak_bytes + keep_resident
        assert run.reserved_bytes <= predicted.reserved_peak_bytes
