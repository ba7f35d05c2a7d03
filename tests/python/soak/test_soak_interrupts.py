# SPDX-License-Identifier: Apache-2.0
"""`KeyboardInterrupt` at any moment of a step: what was offloaded is gone, the next step has the bits of
plain.

A few moments on every change; more with MEMSCALE_SOAK_INTERRUPTS=500.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memscale.offload.engine import why_not
from soak.samples import Network, batch, engine_of, is_empty, same, step, wrapped

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sends signals to a thread"),
]

COUNT = int(os.environ.get("MEMSCALE_SOAK_INTERRUPTS", "4"))


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Interrupts this thread at some moment, if the block takes so long."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(after_s, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_at_any_moment(tmp_path: Path) -> None:
    draw, model, x = random.Random(11), Network(depth=2), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path, percent=70)
    assert same(step(model, x), plain)
    began = time.perf_counter()
    assert same(step(model, x), plain)
    length, tried, stopped = time.perf_counter() - began, 0, 0
    while tried < COUNT or (stopped == 0 and tried < 10 * COUNT):  # a step may end before its interrupt
        tried += 1
        try:
            with interrupted(draw.uniform(0, length)):
                step(model, x)
        except KeyboardInterrupt:
            stopped += 1
        model.zero_grad()
        torch.ones(1, requires_grad=True).sum().backward()  # lets go of nodes that PyTorch had ready
        assert is_empty(engine_of(model))
        assert same(step(model, x), plain)
    assert stopped > 0
