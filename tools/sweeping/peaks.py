# SPDX-License-Identifier: Apache-2.0
"""Peak of tensor bytes during a step on the CPU: what is alive before it, and every allocation in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memscale.observability.tensor_peak import quiet
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


_MARK = "the measured step"


def peak_bytes(step: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """Most bytes at one moment of `step`.

    Args:
        step: what is measured.
        before: a step like it. The profiler does not see the end of what was allocated before it began, such
            as tensors of the last step that a module keeps until the next one replaces them.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        before()
        now = most = living_bytes()
        with record_function(_MARK):
            step()
    inner: Any = profiler.profiler
    events = sorted(inner.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == _MARK)
    for event in events:
        if event.name() == "[memory]" and event.start_ns() >= begin:
            now += event.nbytes()
            most = max(most, now)
    return most
