# SPDX-License-Identifier: Apache-2.0
"""Who may be inside a model: never for ever kept out by a thread that is not there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from memscale.torchkit.callers import Callers

TIMEOUT = 60


@contextmanager
def another(enters: Callable[[], object]) -> Iterator[None]:
    """A thread that is inside for the time of the block."""
    inside, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        with enters():  # type: ignore[attr-defined]
            inside.set()
            assert go_on.wait(TIMEOUT)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(TIMEOUT)
        yield
    finally:
        go_on.set()
        thread.join(TIMEOUT)


def plans_and_runs(callers: Callers) -> bool:
    with callers.planning() as alone:
        pass
    with callers.inside():
        return alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("what", ["inside", "planning"])
def test_a_child_of_fork_does_not_wait_for_the_parents_threads(what: str) -> None:
    callers = Callers()
    with another(getattr(callers, what)):
        child = os.fork()
        if not child:
            signal.alarm(TIMEOUT)  # a thread in its place might get the number of one that is inside
            os._exit(0 if plans_and_runs(callers) else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_who_plans_within_a_forward_is_told_of_others() -> None:
    callers = Callers()
    with callers.inside(), another(callers.inside), callers.planning() as alone:
        assert not alone
    assert plans_and_runs(callers)


def test_a_plan_within_a_plan_ends_with_the_outer_one() -> None:
    callers = Callers()
    with callers.planning(), callers.planning() as alone:
        assert alone
    with another(callers.planning):
        pass
    assert plans_and_runs(callers)
