# SPDX-License-Identifier: Apache-2.0
"""User errors are the user's: their own exception, from their own line, with its cause. Training goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from matrix.architectures import Architecture
from matrix.techniques import TECHNIQUES, Technique, forced
from memscale.errors import MemScaleError
from zoo.blocks import Block, inputs
from zoo.models import Case, mean_square
from zoo.training import SMALLEST, seed


class Wrong(ValueError):
    """The user's own."""


class Failing(Block):
    """Fails at a call whose number is given, in a function that is called by another one."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if tallies.of("fails at"):
            tallies.add("calls")  # which a recompute does not put back
            if tallies.of("calls") == tallies.of("fails at"):
                self.look(y)
        return torch.tanh(y)

    def look(self, y: Tensor) -> None:
        try:
            {}["no such key"]
        except KeyError as cause:
            raise Wrong(f"of shape {tuple(y.shape)}") from cause  # the line that the traceback must end at


def model() -> nn.Module:
    return nn.Sequential(Block(0.1), Failing(0.1), Failing(0.1), Block(0.1)).train()


ROW = Architecture("fails", Case("fails", model, inputs, mean_square), chains=True)

FIRST, RECOMPUTE = 2, 3
"""Calls that fail: the second block's, in forward; and the first one's that runs a second time."""


@pytest.fixture(autouse=True)
def no_failure() -> Iterator[None]:
    tallies.clear()
    yield
    tallies.clear()


@contextmanager
def fails_at(call: int) -> Iterator[None]:
    tallies.add("fails at", call)
    try:
        yield
    finally:
        tallies.clear()


def step(subject: nn.Module, number: int = 0) -> list[Tensor]:
    """Gradients of one step."""
    seed(number)
    subject.zero_grad()
    mean_square(subject(*inputs(number))).backward()
    return [parameter.grad.clone() for parameter in subject.parameters() if parameter.grad is not None]


def assert_own(error: Wrong) -> None:
    """It ends at the user's line, has the user's cause and nothing of MemScale's in its chain."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.name == "look" and last.line is not None and "raise Wrong" in last.line
    assert isinstance(error.__cause__, KeyError) and error.__suppress_context__
    assert str(error) == "of shape (256, 32)"
    link: BaseException | None = error
    while link is not None:
        assert not isinstance(link, MemScaleError)
        link = link.__cause__ or link.__context__


def check(subject: nn.Module, moment: int, run: Callable[[nn.Module], Any] = step) -> None:
    """A step that fails, between two that do not."""
    seed()
    plain = model()
    plain.load_state_dict(subject.state_dict())
    expected = step(plain), step(plain, 2)
    assert all(map(torch.equal, step(subject), expected[0]))
    generator = torch.get_rng_state() if moment == RECOMPUTE else None
    with fails_at(moment), pytest.raises(Wrong) as caught:
        seed(0) if moment == RECOMPUTE else None
        run(subject)
    assert_own(caught.value)
    assert generator is None or torch.equal(generator, torch.get_rng_state())
    assert all(map(torch.equal, step(subject, 2), expected[1]))


@pytest.mark.parametrize("moment", [FIRST, RECOMPUTE], ids=["forward", "recompute"])
@pytest.mark.parametrize("technique", [item for item in TECHNIQUES if item.twice], ids=lambda item: item.name)
def test_from_inside_a_region(technique: Technique, moment: int) -> None:
    seed()
    subject = model()
    with forced(subject, ROW, (technique,)):
        check(subject, moment)


@pytest.mark.parametrize("moment", [FIRST, RECOMPUTE], ids=["forward", "recompute"])
def test_from_a_wrapped_model(moment: int) -> None:
    seed()
    subject = memscale.wrap(model(), SMALLEST)
    check(subject, moment)
    memscale.detach(subject)


def test_on_the_very_first_batch() -> None:
    """The trace of the plan meets it first; what surfaces is the step's own, without a trace of that."""
    seed()
    subject = memscale.wrap(model(), SMALLEST)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Wrong) as caught:
        patch.setattr(Failing, "forward", lambda self, x: self.look(x))
        subject(*inputs(0))
    assert_own(caught.value)
    assert len(step(subject)) > 0 and memscale.executor_of(subject).plan is not None
    memscale.detach(subject)


def test_a_wrong_argument_names_the_forward_that_does_not_take_it() -> None:
    subject = memscale.wrap(model(), SMALLEST, inputs(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'") as caught:
        subject(*inputs(0), labels=1)
    assert caught.value.__context__ is None
    block = subject[1]
    with pytest.raises(TypeError, match="forward"):
        block()
    assert all(map(torch.isfinite, (value.sum() for value in step(subject))))
    memscale.detach(subject)


def test_out_of_memory_stays_out_of_memory() -> None:
    class Full(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if tallies.of("fails at"):
                raise torch.cuda.OutOfMemoryError("the card is full")
            return y

    seed()
    row = Architecture("full", Case("full", lambda: nn.Sequential(Full(), Full()), inputs, mean_square))
    subject = nn.Sequential(Full(), Full())
    with forced(subject, row, (TECHNIQUES[0],)):
        step(subject)
        with fails_at(1), pytest.raises(torch.cuda.OutOfMemoryError, match="the card is full"):
            step(subject)
        step(subject)
