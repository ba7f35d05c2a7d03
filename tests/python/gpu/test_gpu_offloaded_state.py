# SPDX-License-Identifier: Apache-2.0
"""Optimizer state and gradients of a card that lie on the host: every bit of plain PyTorch on that card."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_runs import (
    PIECE,
    TIERS,
    Loop,
    Make,
    card,
    equal,
    net,
    opened,
    pair,
    parameters,
    step,
    technique,
    trained,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from memscale.optim import cards, is_patched, take_over
from memscale.optim.offload import attach
from memscale.optim.offload.attach import is_offloaded, offloaded_bytes, send, take_back
from memscale.optim.release.gradient import ReleasedGradient

optim = torch.optim

ON_STAND_IN = bool(os.environ.get("STANDIN_COMPUTE"))
"""A runtime that computes with the host's kernels; see tests/standin_cuda."""

HOW = {"single": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}, "default": {}}

CUT: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adam": partial(optim.Adam, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "maximize": partial(optim.AdamW, lr=1e-2, maximize=True),
    "sgd": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
}

WHOLE: dict[str, Make] = {
    "capturable": lambda p: optim.AdamW(p, lr=1e-2, capturable=True),
    "learning rate on the card": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2, device="cuda"), fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3),
}


# ---- optimizer state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CUT)
def test_five_steps_in_pieces(name: str, how: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and how == "fused" and CUT[name].func is optim.SGD and ON_STAND_IN:
        pytest.skip("on the host, PyTorch's begins with what memory held")
    both, optimizers = pair(partial(CUT[name], **HOW[how]), dtype)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    large = sum(value.nbytes for value in both[1] if value.nbytes >= 64 << 10)
    assert offloaded_bytes(optimizers[1]) >= large
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("name", WHOLE)
def test_five_steps_of_whole_parameters(name: str) -> None:
    both, optimizers = pair(WHOLE[name])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert offloaded_bytes(optimizers[1]) > 0
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_five_steps_of_our_own_state(dtype: torch.dtype, moments: str) -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    both = parameters(dtype), parameters(dtype)
    optimizers = [optim.AdamW(values, lr=1e-2) for values in both]
    for optimizer in optimizers:
        take_over(optimizer, moments)
    assert send(optimizers[1], opened(), PIECE) == ""
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert offloaded_bytes(optimizers[1]) > 0 and is_patched(optimizers[1])
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    take_back(optimizers[1])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2, seed=3)
    assert equal(both[0], both[1])


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(tier: str) -> None:
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2), tier=tier)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_state_leaves_the_card_and_comes_back() -> None:
    make = partial(optim.AdamW, lr=1e-2)
    values = parameters()
    optimizer = make(values)
    step(values, optimizer, 2)
    before = torch.cuda.memory_allocated()
    whole = copy.deepcopy(optimizer.state_dict())
    sizes = 2 * sum(value.nbytes for value in values if value.nbytes >= 64 << 10)
    here = torch.cuda.memory_allocated()
    assert send(optimizer, opened(), PIECE) == ""
    assert torch.cuda.memory_allocated() <= here - sizes
    assert type(optimizer) is not optim.AdamW and is_offloaded(optimizer)
    take_back(optimizer)
    assert type(optimizer) is optim.AdamW
    assert all(value.is_cuda for entry in optimizer.state.values() for value in (entry["exp_avg"],))
    assert equal(whole, optimizer.state_dict())
    del whole
    assert torch.cuda.memory_allocated() == before
    other = parameters()
    plain = make(other)
    step(other, plain, 2)
    for each in ((values, optimizer), (other, plain)):
        step(*each, 2, seed=3)
    assert equal(values, other)


def test_a_state_dict_is_the_hosts_and_loads_piece_by_piece() -> None:
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2))
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    saved = optimizers[1].state_dict()
    large = [entry["exp_avg"] for entry in saved["state"].values() if entry["exp_avg"].numel() > 1 << 14]
    assert large and not any(value.is_cuda for value in large)
    others = parameters(), parameters()
    plain, gone = (optim.AdamW(values, lr=1e-3) for values in others)
    assert send(gone, opened(), PIECE) == ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gone.load_state_dict(copy.deepcopy(saved))  # PyTorch goes on with the step counters that it is given
    assert torch.cuda.max_memory_allocated() - before < sum(value.nbytes for value in large)
    plain.load_state_dict(saved)
    assert all(entry["exp_avg"].is_cuda for entry in plain.state.values())
    assert equal(gone.state_dict(), optimizers[0].state_dict())
    step(others[0], plain)
    step(others[1], gone)
    assert equal(others[0], others[1]) and equal(plain.state_dict(), gone.state_dict())


def test_state_of_another_type_is_cast_when_it_is_loaded() -> None:
    _, (plain, _) = pair(partial(optim.AdamW, lr=1e-2))
    step(plain.param_groups[0]["params"], plain, 1)
    saved = copy.deepcopy(plain.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].cpu()
        entry["exp_avg_sq"] = entry["exp_avg_sq"].double().cpu()
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2), torch.bfloat16)
    for values, optimizer in zip(both, optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved))
        step(values, optimizer, 2)
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_copy_is_an_optimizer_on_the_card() -> None:
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2))
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2)
    twin = copy.deepcopy(optimizers[1])
    assert type(twin) is optim.AdamW
    mine = twin.param_groups[0]["params"]
    assert all(twin.state[value]["exp_avg"].is_cuda for value in mine)
    step(both[0], optimizers[0], 2, seed=3)
    step(mine, twin, 2, seed=3)
    assert equal(both[0], mine)


