# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, signals' handlers and errors in the middle: nothing is left half done, and no byte is another's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from backward_step_samples import stepped
from calls import beside, failing
from gradient_samples import loss_of as loss
from gradient_samples import net
from memscale import Config
from memscale.offload.engine import why_not as why_no_engine
from memscale.optim.backward_step import step_one
from memscale.optim.offload import attach
from memscale.optim.offload.state import copied
from memscale.optim.offload.step import step_group
from memscale.optim.patched import give_back, take_over
from memscale.uninterrupted import uninterrupted
from memscale.weights.backing import FileStore
from memscale.weights.blocks import HostBlocks
from memscale.weights.saves import can_save
from memscale.weights.stepping import Steps
from memscale.weights.unit import Place, Unit, Weight
from offloaded_state_samples import CUT, WHOLE, equal, opened, parameters, step, with_small_ones
from weight_samples import Stack, built, loss_of, same, streamed, trained

TIMEOUT = 60
streams = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")
offloads = pytest.mark.skipif(why_no_engine(torch.device("cpu")) != "", reason="no offload here")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# ---- streamed weights ----------------------------------------------------------------------------------


@streams
def test_a_block_is_not_given_away_while_it_is_being_filled() -> None:
    """Ctrl-C falls into the wait for a block, mostly: that is where the time goes."""
    begins, interrupted, go_on, ended = (threading.Event() for _ in range(4))
    filled, given_early = list[int](), list[int]()

    class Watching(HostBlocks):
        def give(self, unit: Unit, memory: Tensor) -> None:
            if begins.is_set() and not ended.is_set():
                given_early.append(memory.data_ptr())
            super().give(unit, memory)

        def end(self, unit: Unit) -> None:
            if interrupted.is_set() and unit.pending is not None:
                go_on.set()  # it is waited for
            super().end(unit)

    def slow(*unused: Any) -> None:
        if not begins.is_set():
            begins.set()
            assert go_on.wait(TIMEOUT)

    def read(result: None, store: FileStore, address: int, *unused: int) -> None:
        if not ended.is_set():
            filled.append(address)
            ended.set()

    def waiting(*unused: Any) -> None:  # in the thread that waits, or Ctrl-C might come before the wait
        if threading.current_thread() is threading.main_thread():
            assert begins.wait(TIMEOUT)
            interrupted.set()
            interrupt()

    models = built(Stack), built(Stack)
    with streamed(models[0], blocks=Watching):
        calls = {FileStore.read: slow, Future.result: waiting}
        with beside(calls, after={FileStore.read: read}), pytest.raises(KeyboardInterrupt):
            loss_of(models[0], 0).backward()
        go_on.set()  # if nobody has waited
        assert ended.wait(TIMEOUT)
        assert filled and not given_early
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


@streams
@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", [1, 2])
def test_weights_return_to_their_store_if_a_use_did_not_begin(kind: type[BaseException], which: int) -> None:
    models = built(Stack), built(Stack)
    with streamed(models[0]) as stream:
        with beside({Weight.view: failing(kind, which)}), pytest.raises(kind):
            loss_of(models[0], 0).backward()
        assert not any(weight.in_block for unit in stream.units.values() for weight in unit.weights)
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


@streams
def test_a_block_that_nobody_could_begin_to_fill() -> None:
    fails = failing(RuntimeError("can't start new thread"), at=2)

    class Failing(HostBlocks):
        def start(self, unit: Unit) -> None:
            fails()
            super().start(unit)

    models = built(Stack), built(Stack)
    with streamed(models[0], blocks=Failing):
        with pytest.raises(RuntimeError, match="new thread"):
            loss_of(models[0], 0).backward()
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


# ---- planning ------------------------------------------------------------------------------------------


def _fail() -> None:
    raise ValueError("a list has changed meanwhile")


