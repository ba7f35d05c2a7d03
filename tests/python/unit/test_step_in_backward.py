# SPDX-License-Identifier: Apache-2.0
"""Steps inside of backward: every bit of the ordinary step, and what breaks the promise is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from backward_step_samples import around, by_group, gradients, stepped, trained
from gradient_samples import batch, loss_of, net
from memscale.offload.engine import why_not as why_no_engine
from memscale.optim import take_over
from memscale.optim.offload.attach import send
from memscale.optim.spent import SpentGradient
from memscale.techniques.optimizer.step_in_backward import find
from offloaded_state_samples import CUT, WHOLE, equal, opened, with_small_ones
from optim_samples import OPTIMIZERS, OUR_ADAMW

EVERY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **CUT,
    **WHOLE,
    "lists": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "no momentum": lambda p: torch.optim.SGD(p, lr=1e-2),
    "tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_bit_stays(name: str) -> None:
    """Tied weights, a frozen and an unused parameter, two groups, a scheduler."""
    plain, mine = (trained(EVERY[name], in_backward) for in_backward in (False, True))
    assert equal(plain, mine)
    assert [*plain[2]["state"]] == [*mine[2]["state"]]  # a saved file, too


@OUR_ADAMW
@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_of_our_state_stays(name: str, moments: str) -> None:
    def prepare(optimizer: Any) -> None:
        assert take_over(optimizer, moments) == ""

    plain, mine = (trained(OPTIMIZERS[name], way, prepare=prepare) for way in (False, True))
    assert equal(plain, mine)


@pytest.mark.skipif(why_no_engine(torch.device("cpu")) != "", reason="no offload here")
@pytest.mark.parametrize("ours", [False, True])
def test_every_bit_stays_with_the_state_offloaded(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_small_ones(monkeypatch)

    def prepare(optimizer: Any) -> None:
        assert not ours or take_over(optimizer) == ""
        assert send(optimizer, opened(), 128) == ""

    make = OPTIMIZERS["adam"]
    plain, mine = (trained(make, way, prepare=prepare) for way in (False, True))
    assert equal(plain, mine)


def test_gradients_go_one_by_one() -> None:
    """When one is complete those before it are gone."""
    model = net()
    optimizer = torch.optim.AdamW(by_group(model))
    seen: list[StorageWeakRef] = []
    alive: list[int] = []

    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None and not isinstance(parameter.grad, SpentGradient)
        alive.append(sum(not ref.expired() for ref in seen))
        seen.append(StorageWeakRef(parameter.grad.untyped_storage()))

    with stepped(model, optimizer):
        for value in model.parameters():
            if value.requires_grad:
                value.register_post_accumulate_grad_hook(look)
        loss_of(model, 0).backward()
        assert len(alive) == 8 and max(alive) <= 2  # autograd holds those of one node for a moment
        assert all(value is None or isinstance(value, SpentGradient) for value in gradients(model))
        optimizer.step()
        assert gradients(model) == [None] * len(gradients(model))


def refused(*words: str) -> Any:
    return pytest.raises(RuntimeError, match="step_in_backward.*" + ".*".join(words))


def both(then: Callable[[nn.Module, Any], None]) -> None:
    """Does something to a model after one backward."""
    model = net()
    optimizer = torch.optim.SGD(by_group(model), lr=0.1)
    with stepped(model, optimizer):
        loss_of(model, 0).backward()
        then(model, optimizer)


USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm in lists": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "values": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "sum": lambda model, _: model.conv.weight.grad.sum(),
    "part": lambda model, _: model.conv.weight.grad[0],
    "data": lambda model, _: model.conv.weight.grad.data,
    "in place": lambda model, _: model.conv.weight.grad.mul_(2),
    "address": lambda model, _: model.conv.weight.grad.data_ptr(),
    "storage": lambda model, _: model.conv.weight.grad.untyped_storage(),
    "array": lambda model, _: model.conv.weight.grad.numpy(),
    "list": lambda model, _: model.conv.weight.grad.tolist(),
    "copy": lambda model, _: copy.deepcopy(model.conv.weight.grad),
    "pickle": lambda model, _: pickle.dumps(model.conv.weight.grad),
}


@pytest.mark.parametrize("name", USES)
def test_a_use_of_a_spent_gradient(name: str) -> None:
    def use(model: nn.Module, optimizer: Any) -> None:
        before = [value.detach().clone() for value in model.parameters()]
        with pytest.raises(RuntimeError, match=r"is spent.*step_in_backward=True"):
            USES[name](model, optimizer)
        optimizer.step()  # goes on
        assert equal(before, [*model.parameters()])

    both(use)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_hook_in_front_of_the_step_that_clips(made: str) -> None:
    """It must not find that there are no gradients, and clip nothing without a word."""
    model = net()
    optimizer = torch.optim.SGD(by_group(model), lr=0.1)

    def clip(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        nn.utils.clip_grad_norm_(
            [value for group in optimizer.param_groups for value in group["params"]], 1e-3
        )

    def quiet(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        calls.append(1)

    calls: list[int] = []
    optimizer.register_step_pre_hook(quiet)
    handle = optimizer.register_step_pre_hook(clip) if made == "before" else None
    with stepped(model, optimizer):
        handle = handle or optimizer.register_step_pre_hook(clip)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"is spent.*step_in_backward=True"):
            optimizer.step()
        handle.remove()
        optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
    assert len(calls) == 3


def test_what_can_be_asked_of_a_spent_gradient() -> None:
    def ask(model: Any, optimizer: Any) -> None:
        gradient, weight = model.conv.weight.grad, model.conv.weight
        assert gradient.shape == weight.shape and gradient.dtype is weight.dtype
        assert gradient.device == weight.device and repr(gradient) == (
            "SpentGradient('conv.weight', (24, 24, 3), torch.float32)"
        )

    both(ask)


def test_a_second_forward_before_the_step() -> None:
    def again(model: nn.Module, optimizer: Any) -> None:
        with refused("optimizer.step\\(\\) has not been called"):
            loss_of(model, 1)
        optimizer.step()
        loss_of(model, 1).backward()

    both(again)


def test_a_second_backward_before_the_step() -> None:
    """Of a graph that was there before; the first gradient to come says it, and no weight changes."""
    model = net()
    optimizer = torch.optim.SGD(by_group(model), lr=0.1)
    with stepped(model, optimizer):
        first, second = loss_of(model, 0), (model.embed.weight * 2).sum()
        first.backward()
        before = [value.detach().clone() for value in model.parameters()]
        with pytest.raises(RuntimeError, match=r"'embed.weight' is spent.*step_in_backward"):
            second.backward(retain_graph=True)
        optimizer.zero_grad()
        with refused("second backward has a gradient for 'embed.weight'"):
            second.backward()
        assert equal(before, [*model.parameters()])


def test_gradients_that_are_zeroed_before_the_step() -> None:
    def zero(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        with refused("zeroed or replaced"):
            optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()

    both(zero)


def test_gradients_that_are_thrown_away() -> None:
    """Of a discriminator in the backward of its generator, say: its own next forward says it."""
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    with stepped(judge, optimizer):
        judge(made(torch.ones(2, 4))).sum().backward()
        optimizer.zero_grad()
        with refused("forward runs", "'weight'"):
            judge(torch.ones(2, 4))


def test_a_scaled_loss_changes_no_weight() -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(by_group(model), lr=0.1), torch.amp.GradScaler("cpu")
    original, before = torch.amp.GradScaler.scale, copy.deepcopy(model)
    with stepped(model, optimizer):
        with refused("GradScaler"):
            scaler.scale(loss_of(model, 0)).backward()
        with refused("GradScaler"):
            scaler.scale([loss_of(model, 0)])[0].backward()
        assert equal([*before.parameters()], [*model.parameters()])
        off = torch.amp.GradScaler("cpu", enabled=False)
        off.scale(loss_of(model, 0)).backward()
        off.step(optimizer)
        other = nn.Linear(2, 2)  # nobody has promised anything of this one
        scaler.scale(other(torch.ones(2)).sum()).backward()
    assert torch.amp.GradScaler.scale is original
    scaler.scale(loss_of(model, 0)).backward()


def test_a_closure() -> None:
    model = net()
    optimizer = torch.optim.SGD(by_group(model), lr=0.1)
    with stepped(model, optimizer), refused("closure"):
        optimizer.step(lambda: loss_of(model, 0))


def test_a_differentiable_gradient() -> None:
    model = net()
    optimizer = torch.optim.SGD(by_group(model), lr=0.1)
    with stepped(model, optimizer), refused("is differentiable"):
        loss_of(model, 0).backward(create_graph=True)


class Breaks(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ArithmeticError("broken off")


class Two(nn.Module):
    """Something goes wrong between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.breaks = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(Breaks.apply(x) if self.breaks else x).sum()


