# SPDX-License-Identifier: Apache-2.0
"""A long run with changing shapes: nothing grows, neither tensors nor the process, its engine or its file.

Few steps on every change; a thousand with MEMSCALE_SOAK_STEPS=1000.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import memscale
from memscale.offload.engine import Offload, why_not
from soak.samples import (
    Network,
    batch,
    engine_of,
    files_in,
    is_empty,
    step,
    wrapped,
)
from technique_leaks import net_bytes, objects

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

STEPS = int(os.environ.get("MEMSCALE_SOAK_STEPS", "12"))
SHAPES = [(8, 512), (4, 512), (8, 256), (5, 400), (3, 512), (6, 512), (8, 384), (7, 300)]
"""Of batches, each with a plan of its own or within another's. Few steps have few of them."""

MOST_PROFILED = 50
"""Steps: the profiler's own memory grows with them."""

OBJECTS = 200
"""Growth in Python objects that is no leak, from the first third of the run to its end."""

RESIDENT_BYTES = 48 << 20
"""Likewise of the resident set: what the C library keeps of freed memory differs by shape."""


@dataclass
class Most:
    """The most that was seen after some steps: in the process, and of an engine in its file."""

    resident_bytes: int = 0
    held_bytes: int = 0
    taken_bytes: int = 0
    file_bytes: int = 0

    def look(self, engine: Offload, folder: Path) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        counters = engine.counters()
        found = [os.fstat(descriptor) for descriptor in files_in(folder)]
        on_disk = {file.st_ino: file.st_blocks * 512 for file in found}  # it is open twice
        self.resident_bytes = max(self.resident_bytes, resident)
        self.held_bytes = max(self.held_bytes, counters["held_bytes_file"])
        self.taken_bytes = max(self.taken_bytes, counters["taken_bytes_file"])
        self.file_bytes = max(self.file_bytes, sum(on_disk.values()))


def test_nothing_grows(tmp_path: Path) -> None:
    draw, model, shapes = random.Random(5), Network(), SHAPES[: STEPS // 3]
    wrapped(model, batch(*SHAPES[0]), tmp_path, percent=60)

    def steps(count: int) -> Most:
        most = Most()
        for _ in range(count):
            step(model, batch(*draw.choice(shapes)))
            most.look(engine_of(model), tmp_path)
        model.zero_grad()
        return most

    for shape in shapes:  # each is planned for once
        step(model, batch(*shape))
    engine = engine_of(model)
    assert net_bytes(lambda: steps(min(STEPS // 3, MOST_PROFILED))) == 0
    early, before = steps(STEPS // 3), objects()
    late = steps(STEPS - STEPS // 3)
    assert objects() - before < OBJECTS
    assert late.held_bytes == 0, "blocks outlived their step"
    assert late.taken_bytes <= early.taken_bytes and late.file_bytes <= early.file_bytes
    assert late.resident_bytes <= early.resident_bytes + RESIDENT_BYTES
    assert engine_of(model) is engine, "plans of one run share an engine"
    assert len(memscale.executor_of(model).plans) <= 1 + len(shapes)
    assert is_empty(engine)


def test_attaching_and_detaching_leave_nothing(tmp_path: Path) -> None:
    """Engine, threads and file end with the graph that needs them, every time."""
    model, x = Network(depth=2), batch()

    def cycles(count: int) -> None:
        for _ in range(count):
            wrapped(model, x, tmp_path, percent=70)
            step(model, x)
            memscale.detach(model)
        model.zero_grad()

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    assert net_bytes(lambda: cycles(1)) == 0
    gc.collect()
    count, before = threads(), objects()
    assert net_bytes(lambda: cycles(max(2, STEPS // 20))) == 0
    assert objects() - before < OBJECTS
    assert threads() == count and not files_in(tmp_path)