@pytest.mark.parametrize(("what", "error"), [(_fail, ValueError), (interrupt, KeyboardInterrupt)])
def test_a_model_is_put_back_whatever_happens_meanwhile(
    what: Callable[..., None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.kept = nn.Linear(8, 8), 0, torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            tallies.add("forwards")
            return torch.dropout(self.inner(x), 0.1, True)

    model = Counting()
    model.inner.weight.grad = gradient = torch.ones(8, 8)
    own, kept, generator = dict(model.named_parameters()), model.kept, torch.get_rng_state()
    get_state = np.random.get_state

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        if tallies.of("forwards"):
            what()
        return get_state(*args, **kwargs)

    tallies.clear()
    monkeypatch.setattr(np.random, "get_state", disturbed)  # which what is put back is looked at with
    with pytest.raises(error):
        memscale.plan(
            model, config=Config(memory_budget=1, enable_logging=False), sample_input=torch.ones(2, 8)
        )
    assert all(value is own[name] for name, value in model.named_parameters())
    assert model.kept is kept and model.calls == 0 and model.inner.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), generator)


def test_ctrl_c_waits_for_the_end() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        done.append(1)
        with uninterrupted():
            interrupt()
            done.append(2)
        done.append(3)
    assert done == [1, 2, 3]


# ---- optimizers ----------------------------------------------------------------------------------------


@offloads
def test_a_step_waits_for_a_checkpoint_that_another_thread_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has another form while it is saved: a step then would lose what it does."""
    with_small_ones(monkeypatch)
    saves, go_on = threading.Event(), threading.Event()

    def slow(*unused: Any) -> None:
        saves.set()
        assert go_on.wait(TIMEOUT)

    found = []
    for sent in (False, True):
        values = parameters()
        optimizer = CUT["adamw"](values)
        assert not sent or attach.send(optimizer, opened(), 1 << 12) == ""
        step(values, optimizer)
        if sent:
            saver = threading.Thread(target=optimizer.state_dict)
            with beside({copied: slow}):
                saver.start()
            assert saves.wait(TIMEOUT)
            stepper = threading.Thread(target=step, args=(values, optimizer))
            stepper.start()
            stepper.join(0.2)
            assert stepper.is_alive()
            go_on.set()
            saver.join(TIMEOUT)
            stepper.join(TIMEOUT)
        else:
            step(values, optimizer)
        step(values, optimizer)
        found.append((values, optimizer.state_dict()["state"]))
    assert equal(found[0], found[1])


def in_two_groups(kind: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """The second parameter of the first group is so small that its state stays."""
    values = parameters()
    groups = [{"params": values[:2]}, {"params": values[2:]}]
    return values, {**CUT, **WHOLE}[kind](groups)


def saved_within(optimizer: torch.optim.Optimizer, work: Callable[[], object]) -> tuple[bool, Any]:
    """Has another thread ask for the state dict when what is offloaded of a step's first group has been
    stepped.

    Returns:
        Whether it has to wait then, and what it gets.
    """
    found: list[Any] = []
    waits: list[bool] = []
    saver = threading.Thread(target=lambda: found.append(optimizer.state_dict()))

    def disturbed(*unused: Any) -> None:
        if not waits:
            saver.start()
            saver.join(0.2)
            waits.append(saver.is_alive())

    with beside(after={attach.step_offloaded: disturbed}):
        work()
    saver.join(TIMEOUT)
    return waits[0], found[0]


@offloads
@pytest.mark.parametrize("scheduled", ["no", "before", "afterwards"])
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_a_checkpoint_waits_for_the_end_of_a_step(kind: str, scheduled: str) -> None:
    """Not only for a group's, or it has half a step; nor only for what is stepped in pieces."""
    values, optimizer = in_two_groups(kind)
    for when in ("before", "afterwards"):
        if when == scheduled:  # whose wrapper holds the step that it finds
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
        if when == "before":
            assert attach.send(optimizer, opened(), 1 << 12) == ""
    step(values, optimizer)
    waits, saved = saved_within(optimizer, lambda: step(values, optimizer, 1, seed=2))
    assert waits and equal(saved, optimizer.state_dict())


