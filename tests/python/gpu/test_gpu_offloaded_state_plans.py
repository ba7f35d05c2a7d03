# SPDX-License-Identifier: Apache-2.0
"""Plans for a card that send optimizer state and offloaded gradients: bits, predicted peaks, `detach`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu_training import context_bytes
from offloaded_runs import Chain, Make, Run, card, equal, measured
from torch.nn.utils import clip_grad_norm_

import memscale
from memscale import Config
from memscale.core import variants
from memscale.optim import cards
from memscale.optim.offload.attach import is_offloaded, offloaded_bytes
from memscale.optim.release.gradient import ReleasedGradient
from patched import use_techniques

NAMES = ("state_offload", "gradient_offload")
WIDTH, LAYERS = 640, 12


@pytest.fixture(autouse=True)
def these_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other techniques could meet the budgets, too."""
    rows = tuple(technique for technique in variants.STEP_TECHNIQUES if technique.name in NAMES)
    use_techniques(monkeypatch, rows)
    yield


def trained(make: Make, budget: int, accumulate: int = 1, steps: int = 2, **more: Any) -> Run:
    """A short training under a budget."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model, x = Chain(WIDTH, LAYERS).cuda(), torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).cuda()
    optimizer = make(model.parameters())
    settings = {"async_offload": True, **more}
    config = Config(memory_budget=budget, enable_logging=False, **settings)
    memscale.wrap(model, config, x, optimizer=optimizer)
    made = measured(model, optimizer, x, steps, accumulate)
    assert not is_offloaded(optimizer)
    return made


ADAMW = partial(torch.optim.AdamW, lr=1e-3)
OPTIMIZERS: dict[str, Make] = {
    "default": ADAMW,
    "fused": partial(ADAMW, fused=True),
    "single": partial(ADAMW, foreach=False),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize(("how", "share"), [("default", 80), *((how, 45) for how in OPTIMIZERS)])
def test_bits_and_predicted_peaks(how: str, share: int) -> None:
    plain = trained(OPTIMIZERS[how], 1 << 36)
    assert plain.plan is not None and not plain.plan.does_something
    budget = context_bytes() + plain.reserved_bytes * share // 100
    less = trained(OPTIMIZERS[how], budget)
    assert less.plan is not None
    predicted = less.plan.predicted
    assert "state_offload" in {step.technique for step in less.plan.steps}
    assert equal(plain.found, less.found)
    assert less.allocated_bytes <= predicted.allocated_peak_bytes
    assert less.reserved_bytes <= predicted.reserved_peak_bytes
    assert less.allocated_bytes >= 0.95 * predicted.allocated_peak_bytes
    assert less.allocated_bytes < plain.allocated_bytes
    if less.plan.fits:
        assert context_bytes() + less.reserved_bytes <= budget


def test_accumulated_gradients() -> None:
    plain = trained(ADAMW, 1 << 36, accumulate=3)
    less = trained(ADAMW, context_bytes() + plain.reserved_bytes * 45 // 100, accumulate=3)
    assert less.plan is not None
    assert {step.technique for step in less.plan.steps} == set(NAMES)
    assert equal(plain.found, less.found)
    assert less.allocated_bytes <= less.plan.predicted.allocated_peak_bytes


def test_state_in_8_bits() -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    more = {"use_8bit_optimizer": True}
    plain = trained(ADAMW, 1 << 36, **more)
    less = trained(ADAMW, context_bytes() + plain.reserved_bytes * 70 // 100, **more)
    assert less.plan is not None
    assert {step.technique for step in less.plan.steps} & set(NAMES)
    assert equal(plain.found, less.found)
    assert less.allocated_bytes <= less.plan.predicted.allocated_peak_bytes


def test_nothing_leaves_unless_it_is_asked_for() -> None:
    plain = trained(ADAMW, 1 << 36)
    budget = context_bytes() + plain.reserved_bytes * 45 // 100
    for more in ({"async_offload": False}, {"enable_offloading": False}):
        other = trained(ADAMW, budget, **more)
        assert other.plan is not None and not other.plan.steps


def test_detach_in_the_middle_of_a_step() -> None:
    """Between backward and step: gradients and state are on the card again, as in a plain run."""
    plain, x = Chain(WIDTH, LAYERS).cuda(), torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).cuda()
    model = Chain(WIDTH, LAYERS).cuda()
    models, optimizers = (plain, model), [ADAMW(each.parameters()) for each in (plain, model)]
    config = Config(memory_budget=context_bytes() + (40 << 20), enable_logging=False, async_offload=True)
    memscale.wrap(model, config, x, optimizer=optimizers[1])
    for number in range(4):
        for each, optimizer in zip(models, optimizers, strict=True):
            each(x).backward()
            if number == 2 and each is model:
                assert offloaded_bytes(optimizer) > 0
                assert any(isinstance(value.grad, ReleasedGradient) for value in model.parameters())
                memscale.detach(model)
                assert not any(isinstance(value.grad, ReleasedGradient) for value in model.parameters())
            clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert type(optimizers[1]) is torch.optim.AdamW
    assert equal(list(plain.parameters()), list(model.parameters()))
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_prediction_needs_no_card() -> None:
    """The same plan for a model that lies on the host."""
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    config = Config(memory_budget=context_bytes() + (40 << 20), async_offload=True)
    found = []
    for device in ("cpu", "cuda"):
        model = Chain(WIDTH, LAYERS).to(device)
        optimizer = ADAMW(model.parameters())
        found.append(memscale.predict(model, optimizer, config, x.to(device), device=torch.device("cuda")))
    assert found[0].allocated_peak_bytes == found[1].allocated_peak_bytes
    assert [step.technique for step in found[0].plan.steps] == ["state_offload", "gradient_offload"]


def test_a_cap_on_host_memory_holds_for_all_engines() -> None:
    """The engine of the state and that of all else together take no more than the configuration allows."""
    plain = trained(ADAMW, 1 << 36)
    cap = 256_000_000
    model = Chain(WIDTH, LAYERS).cuda()
    optimizer = ADAMW(model.parameters())
    budget = context_bytes() + plain.reserved_bytes * 45 // 100
    config = Config(
        memory_budget=budget, enable_logging=False, async_offload=True, max_cpu_offload_gb=cap / 1e9
    )
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).cuda()
    executor = memscale.executor_of(memscale.wrap(model, config, x, optimizer=optimizer))
    link = executor.planned.link
    assert link is not None and sum(link.state_bytes) > 0
    given = (link.settings.pinned_bytes, link.settings.host_bytes, link.settings.file_bytes)
    assert sum(given) + sum(link.state_bytes) + sum(link.weights_bytes) <= cap
    memscale.detach(model)
