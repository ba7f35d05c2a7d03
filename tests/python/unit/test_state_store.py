# SPDX-License-Identifier: Apache-2.0
"""State that is offloaded while memory is short, and with numbers that are none."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside
from memscale.optim import give_back, take_over
from memscale.optim.offload.attach import send, take_back
from memscale.optim.offload.store import Run, StateStore
from offloaded_state_samples import CUT, PIECE, equal, opened, pair, parameters, step
from zoo.training import memory_changes


def states(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict()["state"])


def weights(values: list[nn.Parameter]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


@pytest.mark.parametrize("moments", [None, "code8"])
def test_no_memory_for_a_piece(moments: str | None) -> None:
    """Each parameter is stepped or not, with its state; or the optimizer says that one is of no use."""
    failed = torn = 0

    def stepped(fails_at: int) -> tuple[list[Tensor], Any]:
        """Weights and states after two steps; the second one's allocation of that number fails."""
        nonlocal failed
        values = parameters()
        optimizer = CUT["adamw"](values)
        if moments is not None:
            assert take_over(optimizer, moments) == ""
        assert send(optimizer, opened(), PIECE) == ""
        step(values, optimizer, 1)
        calls = 0

        def short(*unused: Any) -> None:
            nonlocal calls, failed
            calls += 1
            if calls == fails_at:
                failed += 1
                raise MemoryError

        try:
            with beside({Run.buffer: short}):
                step(values, optimizer, 1, seed=2)
        except MemoryError:
            assert calls == fails_at
        return weights(values), states(optimizer)

    after = stepped(0)
    values = parameters()
    optimizer = CUT["adamw"](values)
    if moments is not None:
        assert take_over(optimizer, moments) == ""
    step(values, optimizer, 1)
    before = weights(values), states(optimizer)
    for fails_at in range(1, 60, 4):
        try:
            found = stepped(fails_at)
        except RuntimeError as error:
            assert "from a checkpoint" in str(error)
            torn += 1
            continue
        for index, value in enumerate(found[0]):
            one = before if torch.equal(value, before[0][index]) else after
            assert torch.equal(value, one[0][index]) and equal(found[1][index], one[1][index])
    assert failed > torn > 0


def test_a_piece_goes_before_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts the pieces in use and the parts of gradients, and not what a piece of before had."""
    seen: list[bool] = []

    def watched(self: StateStore, jobs: Any) -> None:
        run = Run(self, [])

        def seeing(call: Any) -> Any:
            def seen_call(*arguments: Any) -> Any:
                seen.append(run.free is None)
                return call(*arguments)

            return seen_call

        run.jobs = [job._replace(work=seeing(job.work), begin=seeing(job.begin)) for job in jobs]
        run.run()

    values = parameters()
    optimizer = CUT["adamw"](values)
    assert send(optimizer, opened(), PIECE) == ""
    step(values, optimizer, 1)
    monkeypatch.setattr(StateStore, "run", watched)
    step(values, optimizer, 2)
    assert len(seen) > 8 and all(seen)


def test_state_comes_back_one_parameter_after_the_other() -> None:
    """It does so inside a training step, if a new plan has it stay."""
    values = [nn.Parameter(torch.ones(50_000)) for _ in range(8)]
    size = 2 * values[0].nbytes
    optimizer = torch.optim.AdamW(values)
    assert send(optimizer, opened(), PIECE, resident=values) == ""
    alive: dict[int, int] = {}

    def highest(work: Callable[[], object]) -> int:
        return max(itertools.accumulate(memory_changes(work, alive)))

    highest(lambda: step(values, optimizer, 2))
    assert highest(lambda: take_back(optimizer)) < 2 * size
    highest(lambda: (take_over(optimizer, "code8"), step(values, optimizer, 1)))
    grown = 8 * (size - 2 * 50_000)
    assert highest(lambda: give_back(optimizer)) < grown + 2 * size


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """They go where PyTorch lets them go, and through a checkpoint."""
    both, optimizers = pair(CUT["adamw"])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 1)
        for value, bad in zip(values, (float("nan"), 0.0, float("inf"), 1e-45, 3e38), strict=True):
            assert value.grad is not None
            value.grad[(-1,) * value.dim()] = bad
        optimizer.step()
        memscale.save(optimizer.state_dict(), tmp_path / "state")
        optimizer.load_state_dict(torch.load(tmp_path / "state", mmap=True))
        step(values, optimizer, 1, seed=2)
    bits = [[value.detach().contiguous().view(torch.int32) for value in values] for values in both]
    assert equal(*bits)
    assert not bool(both[0][0].isfinite().all())
    moments = [
        [entry["exp_avg"].contiguous().view(torch.int32) for _, entry in sorted(states(optimizer).items())]
        for optimizer in optimizers
    ]
    assert equal(*moments)


@pytest.mark.parametrize("own", [False, True])
def test_another_default_device(own: bool) -> None:
    """State is on the CPU, wherever new tensors are by default."""
    both = parameters(), parameters()
    for index, values in enumerate(both):
        optimizer = CUT["sgd"](values)
        if own:
            take_over(optimizer, "fp32")
        step(values, optimizer, 1)
        for value in values:
            value.grad = torch.ones_like(value)
        if index == 1:
            with torch.device("meta"):
                assert send(optimizer, opened(), PIECE) == ""
                optimizer.step()
                take_back(optimizer)
        else:
            optimizer.step()
    assert equal(weights(both[0]), weights(both[1]))
