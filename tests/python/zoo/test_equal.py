# SPDX-License-Identifier: Apache-2.0
"""Loss, every gradient, every parameter and every buffer equal plain PyTorch, over five steps.

As `wrap` plans it, with everything on the way there. The techniques themselves, each and in pairs, in more
models and more ways to train, are the matrix in tests/python/matrix.
"""

from __future__ import annotations

import pytest

from zoo.models import LIBRARY, MAIN, Case
from zoo.models import case as find
from zoo.training import SMALLEST, Loop, assert_checkpointed, assert_same, reference, train

ACCUMULATING = Loop(steps=3, accumulate=2)
AUTOCAST = Loop(steps=3, autocast=True)
FROZEN = Loop(steps=3, freeze=True)


def some(*names: str) -> list[Case]:
    return [find(name) for name in names]


def check(case: Case, loop: Loop, sample: bool) -> None:
    planned = train(case, loop, SMALLEST, sample)
    assert_same(reference(case, loop), planned)
    if case.checkpoints:
        assert_checkpointed(planned)
    assert not planned.plan.fits
    if case.profile is not None:
        assert planned.plan.profile == case.profile, planned.plan.notes


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_five_steps(case: Case, sample: bool) -> None:
    check(case, Loop(), sample)


@pytest.mark.long
@pytest.mark.parametrize("case", LIBRARY, ids=lambda case: case.name)
def test_five_steps_of_more_models(case: Case) -> None:
    check(case, Loop(), sample=False)


@pytest.mark.parametrize("case", some("gpt2", "convnet"), ids=lambda case: case.name)
def test_bf16_autocast(case: Case) -> None:
    check(case, AUTOCAST, sample=False)


@pytest.mark.parametrize("case", some("gpt2", "convnet"), ids=lambda case: case.name)
def test_gradient_accumulation(case: Case) -> None:
    check(case, ACCUMULATING, sample=False)


@pytest.mark.parametrize("case", some("gpt2", "bert", "llama", "convnet"), ids=lambda case: case.name)
def test_a_frozen_part(case: Case) -> None:
    check(case, FROZEN, sample=True)


@pytest.mark.parametrize("case", some("gpt2", "convnet"), ids=lambda case: case.name)
def test_everything_at_once(case: Case) -> None:
    check(case, Loop(steps=3, autocast=True, accumulate=2, freeze=True), sample=False)
