# SPDX-License-Identifier: Apache-2.0
"""Our state of a card's parameters, stepped by the host's cores: the bits of the card's own step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_runs import PIECE, Loop, Make, card, equal, net, opened, parameters, step, technique, trained
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from memscale.optim import cards, take_over
from memscale.optim.offload.attach import keep_resident, offloaded_bytes, send, take_back
from memscale.optim.offload.pieces import OFFLOADED
from offloaded_state_samples import with_small_ones

optim = torch.optim

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adam": partial(optim.Adam, lr=1e-2, weight_decay=0.1),
    "sgd": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)


def pair(make: Make, dtype: torch.dtype, moments: str) -> Any:
    """Twice the same parameters and optimizer; the second one's are stepped on the host."""
    both = parameters(dtype), parameters(dtype)
    optimizers = [make(values) for values in both]
    for optimizer in optimizers:
        take_over(optimizer, moments)
    assert send(optimizers[1], opened(), PIECE, on_host=True) == ""
    return both, optimizers


@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name: str, dtype: torch.dtype, moments: str) -> None:
    both, optimizers = pair(OPTIMIZERS[name], dtype, moments)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    large = [value for value in both[1] if value.nbytes >= 64 << 10]
    for value in large:
        pieces = optimizers[1].state[value][OFFLOADED].pieces
        assert all(isinstance(piece, torch.Tensor) and piece.device.type == "cpu" for piece in pieces)
    assert offloaded_bytes(optimizers[1]) > 0
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    take_back(optimizers[1])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2, seed=3)
    assert equal(both[0], both[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_comes_to_the_card_and_leaves_between_steps(dtype: torch.dtype) -> None:
    both, optimizers = pair(OPTIMIZERS["adamw"], dtype, "code8")
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2)
    gone = torch.cuda.memory_allocated()
    for round_ in range(3):
        keep_resident(optimizers[1], both[1][round_ : round_ + 3])
        assert torch.cuda.memory_allocated() > gone
        for values, optimizer in zip(both, optimizers, strict=True):
            step(values, optimizer, 2, seed=round_)
        assert equal(both[0], both[1])
    keep_resident(optimizers[1], [])
    assert torch.cuda.memory_allocated() == gone
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_state_dict_goes_from_one_to_the_other() -> None:
    both, optimizers = pair(OPTIMIZERS["adamw"], torch.bfloat16, "code8")
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 3)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    optimizers[0].load_state_dict(saved[1])
    optimizers[1].load_state_dict(saved[0])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 3, seed=5)
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_step_that_fails_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from memscale.optim.offload import step as offloaded_step

    both, optimizers = pair(OPTIMIZERS["adamw"], torch.float32, "code8")
    step(both[1], optimizers[1], 2)
    calls = 0
    real = offloaded_step.core_on

    def failing(device: torch.device) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError("broken off")
        return real(device)

    monkeypatch.setattr(offloaded_step, "core_on", failing)
    with pytest.raises(OSError, match="broken off"):
        step(both[1], optimizers[1], 1)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="ended in the middle"):
        step(both[1], optimizers[1], 1)


# ---- with released gradients --------------------------------------------------------------------------


def _scaled(model: nn.Module) -> None:
    for value in model.parameters():
        if value.grad is not None:
            value.grad.div_(3)


def _norm(model: nn.Module, limit: float = 0.1) -> Any:
    return clip_grad_norm_(model.parameters(), limit)


LOOPS: dict[str, Loop] = {
    "plain": Loop(OPTIMIZERS["adamw"]),
    "norm": Loop(OPTIMIZERS["adamw"], _norm),
    "value": Loop(OPTIMIZERS["adamw"], lambda model: clip_grad_value_(model.parameters(), 1e-3)),
    "divided": Loop(OPTIMIZERS["adamw"], _scaled),
    "accumulated": Loop(OPTIMIZERS["adamw"], _norm, accumulate=3),
    "zeros": Loop(OPTIMIZERS["sgd"], to_none=False),
    "scaled": Loop(OPTIMIZERS["adamw"], _norm, scaled=True),
}


def _is_elsewhere(optimizer: optim.Optimizer, *_: Any) -> None:
    assert offloaded_bytes(optimizer) > 0


def _taken(make: Make, on_host: bool) -> Make:
    def made(values: Any) -> optim.Optimizer:
        optimizer = make(values)
        take_over(optimizer, "code8")
        if on_host:
            assert send(optimizer, opened(), PIECE, on_host=True) == ""
            optimizer.register_step_post_hook(_is_elsewhere)
        return optimizer

    return made


@pytest.mark.parametrize("tier", ["pinned", "pageable", "file"])
@pytest.mark.parametrize("name", LOOPS)
def test_released_gradients_do_not_come_back_to_the_card(
    name: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_small_ones(monkeypatch)  # the net's parameters are small
    loop = LOOPS[name]
    model = net()
    plain = trained(model, replace(loop, optimizer=_taken(loop.optimizer, on_host=False)))
    model = net()
    attached = technique(model, tier=tier)
    attached.attach()
    try:
        mine = trained(model, replace(loop, optimizer=_taken(loop.optimizer, on_host=True)))
    finally:
        attached.undo()
    count = len(plain) - len([value for value in plain if value.dtype is torch.uint8])
    assert equal(plain[:count], mine[:count])
