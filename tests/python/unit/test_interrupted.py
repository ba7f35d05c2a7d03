# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, signals' handlers and errors in the middle: nothing is left half done, and no byte is another's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from away_samples import CUT, equal, opened, parameters, step
from backward_step_samples import stepped
from gradient_samples import loss_of as loss
from gradient_samples import net
from memscale import Config
from memscale.core import model_state
from memscale.offload.engine import why_not as why_no_engine
from memscale.optim import away, backward_step
from memscale.optim.uninterrupted import uninterrupted
from memscale.weights import blocks
from memscale.weights.blocks import HostBlocks
from memscale.weights.saves import can_save
from memscale.weights.unit import Unit, Weight
from weight_samples import Stack, built, loss_of, same, streamed, trained

TIMEOUT = 60
streams = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")
offloads = pytest.mark.skipif(why_no_engine(torch.device("cpu")) != "", reason="no offload here")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# ---- streamed weights ----------------------------------------------------------------------------------


@streams
def test_a_block_is_not_given_away_while_it_is_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C falls into the wait for a block, mostly: that is where the time goes."""
    read, give = blocks._read, HostBlocks.give
    begins, ended = threading.Event(), threading.Event()
    given_early: list[int] = []

    def slow(home: Any, block: list[Tensor]) -> None:
        if armed and not begins.is_set():
            address = block[0].data_ptr()
            begins.set()
            assert go_on.wait(TIMEOUT)
            read(home, block)
            filled.append(address)
            ended.set()
        else:
            read(home, block)

    def watched(self: HostBlocks, unit: Unit, memory: Tensor) -> None:
        if begins.is_set() and not ended.is_set():
            given_early.append(memory.data_ptr())
        give(self, unit, memory)

    def disturb() -> None:
        assert begins.wait(TIMEOUT)
        threading.Event().wait(0.2)  # until the main thread waits
        interrupt()
        threading.Event().wait(0.2)
        go_on.set()

    armed, go_on, filled = False, threading.Event(), list[int]()
    monkeypatch.setattr(blocks, "_read", slow)
    monkeypatch.setattr(HostBlocks, "give", watched)
    models = built(Stack), built(Stack)
    with streamed(models[0]):
        armed = True
        disturber = threading.Thread(target=disturb)
        disturber.start()
        with pytest.raises(KeyboardInterrupt):
            loss_of(models[0], 0).backward()
        disturber.join(TIMEOUT)
        assert filled and not given_early
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


@streams
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", [1, 2])
def test_weights_go_home_whose_use_did_not_begin(
    kind: type[BaseException], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, calls = Unit._come, [0]

    def failing(self: Unit, weight: Weight) -> None:
        calls[0] += 1
        if calls[0] == which:
            raise kind
        come(self, weight)

    models = built(Stack), built(Stack)
    with streamed(models[0]):
        monkeypatch.setattr(Unit, "_come", failing)
        with pytest.raises(kind):
            loss_of(models[0], 0).backward()
        monkeypatch.setattr(Unit, "_come", come)
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


@streams
def test_a_block_that_nobody_could_begin_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = HostBlocks.start, [0]

    def failing(self: HostBlocks, unit: Unit) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("can't start new thread")
        start(self, unit)

    monkeypatch.setattr(HostBlocks, "start", failing)
    models = built(Stack), built(Stack)
    with streamed(models[0]):
        with pytest.raises(RuntimeError, match="new thread"):
            loss_of(models[0], 0).backward()
        models[0].zero_grad()
        assert same(trained(models[0]), trained(models[1]))


# ---- planning ------------------------------------------------------------------------------------------


def _fail(*unused: Any) -> None:
    raise ValueError("a list has changed meanwhile")


def _interrupted(*unused: Any) -> None:
    interrupt()


@pytest.mark.parametrize(("what", "error"), [(_fail, ValueError), (_interrupted, KeyboardInterrupt)])
def test_a_model_is_put_back_whatever_happens_meanwhile(
    what: Callable[..., None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.kept = nn.Linear(8, 8), 0, torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.dropout(self.inner(x), 0.1, True)

    model = Counting()
    model.inner.weight.grad = gradient = torch.ones(8, 8)
    own, kept, generator = dict(model.named_parameters()), model.kept, torch.get_rng_state()
    monkeypatch.setattr(model_state, "_keep_lasting", what)
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
    monkeypatch.setattr("memscale.optim.away_state.LEAST_BYTES", 1)
    saves, go_on, original = threading.Event(), threading.Event(), away.copied

    def slow(*args: Any) -> Any:
        saves.set()
        assert go_on.wait(TIMEOUT)
        return original(*args)

    found = []
    for sent in (False, True):
        values = parameters()
        optimizer = CUT["adamw"](values)
        assert not sent or away.send(optimizer, opened(), 1 << 12) == ""
        step(values, optimizer)
        if sent:
            monkeypatch.setattr(away, "copied", slow)
            saver = threading.Thread(target=optimizer.state_dict)
            saver.start()
            assert saves.wait(TIMEOUT)
            stepper = threading.Thread(target=step, args=(values, optimizer))
            stepper.start()
            stepper.join(0.2)
            assert stepper.is_alive()
            go_on.set()
            saver.join(TIMEOUT)
            stepper.join(TIMEOUT)
            monkeypatch.setattr(away, "copied", original)
        else:
            step(values, optimizer)
        step(values, optimizer)
        found.append((values, optimizer.state_dict()["state"]))
    assert equal(found[0], found[1])


def test_a_signals_handler_within_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever for what it has interrupted."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    original = backward_step.step_one
    errors: list[BaseException] = []

    def disturbed(*args: Any) -> None:
        if not errors:
            try:
                technique.steps.give_up()  # type: ignore[union-attr]
            except RuntimeError as error:
                errors.append(error)
        original(*args)

    monkeypatch.setattr(backward_step, "step_one", disturbed)
    with stepped(model, optimizer) as technique:
        loss(model, 0).backward()
        optimizer.step()
    assert "a signal's handler" in str(errors[0])
