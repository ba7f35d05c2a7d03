# SPDX-License-Identifier: Apache-2.0
"""Measures tensor bytes on a CPU host, as PyTorch's profiler reports what its allocator hands out."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memscale.log import quiet

__all__ = ["TensorPeak", "quiet"]

_MARK: Final = "memscale.tensor_peak"
_BEGIN: Final = "memscale.tensor_peak.begin"
"""What the profiler says of memory before it is none of the block's."""


class TensorPeak:
    """Tensor bytes of a block, most from a mark on. The profiler costs time and memory of its own.

    It does not see the end of what was there before the block. So that is counted at each mark, and what is
    gone by the next one counts as gone from the first on.

    Args:
        present: tensors that there are when the block begins, and that may go in it.

    Example:
        >>> with TensorPeak() as peak:
        ...     model = build()
        ...     peak.mark()
        ...     train(model)
        ...     most, before = peak.end()
    """

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._present = _Storages(present)
        self._marks: list[int] = [self._present.bytes()]
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._runs = False

    def __enter__(self) -> TensorPeak:
        from torch.profiler import record_function

        gc.collect()  # what is freed in the block was made in it, or is among what was present
        early = torch.empty(1)
        with quiet():
            self._profile.start()
            del early  # PyTorch says once, and here, that it does not know of this one
            # Or it takes it for one that had this address in an earlier profile, and counts its end.
            with record_function(_BEGIN):
                pass
        self._runs = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._runs:
            self._stop()

    def _stop(self) -> None:
        self._runs = False
        with quiet():
            self._profile.stop()

    def mark(self) -> None:
        """From now on it counts. A second mark only looks at what was present again."""
        from torch.profiler import record_function

        gc.collect()
        with record_function(_MARK):
            self._marks.append(self._present.bytes())

    def end(self) -> tuple[int, int]:
        """Most bytes from the mark on, what there was at the mark included; and most before it."""
        self._stop()
        events: list[Any] = list(self._profile.profiler.kineto_results.events())
        marks = sorted(event.start_ns() for event in events if event.name() == _MARK)
        begin = min((event.start_ns() for event in events if event.name() == _BEGIN), default=0)
        changes = [
            (event.start_ns(), event.nbytes())
            for event in events
            if event.name() == "[memory]" and event.start_ns() >= begin
        ]
        present = [*self._marks[1:], self._present.bytes()]
        changes += zip(marks, [now - then for then, now in itertools.pairwise(present)], strict=True)
        live = before = present[0]
        peak = 0
        for when, size in sorted(changes, key=lambda change: change[0]):
            if when > marks[0]:
                peak = max(peak, live, live + size)
            live += size
            if when <= marks[0]:
                before = max(before, live)
        return max(peak, live), before


class _Storages:
    """Memory of tensors as long as it is theirs."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
        unique = {storage._cdata: storage for storage in found}
        self._known = [(StorageWeakRef(item), item.data_ptr(), item.nbytes()) for item in unique.values()]

    def bytes(self) -> int:
        """Bytes of those that are still there, where they were."""
        total = 0
        for reference, address, size in self._known:
            storage = (
                None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            )
            if storage is not None and storage.data_ptr() == address:
                total += min(size, storage.nbytes())
        return total