def test_what_is_spared_stays_on_the_card() -> None:
    make = partial(optim.AdamW, lr=1e-2)
    plain, values = parameters(), parameters()
    reference, optimizer = make(plain), make(values)
    assert send(optimizer, opened(), PIECE, resident=values[:1]) == ""
    step(plain, reference)
    step(values, optimizer)
    assert optimizer.state[values[0]][attach.OFFLOADED].nbytes == 0
    attach.keep_resident(optimizer, values[2:3])
    assert optimizer.state[values[0]][attach.OFFLOADED].nbytes > 0
    step(plain, reference, 2, seed=3)
    step(values, optimizer, 2, seed=3)
    assert equal(plain, values) and equal(reference.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("how", [how for how in HOW if how != "fused"])  # whose kernel refuses it
def test_one_gradient_in_another_order(how: str) -> None:
    """PyTorch's kernels for lists do not take it, and then take none of the others."""
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2, **HOW[how]))
    generator = torch.Generator(device="cuda").manual_seed(5)
    for number in range(4):
        for k in range(len(both[0])):
            given = torch.randn(both[0][k].shape, generator=generator, device="cuda")
            for values in both:
                values[k].grad = torch.empty_like(values[k]).copy_(given)
        if number % 2:
            for values in both:
                transposed = values[0].grad.t().contiguous().t()
                values[0].grad = transposed
        for optimizer in optimizers:
            optimizer.step()
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_on_a_stream_of_the_caller() -> None:
    both, optimizers = pair(partial(optim.AdamW, lr=1e-2))
    step(both[0], optimizers[0])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(both[1], optimizers[1], 5)
    stream.synchronize()
    assert equal(both[0], both[1])


# ---- gradients ----------------------------------------------------------------------------------------


def norm(model: nn.Module, **how: Any) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.05, **how)


ADAMW = partial(optim.AdamW, lr=1e-2)
LOOPS = {
    "adamw": Loop(ADAMW),
    "single": Loop(partial(ADAMW, foreach=False)),
    "fused": Loop(partial(ADAMW, fused=True)),
    "sgd": Loop(partial(optim.SGD, lr=0.1, momentum=0.9)),
    "accumulate": Loop(ADAMW, accumulate=3),
    "accumulate into zeros": Loop(ADAMW, accumulate=2, to_none=False),
    "norm": Loop(ADAMW, before_step=norm),
    "norm, accumulate": Loop(ADAMW, before_step=norm, accumulate=2),
    "norm, one by one": Loop(ADAMW, before_step=partial(norm, foreach=False)),
    "largest": Loop(ADAMW, before_step=partial(norm, norm_type=float("inf"))),
    "value": Loop(ADAMW, before_step=lambda model: clip_grad_value_(model.parameters(), 1e-3)),
    "scaled": Loop(ADAMW, scaled=True),
    "scaled, norm": Loop(ADAMW, scaled=True, before_step=norm),
    "scaled, fused": Loop(partial(ADAMW, fused=True), scaled=True),
}


@pytest.mark.parametrize("window", [0, 1 << 14], ids=["no window", "window"])
@pytest.mark.parametrize("name", LOOPS)
def test_five_steps_with_released_gradients(name: str, window: int) -> None:
    plain = trained(net(), LOOPS[name])
    model = net()
    made = technique(model, window)
    made.attach()
    try:
        assert equal(plain, trained(model, LOOPS[name]))
    finally:
        made.undo()


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_for_gradients(tier: str) -> None:
    plain = trained(net(), LOOPS["norm, accumulate"])
    model = net()
    made = technique(model, tier=tier)
    made.attach()
    try:
        assert equal(plain, trained(model, LOOPS["norm, accumulate"]))
    finally:
        made.undo()


def large(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
    return nn.Sequential(*layers).cuda()


def test_gradients_leave_the_card() -> None:
    model, size = large(), 4 * 512 * 512
    made = technique(model)
    made.attach()
    x = torch.randn(4, 512, device="cuda")
    model(x).sum().backward()  # libraries have their workspaces now
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 3 * size
    assert all(isinstance(value.grad, ReleasedGradient) for value in model.parameters())
    found = [value.grad.clone() for value in model.parameters()]
    made.undo()
    assert all(type(value.grad) is Tensor for value in model.parameters())
    assert equal(found, [value.grad for value in model.parameters()])
    plain = large()
    plain(x).sum().backward()
    assert equal(found, [value.grad for value in plain.parameters()])


@pytest.mark.parametrize("how", HOW)
def test_state_and_gradients_offloaded(how: str) -> None:
    x = torch.randn(4, 512, device="cuda")
    models = large(), large()
    optimizers = [optim.AdamW(model.parameters(), lr=1e-2, **HOW[how]) for model in models]
    made = technique(models[1])
    made.attach()
    assert send(optimizers[1], opened(), 1 << 16) == ""
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            for part in (x, 2 * x):
                model(part).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    made.undo()
    assert equal(list(models[0].parameters()), list(models[1].parameters()))
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_gradient_used_on_another_stream() -> None:
    model, plain = large(), large()
    x = torch.randn(4, 512, device="cuda")
    made = technique(model)
    made.attach()
    stream = torch.cuda.Stream()
    for _ in range(3):
        for each in (model, plain):
            each(x).square().mean().backward()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for value in each.parameters():
                    value.grad.mul_(2).add_(value.grad)
            torch.cuda.current_stream().wait_stream(stream)
    found = [value.grad.clone() for value in model.parameters()]
    made.undo()
    assert equal(found, [value.grad for value in plain.parameters()])
