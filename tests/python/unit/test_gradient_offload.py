# SPDX-License-Identifier: Apache-2.0
"""Trainings with released gradients compute every bit of plain PyTorch, whatever the loop does to them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gradient_samples import (
    LATE,
    Loop,
    Net,
    is_offloaded,
    loss_of,
    net,
    released,
    same,
    technique,
    trained,
)
from memscale.errors import MemScaleError
from memscale.optim.release.gradient import ReleasedGradient
from memscale.techniques.optimizer.gradient_offload import names_of
from technique_leaks import net_bytes, objects

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, one by one": partial(AdamW, lr=1e-2, foreach=False),
    "AdamW, lists": partial(AdamW, lr=1e-2, foreach=True),
    "AdamW, fused": partial(AdamW, lr=1e-2, fused=True),
    "AdamW, amsgrad, maximize": partial(AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "SGD, momentum": partial(SGD, lr=1e-2, momentum=0.9),
    "SGD, lists, decay": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "SGD, fused": partial(SGD, lr=1e-2, fused=True),
}


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def clipped(model: nn.Module, kind: float = 2.0) -> Tensor:
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
    return norm


def clipped_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def written(model: nn.Module) -> Tensor:
    """What loops do by hand."""
    for value in model.parameters():
        if value.grad is not None:
            value.grad.data.mul_(1.01)
            value.grad[0] += 1e-3
            value.grad.add_(torch.full_like(value.grad, 1e-4))
    total = sum(value.grad.pow(2).sum() for value in model.parameters() if value.grad is not None)
    assert isinstance(total, Tensor)
    return total


BEFORE: dict[str, Callable[[nn.Module], Any]] = {
    "as it is": lambda model: None,
    "norm": clipped,
    "largest": partial(clipped, kind=float("inf")),
    "value": clipped_by_value,
    "by hand": written,
}
LOOPS = {
    **{name: Loop(optimizer, clipped) for name, optimizer in OPTIMIZERS.items()},
    **{name: Loop(OPTIMIZERS["AdamW, one by one"], before) for name, before in BEFORE.items()},
    "accumulation": Loop(OPTIMIZERS["AdamW, fused"], clipped, accumulate=3),
    "set to zero": Loop(OPTIMIZERS["SGD, momentum"], clipped, accumulate=2, to_none=False),
    "set to zero in lists": Loop(OPTIMIZERS["SGD, lists, decay"], to_none=False),
    "scaler": Loop(OPTIMIZERS["AdamW, lists"], clipped, scaled=True),
    "scaler, accumulation": Loop(OPTIMIZERS["SGD, momentum"], accumulate=2, scaled=True),
}


@cache
def plain_run(name: str) -> list[Tensor]:
    found: list[Tensor] = trained(net(), LOOPS[name])
    return found


@pytest.mark.parametrize("window", [0, 8_000])
@pytest.mark.parametrize("name", LOOPS)
def test_every_bit(name: str, window: int) -> None:
    model = net()
    with released(model, window) as made:
        assert same(trained(model, LOOPS[name]), plain_run(name))
        assert made.window is not None
        gc.collect()
        used = made.window.engine.counters()
    assert used["put_count_host"] > 0
    if LOOPS[name].to_none:
        assert used["block_count"] == used["source_bytes"] == 0


@pytest.mark.parametrize("name", ["AdamW, lists", "accumulation", "set to zero", "by hand"])
@pytest.mark.parametrize("window", [0, 8_000])
def test_every_bit_with_late_copies(name: str, window: int) -> None:
    model = net()
    with released(model, window, LATE):
        assert same(trained(model, LOOPS[name]), plain_run(name))


@pytest.mark.parametrize("tier", ["file", "nowhere", "little", "failing"])
def test_every_bit_wherever_they_lie(tier: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "file": {"host_bytes": 0, "file_bytes": 32 << 20, "directory": str(tmp_path)},
        "nowhere": {"host_bytes": 0, "file_bytes": 1 << 20, "directory": str(tmp_path / "not there")},
        "little": {"host_bytes": (16 << 20) + 8_000},
        "failing": {},
    }
    faults = {"fault_seed": 2, "fault_fail_ppm": 30_000} if tier == "failing" else None
    model = net()
    with released(model, 0, faults, **options[tier]):
        try:
            assert same(trained(model, LOOPS["accumulation"]), plain_run("accumulation"))
        except MemScaleError:  # of a copy back: what is lost is said
            assert tier == "failing"


def test_all_are_offloaded_when_backward_ends() -> None:
    model = net()
    expected = net()
    for value in (model, expected):
        with released(model, 1 << 20):
            loss_of(value, 0).backward()
            if value is model:
                names = names_of(model, 1)
                for name, parameter in model.named_parameters():
                    assert is_offloaded(parameter.grad) == (name in names and name != "unused"), name
    assert all(
        mine.grad is None if theirs.grad is None else torch.equal(grad_of(mine), theirs.grad)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_undo_leaves_ordinary_gradients() -> None:
    model, expected = net(), net()
    loss_of(expected, 0).backward()
    with released(model):
        loss_of(model, 0).backward()
        clipped(model)
    clipped(expected)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(mine.grad) is type(theirs.grad) and not mine._post_accumulate_grad_hooks
        assert mine.grad is None or torch.equal(mine.grad, grad_of(theirs))
    loss_of(model, 1).backward()
    loss_of(expected, 1).backward()
    assert torch.equal(grad_of(model.first.weight), grad_of(expected.first.weight))
    assert type(grad_of(model.first.weight)) is Tensor


def seen_by_hooks(model: Net) -> list[Tensor]:
    """What the caller's own hooks see, on both sides of ours, over two backwards."""
    seen: list[Tensor] = []
    weight = model.first.weight
    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda value: seen.append(grad_of(value).clone()))
    for number in range(2):
        loss_of(model, number).backward()
    return [*seen, grad_of(weight) * 1]


