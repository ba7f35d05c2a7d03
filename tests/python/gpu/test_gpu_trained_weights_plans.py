# SPDX-License-Identifier: Apache-2.0
"""Plans for a card whose trained weights are offloaded to the host: bits, predicted peaks, tight budgets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu_training import clean_device, context_bytes
from offloaded_runs import Chain, Make, Run, card, equal, measured
from torch import Tensor

import memscale
from calls import beside
from memscale import AsyncOffloadConfig, Config
from memscale.core import variants
from memscale.optim import cards
from memscale.optim.offload.attach import is_offloaded
from memscale.plans.plan import Plan
from memscale.weights.card import CardBlocks
from memscale.weights.stream import stream_of
from patched import use_techniques

NAMES = ("weight_offload", "state_offload", "gradient_offload")
EVERY = variants.STEP_TECHNIQUES
WIDTH, LAYERS = 1280, 48
ADAMW: Make = partial(torch.optim.AdamW, lr=1e-3)


@pytest.fixture(autouse=True)
def these_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other techniques could meet the budgets, too."""
    rows = tuple(technique for technique in variants.STEP_TECHNIQUES if technique.name in NAMES)
    use_techniques(monkeypatch, rows)
    yield


WEIGHT_BYTES = 4 * WIDTH * WIDTH * LAYERS


def config(budget: int, **more: Any) -> Config:
    return Config(
        memory_budget=budget,
        enable_logging=False,
        enable_checkpointing=False,
        async_config=AsyncOffloadConfig(),
        **more,
    )


def rows() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).cuda()


def trained(make: Make, budget: int, accumulate: int = 1, steps: int = 3, **more: Any) -> Run:
    """A short training under a budget, and what `detach` leaves."""
    clean_device()
    model, x = Chain(WIDTH, LAYERS).cuda(), rows()
    optimizer = make(model.parameters())
    memscale.wrap(model, config(budget, **more), x, optimizer=optimizer)
    clean_device()
    made = measured(model, optimizer, x, steps, accumulate)
    assert not is_offloaded(optimizer) and stream_of(model) is None
    assert all(value.is_cuda for value in model.parameters())
    return made