@offloads
def test_a_checkpoint_waits_for_a_group_where_the_class_is_asked_to_step() -> None:
    """By somebody who has had its step from before; what the others of the group have is made meanwhile."""
    values, optimizer = in_two_groups("adamw")
    assert attach.send(optimizer, opened(), 1 << 12) == ""
    for value in values:
        value.grad = torch.ones_like(value)
    waits, _ = saved_within(optimizer, lambda: torch.optim.AdamW.step(optimizer))  # type: ignore[arg-type]
    assert waits
    assert all(float(entry["step"]) == 1 for entry in optimizer.state_dict()["state"].values())


@offloads
def test_what_is_saved_only_the_saving_thread_sees() -> None:
    """A step that works on it in another thread, past ours that waits, would be lost."""
    values, optimizer = in_two_groups("adamw")
    assert attach.send(optimizer, opened(), 1 << 12) == ""
    step(values, optimizer)
    before, saves, go_on = dict(optimizer.state), threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def hook(given: torch.optim.Optimizer, *unused: Any) -> None:
        assert given is optimizer
        seen.append({id(entry) for entry in given.state.values()})
        saves.set()
        assert go_on.wait(TIMEOUT)

    optimizer.register_state_dict_pre_hook(hook)
    optimizer.register_state_dict_post_hook(hook)
    saver = threading.Thread(target=optimizer.state_dict)
    saver.start()
    assert saves.wait(TIMEOUT)
    assert all(optimizer.state[value] is entry for value, entry in before.items())
    optimizer.state[values[1]] = {"instead": 1}
    go_on.set()
    saver.join(TIMEOUT)
    assert optimizer.state[values[1]] == {"instead": 1}
    assert len(seen) == 2 and not any(set(map(id, before.values())) & found for found in seen)


@offloads
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_hooks_and_closures_of_a_step_may_save(kind: str) -> None:
    """Themselves, or by a thread that they wait for: what they find is between two steps."""
    values, optimizer = in_two_groups(kind)
    assert attach.send(optimizer, opened(), 1 << 12) == ""
    step(values, optimizer)
    found: list[Any] = []

    def save(*unused: Any) -> None:
        found.append(optimizer.state_dict())
        saver = threading.Thread(target=lambda: found.append(optimizer.state_dict()), daemon=True)
        saver.start()
        saver.join(TIMEOUT)
        assert not saver.is_alive()

    before = optimizer.state_dict()
    optimizer.register_step_pre_hook(save)
    optimizer.register_step_post_hook(save)
    optimizer.step(save)  # type: ignore[arg-type]
    assert [equal(each, before) for each in found] == [True] * 4 + [False] * 2
    assert all(equal(each, optimizer.state_dict()) for each in found[4:])


@offloads
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_nobody_waits_for_a_step_that_has_failed(kind: str) -> None:
    values, optimizer = in_two_groups(kind)
    assert attach.send(optimizer, opened(), 1 << 12) == ""
    step(values, optimizer)
    with beside({step_group: failing(MemoryError, at=2)}), pytest.raises(MemoryError):
        optimizer.step()
    found: list[Any] = []
    saver = threading.Thread(target=lambda: found.append(optimizer.state_dict()), daemon=True)
    saver.start()
    saver.join(TIMEOUT)
    assert found


@offloads
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_a_step_that_somebody_has_kept(kind: str) -> None:
    """Taken from an optimizer while its state was offloaded: it steps as before, and calls hooks once."""
    found = []
    for sent in (False, True):
        values, optimizer = in_two_groups(kind)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *unused, calls=calls: calls.append(1))
        assert not sent or attach.send(optimizer, opened(), 1 << 12) == ""
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
        step(values, optimizer)
        attach.take_back(optimizer)
        step(values, optimizer)
        found.append((values, optimizer.state_dict(), len(calls)))
    assert equal(found[0], found[1])