def test_hooks_made_before_and_after() -> None:
    expected = seen_by_hooks(net())
    model = net()
    with released(model):
        assert same(seen_by_hooks(model), expected)
    held: list[Tensor] = []
    model = net()
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda value: held.append(grad_of(value)))
    with released(model):
        assert same(seen_by_hooks(model), expected)
        assert (
            held[0] is held[1] is grad_of(model.first.weight)
        )  # a hook from before sees what is there afterwards
    handle.remove()
    assert torch.equal(held[0], expected[-1])


def test_a_second_backward_and_derivatives_of_gradients() -> None:
    found = []
    for attach in (False, True):
        model = net()
        with released(model) if attach else released(net()):
            loss = loss_of(model, 0)
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([grad_of(model.embed.weight).clone(), grad_of(model.conv.weight).clone()])
            loss = loss_of(model, 1)
            (grad,) = torch.autograd.grad(loss, model.first.weight, create_graph=True)
            (grad.square().sum() + (model.first.weight * grad_of(model.first.weight)).sum()).backward()
            found[-1] += [grad_of(model.first.weight).clone(), grad_of(model.norm.weight).clone()]
    assert same(*found)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_differentiable_gradient_is_left_alone() -> None:
    model = net()
    with released(model):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward(create_graph=True)
        assert grad_of(model.first.weight).grad_fn is not None and type(grad_of(model.first.weight)) is Tensor
        model.zero_grad()