OPTIMIZERS: dict[str, Make] = {
    "default": ADAMW,
    "fused": partial(ADAMW, fused=True),
    "single": partial(ADAMW, foreach=False),
    "decayed": partial(torch.optim.Adam, lr=1e-3, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def techniques(plan: Plan | None) -> set[str]:
    assert plan is not None
    return {step.technique for step in plan.steps}


def agree(run: Run, untold_bytes: int = 0) -> bool:
    """Whether both peaks are what was predicted: not more than 2 % below, and above by what is not told."""
    assert run.plan is not None
    predicted = run.plan.predicted
    pairs = (
        (run.allocated_bytes, predicted.allocated_peak_bytes),
        (run.reserved_bytes, predicted.reserved_peak_bytes),
    )
    return all(98 * told <= 100 * measured <= 100 * (told + untold_bytes) for measured, told in pairs)


@pytest.mark.parametrize(("how", "tenths"), [("default", 14), *((how, 6) for how in OPTIMIZERS)])
def test_bits_and_predicted_peaks(how: str, tenths: int) -> None:
    """Under budgets about the bytes of the weights alone."""
    plain = trained(OPTIMIZERS[how], 1 << 36)
    assert plain.plan is not None and not plain.plan.does_something
    budget = context_bytes() + WEIGHT_BYTES * tenths // 10
    less = trained(OPTIMIZERS[how], budget)
    assert less.plan is not None and less.plan.fits and techniques(less.plan) == set(NAMES)
    assert "trained ones pass it in a step" in less.plan.steps[0].reason
    assert not [note for note in less.plan.notes if note.startswith(NAMES)]  # of other ways
    assert equal(plain.found, less.found)
    assert agree(less) and context_bytes() + less.reserved_bytes <= budget


@pytest.mark.parametrize("on_host", [False, True])
def test_state_in_8_bits(on_host: bool) -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    more = {"use_8bit_optimizer": True, "step_on_host": on_host}
    plain = trained(ADAMW, 1 << 36, **more)
    less = trained(ADAMW, context_bytes() + WEIGHT_BYTES * 6 // 10, **more)
    assert less.plan is not None and techniques(less.plan) == set(NAMES)
    assert on_host == any("whose cores step it" in step.reason for step in less.plan.steps)
    assert equal(plain.found, less.found) and agree(less)


def test_accumulated_gradients() -> None:
    plain = trained(ADAMW, 1 << 36, accumulate=3)
    less = trained(ADAMW, context_bytes() + WEIGHT_BYTES * 6 // 10, accumulate=3)
    assert techniques(less.plan) == set(NAMES)
    assert equal(plain.found, less.found)
    assert less.plan is not None and less.reserved_bytes <= less.plan.predicted.reserved_peak_bytes


def test_without_released_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients stay on the card, whole, while their weights are offloaded."""
    rows = tuple(technique for technique in variants.STEP_TECHNIQUES if technique.name != NAMES[2])
    use_techniques(monkeypatch, rows)
    plain = trained(ADAMW, 1 << 36)
    less = trained(ADAMW, context_bytes() + WEIGHT_BYTES * 17 // 10)
    assert less.plan is not None and techniques(less.plan) == set(NAMES[:2])
    assert equal(plain.found, less.found)
    predicted = less.plan.predicted
    assert less.reserved_bytes <= predicted.reserved_peak_bytes
    # What the allocator does not part off a block, less than 1 MiB, is not in the plan.
    assert 0.98 <= less.allocated_bytes / predicted.allocated_peak_bytes <= 1.005


@pytest.mark.parametrize("eight_bit", [False, True])
def test_weights_in_bf16(eight_bit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their masters are offloaded weights and residuals in state that is offloaded."""
    if (reason := cards.why_not(card())) or not torch.cuda.is_bf16_supported():
        pytest.skip(reason or "the card has no BF16")
    found = {}
    for more in ((), NAMES[:1]):
        wanted = {"autocast", "bf16_weights", *NAMES[1:], *more}
        rows = tuple(technique for technique in EVERY if technique.name in wanted)
        use_techniques(monkeypatch, rows)
        settings = {"use_mixed_precision": True, "exact": False, "use_8bit_optimizer": eight_bit}
        found[more] = trained(ADAMW, 1, **settings)
        assert techniques(found[more].plan) == wanted
    resident, streamed = found.values()
    assert equal(resident.found, streamed.found)
    # Rounding residuals to 8 bits takes a small segment in the first step, weights offloaded or not.
    assert agree(streamed, 2 << 20 if eight_bit else 0)
    assert streamed.reserved_bytes < resident.reserved_bytes - WEIGHT_BYTES // 3


def test_with_checkpoints_and_a_batch_that_grows() -> None:
    """Under the smallest plan there is, re-planned with weights, state and gradients offloaded; verified."""
    settings = Config(
        memory_budget=context_bytes() + WEIGHT_BYTES * 6 // 10,
        enable_logging=False,
        async_config=AsyncOffloadConfig(),
    )
    ends = []
    for is_wrapped in (False, True):
        clean_device()
        model = Chain(WIDTH, LAYERS).cuda()
        optimizer = ADAMW(model.parameters())
        if is_wrapped:
            memscale.wrap(model, settings, sample_input=rows(), optimizer=optimizer)
        found: list[Any] = []
        for count in (1, 1, 64, 1):
            loss = model(rows().repeat(count, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        if is_wrapped:
            executor: Any = memscale.executor_of(model)
            assert executor.failures == 0 and len(executor.plans) > 1 and stream_of(model) is not None
            assert memscale.verify(model, rows()).equal
            memscale.detach(model)
        ends.append([*found, *(value.detach().cpu() for value in model.parameters())])
    assert equal(*ends)


def test_detach_where_the_card_has_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """Weights stay offloaded then, and go on being trained by the optimizer's own steps."""

    def full(*unused: Any) -> Tensor:
        raise torch.OutOfMemoryError("the card is full")

    clean_device()
    plain, model = Chain(WIDTH, LAYERS).cuda(), Chain(WIDTH, LAYERS).cuda()
    optimizers = [ADAMW(each.parameters()) for each in (plain, model)]
    settings = config(context_bytes() + WEIGHT_BYTES * 6 // 10)
    memscale.wrap(model, settings, rows(), optimizer=optimizers[1])
    for number in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(rows()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            with beside({CardBlocks.own: full}):
                memscale.detach(model)
            assert "stay offloaded: the card is full" in caplog.text
            resident_state = [value for value in model.parameters() if not value.is_cuda]
            assert not is_offloaded(optimizers[1]) and len(resident_state) > LAYERS - 4  # some were resident
    assert equal([value.detach() for value in plain.parameters()], [v.detach() for v in model.parameters()])
    stream = stream_of(model)
    assert stream is not None
    for path in list(stream.units):
        stream.remove(path)
    assert all(value.is_cuda for value in model.parameters()) and stream_of(model) is None


def test_the_allocator_may_have_less_than_the_weights_take() -> None:
    """Once the plan is attached, a limit below the weights' bytes holds for the allocator itself."""
    clean_device()
    plain, model = Chain(WIDTH, LAYERS).cuda(), Chain(WIDTH, LAYERS).cuda()
    optimizers = [ADAMW(each.parameters()) for each in (plain, model)]
    memscale.wrap(model, config(context_bytes() + WEIGHT_BYTES * 6 // 10), rows(), optimizer=optimizers[1])
    losses: list[list[Tensor]] = [[], []]
    for index, each in enumerate((plain, model)):
        if each is model:
            ended = [value.detach().cpu() for value in plain.parameters()]
            for value in plain.parameters():
                value.data = torch.empty(0, device=card())
            optimizers[0].state.clear()
            clean_device()
            total = torch.cuda.get_device_properties(card()).total_memory
            torch.cuda.set_per_process_memory_fraction(WEIGHT_BYTES * 6 / 10 / total, card())
        try:
            for _ in range(3):
                loss = each(rows())
                loss.backward()
                optimizers[index].step()
                optimizers[index].zero_grad()
                losses[index].append(loss.detach().cpu())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, card())
    memscale.detach(model)
    assert equal(*losses) and equal(ended, [value.detach() for value in model.parameters()])
