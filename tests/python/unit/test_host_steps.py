# SPDX-License-Identifier: Apache-2.0
"""When the host steps a card's parameters, and what a plan says of it. Their bits: tests/python/gpu."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memscale
from memscale import Config
from memscale.core.devices import resolve_device
from memscale.errors import ConfigError
from memscale.hardware.cost_rates import MEASURED
from memscale.offload.engine import OffloadSettings
from memscale.offload.limits import Link
from memscale.optim import take_over
from memscale.optim.offload import host_rate
from memscale.optim.release.changes import change_of, is_same_anywhere
from memscale.plans.plan import Prediction
from memscale.techniques.base import Surroundings
from memscale.techniques.optimizer import state_offload

CARD = "RTX 4090"
WIDTH, LAYERS = 1024, 24
BYTES = 4 * WIDTH * WIDTH * LAYERS


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()  # type: ignore[no-any-return]


def predicted(share: float, **more: Any) -> Prediction:
    """Of a step whose weights and gradients take 96 MiB each, on a card that is not there."""
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = memscale.predict(model, optimizer, Config(**more), torch.zeros(2, WIDTH), CARD)
    budget = int(plain.device_used_peak_bytes - share * BYTES)
    config = Config(memory_budget=budget, async_offload=True, enable_checkpointing=False, **more)
    return memscale.predict(model, optimizer, config, torch.zeros(2, WIDTH), CARD)


def reasons(prediction: Prediction) -> str:
    plan = prediction.plan
    assert plan is not None
    return " ".join(step.reason for step in plan.steps if step.technique == "state_offload")


def test_a_plan_says_who_steps() -> None:
    on_host = predicted(1.2, use_8bit_optimizer=True, step_on_host=True)
    by_card = predicted(1.2, use_8bit_optimizer=True, step_on_host=False)
    assert "whose cores step it" in reasons(on_host)
    assert "it passes the card piece by piece" in reasons(by_card)


def test_the_state_of_another_optimizer_is_stepped_by_the_card_and_that_is_said() -> None:
    found = reasons(predicted(1.0, step_on_host=True))
    assert "it passes the card piece by piece" in found and "only 8-bit state has the same bits" in found


def _around(threads: int = 8, **more: Any) -> tuple[torch.optim.Optimizer, Link, Surroundings]:
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert take_over(optimizer) == ""
    settings = OffloadSettings(torch.device("cuda", 0), pinned_bytes=1 << 30)
    link = Link(settings, 25_000, 25_000, 1 << 30, state_bytes=(1 << 30, 0, 0))
    card = replace(resolve_device(CARD), cpu_threads=threads)
    return optimizer, link, Surroundings(card, Config(**more).effective(), optimizer, link)


@pytest.mark.parametrize("threads", [1, 4000])
@pytest.mark.parametrize("asked", [None, True, False])
def test_who_steps_depends_on_rates_unless_it_is_told(asked: bool | None, threads: int) -> None:
    optimizer, link, around = _around(threads, step_on_host=asked, use_mixed_precision=True)
    rate = host_rate.USUAL_PER_THREAD * threads
    ns = state_offload.host_ns_of(optimizer, link, around)
    assert (ns > 0) == (asked if asked is not None else rate > 1000)
    if ns:
        assert ns == max(1, 1_024_000 // rate)


def test_without_room_on_the_host_the_card_steps() -> None:
    optimizer, link, around = _around(step_on_host=True)
    assert state_offload.host_ns_of(optimizer, link, around) > 0
    short = replace(link, state_bytes=(48 << 20, 0, 1 << 30))
    assert state_offload.host_ns_of(optimizer, short, around) == 0
    assert "host memory may take" in state_offload.why_not_on_host(optimizer, short)


def test_a_host_steps_its_own_parameters_without_being_asked() -> None:
    optimizer, link, around = _around(step_on_host=True)
    settings = OffloadSettings(torch.device("cpu"), file_bytes=1 << 30, directory="/tmp")
    own = replace(link, settings=settings)
    assert state_offload.host_ns_of(optimizer, own, around) == 0


@pytest.mark.parametrize("bad", [1, "yes", 0.0])
def test_what_is_no_choice_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="step_on_host"):
        Config(step_on_host=bad)


def test_changes_that_the_host_may_do() -> None:
    aten, gradient = torch.ops.aten, torch.ones(3)
    product = change_of(aten.mul_.Tensor, (gradient, torch.tensor(0.5)), {})
    products = change_of(aten._foreach_mul_.Tensor, ([gradient], torch.tensor(0.5)), {})
    quotient = change_of(aten.div_.Tensor, (gradient, 3.0), {})
    clamp = change_of(aten.clamp_.default, (gradient, -1.0, 1.0), {})
    assert product and products and quotient and clamp
    assert is_same_anywhere(product, torch.float32) and is_same_anywhere(products, torch.float32)
    assert not is_same_anywhere(product, torch.bfloat16)
    assert not is_same_anywhere(quotient, torch.float32)
    assert not is_same_anywhere(clamp, torch.float32)


def test_a_measurement_steps_no_optimizer_that_hooks_would_see() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *told: seen.append(told))
    try:
        host_rate.measured.cache_clear()
        assert host_rate.measured("code8", torch.float32, 1) > 1 and not seen
        usual = host_rate.USUAL_PER_THREAD
        assert host_rate.measured("code8", torch.float64, 1) == usual  # our step does not take it
    finally:
        handle.remove()


def test_a_card_that_is_not_there_is_judged_by_no_machine() -> None:
    rate = functools.partial(host_rate.elements_per_us, "code8", torch.float32, measure=lambda *_: 12345)
    card = resolve_device(CARD)
    usual = host_rate.USUAL_PER_THREAD * card.cpu_threads
    assert rate(card) == usual
    there = replace(card, cost=replace(card.cost, source=MEASURED))
    assert rate(there) == 12345
