# SPDX-License-Identifier: Apache-2.0
"""Models that do what models should not: still equal to plain PyTorch, or left alone by the planner."""

from __future__ import annotations

import pytest
import torch

from zoo.models import Case
from zoo.odd import LAZY, ODD, SPARSE
from zoo.training import SMALLEST, Loop, assert_checkpointed, assert_same, reference, train

THREE = Loop(steps=3)


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_equal(case: Case, sample: bool) -> None:
    planned = train(case, THREE, SMALLEST, sample)
    assert_same(reference(case, THREE), planned)
    if case.checkpoints:
        assert_checkpointed(planned)
    if case.profile is not None:
        assert planned.plan.profile == case.profile, planned.plan.notes


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
def test_sparse_gradients(sample: bool) -> None:
    loop = Loop(steps=3, optimizer=torch.optim.SGD)
    planned = train(SPARSE, loop, SMALLEST, sample)
    assert_same(reference(SPARSE, loop), planned)
    assert_checkpointed(planned)


def test_parameters_that_the_first_batch_makes() -> None:
    planned = train(LAZY, THREE, SMALLEST)
    assert_same(reference(LAZY, THREE), planned)
