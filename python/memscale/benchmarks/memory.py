# SPDX-License-Identifier: Apache-2.0
"""Measures memory peaks of training: from the start, and from a mark on.

    cuda   `torch.cuda.max_memory_allocated` and `max_memory_reserved`; the mark resets them
    cpu    tensor bytes: what PyTorch's allocator handed out and took back, as its profiler reports it, from
           the first byte of the model on. Nothing is reserved; the resident set of the process is beside it

The profiler costs time and memory of its own, so on a CPU times and resident sets come from another run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from memscale.observability.tensor_peak import TensorPeak

__all__ = [
    "Peaks",
    "cpu_peaks",
    "cuda_peaks",
    "engine_bytes",
    "resident_bytes",
    "restart_resident_peak",
]

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
    with TensorPeak() as peak:
        work(peak.mark)
        most, before = peak.end()
    return Peaks(most, most, before)


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