@pytest.mark.parametrize("where", ["step", "forward"])
def test_a_backward_that_is_broken_off(where: str) -> None:
    model, x = Two(), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model)
    with stepped(model, optimizer):
        with pytest.raises(ArithmeticError):
            model(x).backward()
        assert not torch.equal(before.last.weight, model.last.weight)
        words = "2 of 4 parameters", "'last.weight'", "not: 'first.weight', 'first.bias'"
        with pytest.raises(RuntimeError, match="broken off") as caught:
            optimizer.step() if where == "step" else model(x)
        assert all(word in str(caught.value) for word in words)
        model.breaks = False
        model(x).backward()  # said once
        optimizer.step()
        assert int(optimizer.state[model.last.weight]["step"]) == 2
        assert int(optimizer.state[model.first.weight]["step"]) == 1
    assert type(optimizer) is torch.optim.AdamW and not optimizer._optimizer_step_pre_hooks
    assert all(not value._post_accumulate_grad_hooks for value in model.parameters())


def test_a_step_that_fails() -> None:
    """As a dense optimizer's does where its state does not fit."""
    model, x = Two(), torch.ones(2, 4)
    model.breaks = False
    optimizer = torch.optim.AdamW(model.parameters())
    with stepped(model, optimizer):
        model(x).backward()
        optimizer.step()
        optimizer.state[model.first.weight]["exp_avg"] = torch.zeros(3)
        with pytest.raises(RuntimeError):
            model(x).backward()
        with refused("stepped 3 of 4|stepped 2 of 4", "perhaps in part: 'first.weight'"):
            optimizer.step()


