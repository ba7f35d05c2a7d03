# SPDX-License-Identifier: Apache-2.0
"""Measures memory peaks of training: from the start, and from a mark on.

    cuda   `torch.cuda.max_memory_allocated` and `max_memory_reserved`; the mark resets them
    cpu    tensor bytes: what PyTorch's allocator handed out and took back, as its profiler reports it, from
           the first byte of the model on. Nothing is reserved; the resident set of the process is beside it

The profiler costs time and memory of its own, so on a CPU times and resident sets come from another run.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Peaks",
    "cpu_peaks",
    "cuda_peaks",
    "engine_bytes",
    "quiet",
    "resident_bytes",
    "restart_resident_peak",
]

_MARK = "memscale.benchmarks.mark"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peaks:
    """Most bytes at one moment.

    Attributes:
        allocated_bytes: of tensors, from the mark on.
        reserved_bytes: held by the allocator, from the mark on.
        start_bytes: of tensors before the mark: building, planning, warm-up.
    """

    allocated_bytes: int
    reserved_bytes: int
    start_bytes: int


def cpu_peaks(work: Callable[[Callable[[], None]], object]) -> Peaks:
    """Runs `work(mark)`, which calls `mark` once; all its tensors must come into being in it."""
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark() -> None:
        gc.collect()
        with record_function(_MARK):
            pass

    gc.collect()
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet():
        profiled.start()
    try:
        work(mark)
    finally:
        profiled.stop()
    inner: Any = profiled.profiler
    events: list[Any] = list(inner.kineto_results.events())
    at = next(event.start_ns() for event in events if event.name() == _MARK)
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    live = start = peak = 0
    for when, size in changes:
        if when >= at:
            peak = max(peak, live, live + size)
        live += size
        if when < at:
            start = max(start, live)
    return Peaks(peak, peak, start)


def cuda_peaks(work: Callable[[Callable[[], None]], object]) -> Peaks:
    """The same on the current card."""
    start = 0

    def mark() -> None:
        nonlocal start
        gc.collect()
        torch.cuda.synchronize()
        start = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    work(mark)
    torch.cuda.synchronize()
    return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), start)


def resident_bytes() -> int:
    """Most bytes that this process had in memory since its start, or since `restart_resident_peak`."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def engine_bytes() -> int:
    """Host memory of open offload engines, which PyTorch does not see: staging, and blocks not in a file."""
    from memscale.offload.engine import Offload

    counters = [found.counters() for found in gc.get_objects() if type(found) is Offload]
    names = ("taken_bytes_pinned", "taken_bytes_host", "table_bytes")
    return sum(count.get(name, 0) for count in counters for name in names)


def restart_resident_peak() -> bool:
    """Starts the count of `resident_bytes` anew; False: the system cannot."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """For the start of PyTorch's profiler, which writes to file descriptor 2."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
