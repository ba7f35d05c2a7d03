# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a file when something goes wrong: nothing is lost silently, no step is done by half."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calls import beside, failing
from memscale.errors import MemScaleError
from memscale.optim.alone import Alone
from memscale.optim.offload import store
from memscale.optim.offload.attach import keep_resident, send, take_back
from memscale.optim.offload.pieces import OFFLOADED
from memscale.optim.offload.store import StateStore
from offloaded_state_samples import CUT, PIECE, equal, opened, pair, parameters, step


def test_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """What has no room stays in memory, and is said once."""
    both, optimizers = pair(CUT["adamw"], file_bytes=256 << 10)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 4)
    assert equal(*both)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))
    kept = [
        piece
        for entry in optimizers[1].state.values()
        if OFFLOADED in entry
        for piece in entry[OFFLOADED].pieces
    ]
    assert any(isinstance(piece, Tensor) for piece in kept)
    assert caplog.text.count("some of it stays in memory") == 1


def test_writing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that could not be written stays in its buffer; the next step tries again."""
    both, optimizers = pair(CUT["adamw"])
    step(both[0], optimizers[0], 4)
    step(both[1], optimizers[1], 2)
    generator = torch.Generator().manual_seed(1)
    for value in both[1] * 2:
        torch.randn(value.shape, generator=generator)

    class Failing:
        def __init__(self, block: Any) -> None:
            self.block = block

        def settle(self) -> None:
            self.block.drop()
            raise OSError(5, "on purpose")

    put, count = store.StateStore.put, 0

    def sometimes(self: store.StateStore, piece: Tensor) -> Any:
        nonlocal count
        count += 1
        return Failing(put(self, piece)) if count % 3 == 0 else put(self, piece)

    monkeypatch.setattr(store.StateStore, "put", sometimes)
    for attempt in range(2):
        if attempt == 1:
            monkeypatch.undo()
        for value in both[1]:
            value.grad = torch.empty_like(value).copy_(torch.randn(value.shape, generator=generator))
        optimizers[1].step()
    assert equal(*both)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_reading_fails() -> None:
    """The step says so; what was stepped in part is of no use, and says so from then on."""
    values = parameters()
    optimizer = CUT["adamw"](values)
    assert send(optimizer, opened(), PIECE) == ""
    step(values, optimizer, 1)
    offloaded = optimizer.state[values[3]][OFFLOADED]
    offloaded.pieces[2].drop()
    before = [value.detach().clone() for value in values]
    with pytest.raises(RuntimeError, match="dropped"):
        step(values, optimizer, 1)
    changed = [not torch.equal(one, other) for one, other in zip(before, values, strict=True)]
    assert changed == [True, False, True, True, False]
    with pytest.raises(RuntimeError, match="load the model and the optimizer from a checkpoint"):
        step(values, optimizer, 1)
    with pytest.raises(RuntimeError, match="checkpoint"):
        optimizer.state_dict()


@pytest.mark.parametrize(("stepped", "fails_at"), [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_an_exception_in_the_step(stepped: int, fails_at: int) -> None:
    """In the first piece, it is as PyTorch's; in a later one, the parameter is known to be of no use."""
    values = parameters()
    optimizer = CUT["adamw"](values)
    assert send(optimizer, opened(), PIECE) == ""
    step(values, optimizer, stepped)
    with beside({Alone.step: failing(ArithmeticError, fails_at)}), pytest.raises(ArithmeticError):
        step(values, optimizer, 1, seed=2)
    if fails_at == 1:
        step(values, optimizer, 1, seed=3)
    else:
        with pytest.raises(RuntimeError, match="checkpoint"):
            step(values, optimizer, 1, seed=3)


ASKED: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "state_dict() or a copy": lambda optimizer: optimizer.state_dict(),
    "or a copy": copy.deepcopy,
    "a move": take_back,
    "a move of": lambda optimizer: keep_resident(optimizer, optimizer.param_groups[0]["params"]),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_signals_handler_that_saves_within_a_step(what: str) -> None:
    """It is told that a step runs, and to save later; the step goes on, and nothing is lost."""
    both, optimizers = pair(CUT["adamw"])
    step(both[0], optimizers[0], 1)
    calls, errors = 0, list[BaseException]()

    def handler(*unused: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            ASKED[what](optimizers[1])
        errors.append(caught.value)

    def disturbed(*unused: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of a parameter
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with beside({Alone.step: disturbed}):
            step(both[1], optimizers[1], 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert what in str(errors[0]) and "in the middle of a step of the same optimizer" in str(errors[0])
    assert "Nothing is lost" in str(errors[0]) and "checkpoint" not in str(errors[0])
    assert equal(*both)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_a_step_within_a_save_is_refused() -> None:
    """It would find the copy."""
    both, optimizers = pair(CUT["adamw"])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 1)
    hook = optimizers[1].register_state_dict_pre_hook(lambda optimizer: optimizer.step())
    with pytest.raises(RuntimeError, match=r"a step was asked for in the middle of state_dict\(\)"):
        optimizers[1].state_dict()
    hook.remove()
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 1, seed=2)
    assert equal(*both)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_copies_that_fail() -> None:
    optimizer = CUT["adamw"](parameters())
    assert send(optimizer, opened({"fault_fail_ppm": 300_000}), PIECE) == ""
    with pytest.raises((OSError, MemScaleError, RuntimeError)):
        for seed in range(20):
            step(optimizer.param_groups[0]["params"], optimizer, 1, seed)


def test_ctrl_c_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    both, optimizers = pair(CUT["adamw"])
    step(both[0], optimizers[0], 2)
    step(both[1], optimizers[1], 1)
    generator = torch.Generator().manual_seed(1)
    for value in both[1]:
        torch.randn(value.shape, generator=generator)
    for value in both[1]:
        value.grad = torch.empty_like(value).copy_(torch.randn(value.shape, generator=generator))
    asked: list[bool] = []

    def interrupted(*unused: Any) -> None:
        if not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with beside({StateStore.put: interrupted}), pytest.raises(KeyboardInterrupt):
        optimizers[1].step()
    assert signal.getsignal(signal.SIGINT) is before
    large = [index for index, value in enumerate(both[1]) if value.numel() > 77]
    for index in large:  # the small one's turn would have come afterwards
        assert torch.equal(both[0][index], both[1][index])
        assert equal(optimizers[0].state_dict()["state"][index], optimizers[1].state_dict()["state"][index])


def test_a_child_of_fork_is_told_and_the_parent_goes_on() -> None:
    both, optimizers = pair(CUT["adamw"])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 1)
    child = os.fork()
    if child == 0:
        try:
            step(both[1], optimizers[1], 1)
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 1, seed=2)
    assert equal(*both)


def test_a_folder_that_there_is_not() -> None:
    optimizer = CUT["adamw"](parameters())
    with pytest.raises(OSError):
        send(optimizer, opened(directory="/nowhere"), PIECE)
    assert type(optimizer) is torch.optim.AdamW


def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    values = parameters()
    optimizer = CUT["adamw"](values)
    assert send(optimizer, opened(directory=str(tmp_path)), PIECE) == ""
    step(values, optimizer, 1)
    assert not list(tmp_path.iterdir())
    take_back(optimizer)


def test_ctrl_c_is_not_lost_when_the_step_fails() -> None:
    values = parameters()
    optimizer = CUT["adamw"](values)
    assert send(optimizer, opened(), PIECE) == ""

    def fails(*unused: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("in the step")

    before = signal.getsignal(signal.SIGINT)
    with beside({Alone.step: fails}), pytest.raises(KeyboardInterrupt) as caught:
        step(values, optimizer, 1)
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is before
