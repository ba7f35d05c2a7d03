# SPDX-License-Identifier: Apache-2.0
"""Peak of tensor bytes during a step on the CPU: what is alive before it, and every allocation in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memscale.benchmarks.memory import quiet
from sweeping.objects import living_tensors


def living_bytes() -> int:
    """Bytes of every storage on the CPU that a tensor of this process holds."""
    storages = {}
    for item in living_tensors():
        try:
            storage = item.untyped_storage()
            if storage.device.type == "cpu":
                storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # of a fake, or sparse
            continue
    storages.pop(0, None)
    return sum(storages.values())


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes at one moment of `step`."""
    from torch.profiler import ProfilerActivity, profile

    now = most = living_bytes()
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    inner: Any = profiler.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
