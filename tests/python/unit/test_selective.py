# SPDX-License-Identifier: Apache-2.0
"""Selective checkpoints: whatever is kept, every loss, gradient, parameter and buffer is plain PyTorch's."""

from __future__ import annotations

import pytest

from technique_samples import (
    BLOCKS,
    FIVE,
    ODD,
    Sample,
    operations_of,
    plain,
    selective,
    subsets,
    train,
)
from zoo.training import Loop, assert_same

SHORT = Loop(steps=2)


def check(sample: Sample, kept: frozenset[tuple[str, int]], loop: Loop = FIVE) -> None:
    run = train(sample.case, lambda model: [selective(model, path, kept) for path in sample.paths], loop)
    assert_same(plain(sample.case, loop), run)


@pytest.mark.long
@pytest.mark.parametrize("sample", BLOCKS, ids=lambda sample: sample.name)
def test_each_operation_alone(sample: Sample) -> None:
    eligible = operations_of(sample).eligible
    assert len(eligible) > 5
    for operation in eligible:
        check(sample, frozenset([operation]), SHORT)


@pytest.mark.parametrize("sample", BLOCKS + ODD, ids=lambda sample: sample.name)
def test_all_that_may_be_kept(sample: Sample) -> None:
    check(sample, frozenset(operations_of(sample).eligible))


@pytest.mark.parametrize("sample", BLOCKS + ODD, ids=lambda sample: sample.name)
def test_all_that_there_is(sample: Sample) -> None:
    """Views, writes, random operations and casts among them: those are run again, whatever is asked for."""
    check(sample, frozenset(operations_of(sample).every))


@pytest.mark.parametrize("sample", BLOCKS + ODD, ids=lambda sample: sample.name)
def test_random_sets(sample: Sample) -> None:
    for kept in subsets(operations_of(sample).every, 4):
        check(sample, kept, SHORT)


@pytest.mark.parametrize("loop", ["autocast", "accumulate", "frozen", "all"])
@pytest.mark.parametrize("sample", BLOCKS, ids=lambda sample: sample.name)
def test_other_ways_to_train(sample: Sample, loop: str) -> None:
    autocast, accumulate, frozen = (
        loop in ("autocast", "all"),
        loop in ("accumulate", "all"),
        loop != "autocast",
    )
    how = Loop(3, autocast, 2 if accumulate else 1, frozen and loop != "accumulate")
    check(sample, frozenset(operations_of(sample).eligible), how)
    for kept in subsets(operations_of(sample).every, 2):
        check(sample, kept, how)
