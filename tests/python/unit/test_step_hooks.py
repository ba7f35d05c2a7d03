# SPDX-License-Identifier: Apache-2.0
"""Hooks on the steps of all optimizers: they may come and go while another optimizer steps."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memscale
from loss_scale_samples import fp16_host
from memscale import Config
from memscale.torchkit import step_hooks
from memscale.torchkit.step_hooks import after_steps, before_steps

__all__ = ["fp16_host"]  # the fixture of every test here

HOOKS: Any = sys.modules["torch.optim.optimizer"]
REGISTER = {"before": register_optimizer_step_pre_hook, "after": register_optimizer_step_post_hook}
CONFIGS = {
    "nothing": Config(enable_logging=False),
    "everything": Config(memory_budget=1, enable_logging=False),
    "scaled": Config(memory_budget=1, use_mixed_precision=True, exact=False, enable_logging=False),
    "in-backward": Config(step_in_backward=True, enable_logging=False),
}


class Owner:
    def __init__(self) -> None:
        self.told: list[str] = []


def stepping() -> torch.optim.Optimizer:
    """An optimizer that nobody has told anything about memscale."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


@contextlib.contextmanager
def called(when: str, hook: Callable[..., None]) -> Iterator[None]:
    """A user's own hook on all optimizers, and one behind it: PyTorch walks on when it has been called."""
    handles = [REGISTER[when](hook), REGISTER[when](lambda *unused: None)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def collect(*unused: Any) -> None:
    gc.collect()


def trained_and_dropped(config: Config) -> None:
    """A model that is wrapped and trained for a step, and is garbage then, in a cycle."""
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(2, 600)
    memscale.wrap(model, config, x, optimizer=optimizer)
    model(x).square().mean().backward()
    optimizer.step()
    model.__dict__["itself"] = model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("when", REGISTER)
def test_a_model_goes_within_another_ones_step(when: str, name: str) -> None:
    """PyTorch walks its hooks while garbage collection ends those of a model."""
    optimizer = stepping()
    gc.collect()
    gc.disable()
    try:
        trained_and_dropped(CONFIGS[name])
        with called(when, collect):
            optimizer.step()
            optimizer.step()
    finally:
        gc.enable()


def test_a_model_is_given_back_within_a_step_that_is_skipped() -> None:
    """The gradients that the optimizer did not get to see come back all the same."""
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memscale.wrap(model, CONFIGS["scaled"], x, optimizer=optimizer)
    model(x).square().mean().backward()
    assert model.weight.grad is not None
    model.weight.grad.fill_(torch.inf)
    before, seen = model.weight.detach().clone(), []

    def give_back(*unused: Any) -> None:
        seen.append(model.weight.grad)
        memscale.detach(model)

    with called("before", give_back):
        optimizer.step()
    assert seen == [None] and torch.equal(model.weight, before)
    assert model.weight.grad is not None and model.weight.grad.isinf().all()


def test_models_come_and_go_while_a_thread_steps() -> None:
    """The other thread is within PyTorch's walk over its hooks each time that a model comes or goes."""
    within, go_on = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def pause(*unused: Any) -> None:
        if threading.current_thread() is thread:
            within.set()
            assert go_on.wait(60)
            go_on.clear()

    def steps() -> None:
        optimizer = stepping()
        try:
            for _ in range(4):
                optimizer.step()
        except BaseException as error:
            failures.append(error)
            within.set()

    thread = threading.Thread(target=steps)
    with called("before", pause), called("after", pause):
        thread.start()
        for _ in range(4):
            assert within.wait(60) and not failures
            within.clear()
            come = memscale.wrap(nn.Linear(3, 3), CONFIGS["everything"], torch.ones(2, 3))
            go_on.set()
            assert within.wait(60) and not failures
            within.clear()
            memscale.detach(come)
            go_on.set()
        thread.join()
    assert not failures


def test_they_are_called_in_their_order_and_change_what_a_step_is_given() -> None:
    owner, optimizer = Owner(), stepping()

    def closure() -> Tensor:
        owner.told.append("closure")
        return torch.ones(())

    def with_closure(owner: Owner, optimizer: Any, args: Any, kwargs: Any) -> Any:
        owner.told.append("first")
        return args, {**kwargs, "closure": closure}

    def sees_it(owner: Owner, optimizer: Any, args: Any, kwargs: Any) -> None:
        owner.told.append("second" if kwargs["closure"] is closure else "nothing")

    hooks = [
        before_steps(owner, with_closure),
        before_steps(owner, sees_it),
        after_steps(owner, lambda owner, *unused: owner.told.append("after")),
    ]
    optimizer.step()
    assert owner.told == ["first", "second", "closure", "after"]
    for hook in hooks:
        hook.remove()
        hook.remove()
    optimizer.step()
    assert owner.told == ["first", "second", "closure", "after"]


def test_those_that_are_over_are_let_go() -> None:
    gc.collect()
    owner, gone = Owner(), Owner()
    hook = before_steps(owner, lambda *unused: None)
    others = len(step_hooks._before) + len(step_hooks._after) - 1
    after_steps(gone, lambda *unused: None)
    del gone
    hook.remove()
    assert len(step_hooks._before) + len(step_hooks._after) <= others


def test_pytorch_is_told_once() -> None:
    """Models may come and go: PyTorch's own dictionaries stay as they are."""
    registries = [HOOKS._global_optimizer_pre_hooks, HOOKS._global_optimizer_post_hooks]
    before = [dict(registry) for registry in registries]
    memscale.detach(memscale.wrap(nn.Linear(3, 3), CONFIGS["everything"], torch.ones(2, 3)))
    assert [dict(registry) for registry in registries] == before


def test_a_step_that_is_compiled() -> None:
    """The compiler cannot follow what is asked of an optimizer, and need not."""
    models = [memscale.wrap(nn.Linear(3, 3), CONFIGS["everything"], torch.ones(2, 3)) for _ in range(2)]
    optimizer = stepping()
    step = torch.compile(optimizer.step, backend="eager")
    (weight,) = optimizer.param_groups[0]["params"]
    told: list[Any] = []
    hook = after_steps(models[0], lambda owner, optimizer, *unused: told.append(optimizer))
    step()
    memscale.detach(models.pop())
    step()
    assert torch.allclose(weight, torch.tensor(0.8)) and told == [optimizer, optimizer]
    hook.remove()