@offloads
def test_our_offloaded_state_beneath_a_scheduler() -> None:
    """Lion has no `_init_group`: the scheduler's wrapper is led to our step, and then to that one's."""
    found = []
    for sent in (False, True):
        values, optimizer = in_two_groups("lion")
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
        wrapper = optimizer.step
        assert take_over(optimizer) == ""
        assert not sent or attach.send(optimizer, opened(), 1 << 12) == ""
        step(values, optimizer)
        assert (attach.offloaded_bytes(optimizer) > 0) == sent
        attach.take_back(optimizer)
        step(values, optimizer)
        found.append((values, optimizer.state_dict()))
        give_back(optimizer)
        assert optimizer.step is wrapper
    assert equal(found[0], found[1])


class Borrowing(torch.optim.Optimizer):
    """Steps one weight that is used elsewhere than it lies, and may fail when it has."""

    def __init__(self, steps: Steps) -> None:
        self.weight = weight = nn.Parameter(torch.zeros(4))
        super().__init__([weight], {})
        self.backing = weight.data
        self.place = Weight(weight, Place(0, weight.nbytes), self.backing)
        self.unit: Any = SimpleNamespace(
            blocks=SimpleNamespace(end=lambda unit: None, own=lambda unit, place: place.backing.clone())
        )
        self.steps = steps

    @property
    def is_in_backing(self) -> bool:
        return self.weight.data_ptr() == self.backing.data_ptr()

    def borrow(self) -> None:
        if self.is_in_backing:
            self.steps.borrow(self.unit, self.place)

    def step(self, fails: bool = False) -> None:  # type: ignore[override]
        self.borrow()
        self.weight.data.add_(1)
        if fails:
            raise MemoryError


class Lender:
    """As much of a stream as hears of steps."""

    blocks = SimpleNamespace(is_apart=False)

    def let_pages_go(self) -> None:
        """Has none."""


def in_another_thread(call: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(MemoryError):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)


def test_what_a_failed_step_has_borrowed_returns_with_the_next_one() -> None:
    lender: Any = Lender()
    steps = Steps(lender)
    optimizer, other = Borrowing(steps), Borrowing(steps)
    in_another_thread(lambda: optimizer.step(fails=True))
    assert not optimizer.is_in_backing
    other.step()
    in_another_thread(other.step)  # which may have the number of the one that has gone
    assert other.is_in_backing and not optimizer.is_in_backing
    optimizer.step()
    assert optimizer.is_in_backing and optimizer.backing.tolist() == [2] * 4
    steps.close()


def test_another_optimizers_step_takes_nothing_away_in_the_same_thread() -> None:
    lender: Any = Lender()
    steps = Steps(lender)
    optimizer, other = Borrowing(steps), Borrowing(steps)
    with pytest.raises(MemoryError):
        optimizer.step(fails=True)
    other.step()
    assert not optimizer.is_in_backing
    steps.close()  # nobody has stepped it since
    assert optimizer.is_in_backing and optimizer.backing.tolist() == [1] * 4


def test_what_backward_has_borrowed_returns_with_the_step() -> None:
    """A card's backward runs in a thread of its own, and steps parameters there."""
    lender: Any = Lender()
    steps = Steps(lender)
    optimizer = Borrowing(steps)
    in_another_thread(optimizer.borrow)
    assert not optimizer.is_in_backing
    optimizer.step()
    assert optimizer.is_in_backing and optimizer.backing.tolist() == [1] * 4
    steps.close()


def test_a_signals_handler_within_a_step_is_refused() -> None:
    """It would wait for ever for what it has interrupted."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    errors: list[BaseException] = []

    def disturbed(*unused: Any) -> None:
        if not errors:
            try:
                technique.steps.give_up()  # type: ignore[union-attr]
            except RuntimeError as error:
                errors.append(error)

    with stepped(model, optimizer) as technique, beside({step_one: disturbed}):
        loss(model, 0).backward()
        optimizer.step()
    assert "a signal's handler" in str(errors[0])