def test_a_backward_that_breaks_before_it_has_stepped_anything() -> None:
    model, x = Two(), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with stepped(model, optimizer):
        with pytest.raises(ArithmeticError):
            (Breaks.apply(model(x))).backward()
        model.breaks = False
        model(x).backward()
        optimizer.step()


def test_undone_between_backward_and_step() -> None:
    """The step has been done: the optimizer's own finds nothing left."""
    plain, mine = Two(), Two()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (plain, mine)]
    x = torch.ones(2, 4)
    plain.breaks = mine.breaks = False
    with stepped(mine, optimizers[1]):
        mine(x).backward()
    plain(x).backward()
    assert gradients(mine) == [None] * 4
    for model, optimizer in zip((plain, mine), optimizers, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    assert equal([*plain.parameters()], [*mine.parameters()])


def test_parameters_of_others_are_stepped_as_ever() -> None:
    """Another optimizer's; one that the optimizer has besides the model's; one that is thawed later."""
    runs = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model, beside = Two(), nn.Parameter(torch.ones(4))
        model.breaks = False
        model.last.bias.requires_grad_(False)
        first = torch.optim.Adam([*model.first.parameters(), beside])
        second = torch.optim.Adam(model.last.parameters())

        def run(model: Any = model, beside: Any = beside, optimizers: Any = (first, second)) -> None:
            for number in range(4):
                if number == 2:
                    model.last.bias.requires_grad_()
                    optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
                (model(torch.ones(2, 4)) * beside).sum().backward()
                nn.utils.clip_grad_norm_(model.last.parameters(), 0.1)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        if in_backward:
            with stepped(model, first):
                run()
        else:
            run()
        runs.append(([*model.parameters(), beside], first.state_dict(), second.state_dict()))
    assert equal(*runs)


def test_sparse_gradients_wait_for_the_step() -> None:
    runs = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for _ in range(3):
                model(torch.tensor([1, 5, 5])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        if in_backward:
            with stepped(model, optimizer):
                model(torch.tensor([1])).square().sum().backward()
                assert model[0].weight.grad.is_sparse
                assert isinstance(model[1].weight.grad, SpentGradient)
                optimizer.step()
                optimizer.zero_grad()
                run()
        else:
            model(torch.tensor([1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run()
        runs.append([*model.parameters()])
    assert equal(*runs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_pytorch(reentrant: bool) -> None:
    """A reentrant one runs backwards inside of backward, each with parameters of its own."""
    runs = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        optimizer = torch.optim.AdamW(layers.parameters())

        def run(layers: Any = layers, optimizer: Any = optimizer, steps: Any = None) -> None:
            for _ in range(3):
                x = torch.ones(2, 4, requires_grad=True)
                for layer in layers:
                    x = checkpoint(layer, x.tanh(), use_reentrant=reentrant)
                if steps is not None:
                    steps.has_run(x)
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        if in_backward:
            with stepped(layers, optimizer) as made:
                run(steps=made)
        else:
            run()
        runs.append([*layers.parameters()])
    assert equal(*runs)


def test_a_module_that_is_shared_by_reentrant_checkpoints() -> None:
    """Its gradient is not complete when it seems so: the second part says it."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with stepped(layer, torch.optim.SGD(layer.parameters(), lr=0.1)):
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        with pytest.raises(RuntimeError, match="reentrant checkpoint"):
            y.sum().backward()


def test_weights_that_a_graph_still_needs() -> None:
    """Not by a path that has a gradient: then autograd says that they were changed."""
    weight = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4, requires_grad=True)
    with stepped(weight, torch.optim.SGD(weight.parameters(), lr=0.1)):
        y = (x * 2) @ weight.weight.detach().t()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weight(y).sum().backward()


def test_retained_graphs() -> None:
    model, x = Two(), torch.ones(2, 4)
    model.breaks = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepped(model, optimizer):
        loss = model(x)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_of_others_see_the_gradient() -> None:
    """Made before or after ours, and those of the optimizer's step see it no more."""
    model, x = Two(), torch.ones(2, 4)
    model.breaks = False
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    model.first.weight.register_post_accumulate_grad_hook(lambda value: seen.append(value.grad.sum()))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.grad))
    with stepped(model, optimizer):
        model.last.weight.register_post_accumulate_grad_hook(lambda value: seen.append(value.grad.sum()))
        model.last.weight.register_hook(lambda gradient: 2 * gradient)
        model(x).backward()
        optimizer.step()
        assert len(seen) == 3 and seen[2] is None and all(value is not None for value in seen[:2])


def test_a_model_that_goes_leaves_nothing() -> None:
    original = torch.amp.GradScaler.scale
    model = net()
    optimizer = torch.optim.AdamW(by_group(model))
    (made,) = find(model, around(optimizer))
    made.attach()
    assert torch.amp.GradScaler.scale is not original
    model(batch(0)).sum().backward()
    gone = weakref.ref(model), weakref.ref(made.steps)
    del model, made, optimizer.param_groups[:]
    optimizer.state.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert torch.amp.GradScaler.scale is original
    (left,) = optimizer._optimizer_step_pre_hooks.values()  # not taken off: a step may walk them now
    assert left(optimizer, (), {}) is None
    other = net()
    optimizer.add_param_group({"params": list(other.parameters())})
    (made,) = find(other, around(optimizer))
    made.attach()
    assert list(optimizer._optimizer_step_pre_hooks.values()) != [left]
    made.undo()
    assert not optimizer._optimizer_step_pre_hooks
