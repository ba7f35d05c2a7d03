# SPDX-License-Identifier: Apache-2.0
"""Fixtures of several integration tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from memscale.autotuning import confirm
from memscale.core import executor


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each plan that a wrapped model makes."""
    made: list[object] = []
    make = executor.make_plan

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(executor, "make_plan", counted)
    return made


@pytest.fixture
def few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tuner times as few steps as it may; and no limit on memory is left in force."""
    monkeypatch.setattr(confirm, "_SECONDS", 0.0)
    yield
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