def test_an_optimizer_inside_of_backward() -> None:
    found = []
    for attach in (False, True):
        model = net()
        with released(model) if attach else released(net()):
            for value in model.parameters():
                if value.requires_grad:
                    optimizer = SGD([value], lr=0.1)

                    def stepped(parameter: Tensor, optimizer: Any = optimizer) -> None:
                        optimizer.step()
                        parameter.grad = None

                    value.register_post_accumulate_grad_hook(stepped)
            for number in range(3):
                loss_of(model, number).backward()
            found.append([value.detach() for value in model.parameters()])
    assert same(*found)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_exception_in_the_middle_of_backward(error: BaseException) -> None:
    model, expected = net(), net()
    for value, attach in ((model, True), (expected, False)):
        with released(value, LATE and 8_000, LATE) if attach else released(net()):
            handle = value.first.register_forward_hook(
                lambda module, args, output: _Raises.apply(output, error)  # type: ignore[no-untyped-call]
            )
            with pytest.raises(type(error)):
                loss_of(value, 0).backward()
            handle.remove()
            loss_of(value, 1).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad is None if theirs.grad is None else torch.equal(grad_of(mine), theirs.grad)


def test_an_interrupted_fetch_goes_on_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    with released(model) as made:
        loss_of(model, 0).backward()
        gradient = grad_of(model.first.weight)
        assert isinstance(gradient, ReleasedGradient)
        wait = type(gradient.memscale_bytes)._wait
        calls = iter([False, True])

        def interrupted(self: Any) -> None:
            if next(calls, False):
                raise KeyboardInterrupt
            wait(self)

        with monkeypatch.context() as patched:
            patched.setattr(type(gradient.memscale_bytes), "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                gradient.sum()
        expected = net()
        loss_of(expected, 0).backward()
        assert torch.equal(gradient, grad_of(expected.first.weight))
        assert made.window is not None
        made.window.clear()
        assert is_offloaded(gradient)


def test_a_model_that_changes_its_type() -> None:
    model, expected = net(), net()
    with released(model):
        for value in (model, expected):
            loss_of(value, 0).backward()
            value.double()
            loss_of(value, 1).backward()
        assert torch.equal(grad_of(model.first.weight), grad_of(expected.first.weight))
        assert grad_of(model.first.weight).dtype is torch.float64


def test_gradients_that_are_too_small_stay() -> None:
    model = net()
    with released(model, least_bytes=2_000):
        loss_of(model, 0).backward()
        assert type(grad_of(model.norm.weight)) is Tensor and is_offloaded(model.embed.weight.grad)


def test_no_growth_over_200_steps() -> None:
    model = nn.Linear(24, 24, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(2, 24)

    def steps(count: int) -> None:
        for number in range(count):
            model(x).square().sum().backward()
            if number % 2:
                clipped(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 3 > 0)

    with released(model):
        steps(4)
        before = objects()
        assert net_bytes(lambda: steps(200)) == 0
        assert objects() - before < 100


@pytest.mark.parametrize("to_none", [True, False])
def test_under_somebody_who_watches_operations(to_none: bool) -> None:
    model, name = net(), "accumulation" if to_none else "set to zero"
    with released(model) as made, FlopCounterMode(display=False):
        assert same(trained(model, LOOPS[name]), plain_run(name))
        assert made.window is not None and made.window.engine.counters()["put_count_host"] > 0


def test_several_threads_run_backward() -> None:
    model, expected = net(), net()
    with released(model, 0, LATE):
        threads = [threading.Thread(target=lambda: loss_of(model, 0).backward()) for _ in range(4)]
        for thread in threads:
            thread.start()
            loss_of(expected, 0).backward()
        for thread in threads:
            thread.join()
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is None if theirs.grad is None else torch.equal(grad_of(mine), theirs.grad)


def test_in_inference_mode() -> None:
    model, expected = net(), net()
    with released(model):
        for value in (model, expected):
            loss_of(value, 0).backward()
            with torch.inference_mode():
                grad_of(value.conv.weight).mul_(2).add_(1)
            loss_of(value, 1).backward()
        assert torch.equal(grad_of(model.conv.weight), grad_of(expected.conv.weight))
        assert is_offloaded(model.conv.weight.grad)


def test_it_can_be_attached_again() -> None:
    model = net()
    made = technique(model)
    for _ in range(2):
        made.attach()
        loss_of(model, 0).backward()
        assert is_offloaded(model.first.weight.grad)
        made.undo()
        assert type(grad_of(model.first.weight)) is Tensor
