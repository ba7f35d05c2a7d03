# SPDX-License-Identifier: Apache-2.0
"""Measures what a loop's loss takes in a real step, and reads the same off a trace.

    forward    loss            backward of the loss          the model's backward
    ─────────┬───────────────────────────────────────────┬──────────────────────
          returned               peak                 reached: left

On the CPU PyTorch's operator-level profiler tells each allocation of the thread; it changes no bit. It runs
from before the forward to the optimizer's step, since it complains of memory that is freed and was there when
it began. Only one profiler may run on a thread, so this one ends before any other begins: the program's, or
that of another model's loss, unless this model's forward is still running. On a card the allocator's own
counters tell.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler, profiler_legacy

from memscale.ops import memory_events
from memscale.torchkit.leaves import parts_of, tensors_of
from memscale.torchkit.output_use import LossBytes, OutputUse

if TYPE_CHECKING:
    from memscale.trace.step import Trace

_MARK: Final = (7919, 7907)
"""Sizes of two blocks that are allocated and freed, one after the other: a mark among the events."""


class _Bytes(Protocol):
    """Bytes of one device, between two marks."""

    def mark(self) -> None:
        """Sets one; may be called in a backward."""

    def abandon(self) -> None:
        """Nobody will ask; may come from any thread."""

    def stop(self) -> None:
        """Nothing after this counts."""

    def end(self) -> tuple[int, int] | None:
        """The peak between the marks, and what was left at the second, above the first; None: not known."""


class _HostBytes:
    """By the profiler of this thread.

    Raises:
        RuntimeError: another profiler runs here.
    """

    def __init__(self) -> None:
        self._events: list[list[int]] = []
        self._runs = False
        self._marks = 0
        self._thread = threading.get_ident()
        before = _running.get(self._thread)
        if before is not None and before._marks > 0:  # its forward has returned; a backward may never come
            before.stop()
        memory_events.begin()
        self._runs = True
        with _lock:
            _running[self._thread] = self
            _exchange()

    def mark(self) -> None:
        self._marks += 1
        for size in _MARK:
            torch.UntypedStorage(size, device="cpu")

    def abandon(self) -> None:
        """Nobody will ask for it. On another thread it is only marked, and ends before any other begins."""
        self._marks = max(self._marks, 1)
        self.stop()

    def stop(self) -> None:
        """Ends the profiler; on another thread it cannot be reached."""
        if self._runs and self._thread == threading.get_ident():
            self._runs = False
            with _lock:
                _running.pop(self._thread, None)
                _exchange()
            with suppress(RuntimeError):  # somebody else has ended it
                self._events = memory_events.end()

    def end(self) -> tuple[int, int] | None:
        self.stop()
        mark = [change for size in _MARK for change in (size, -size)]
        for events in self._events:
            places = (at for at, size in enumerate(events) if size == mark[0])
            marks = [at for at in places if events[at : at + len(mark)] == mark]
            if len(marks) > 1:
                live = [*itertools.accumulate(events[marks[0] : marks[1]], initial=0)]
                return max(live[len(mark) :], default=0), live[-1]
        return None


class _CardBytes:
    """By the counters of a card's allocator. A peak below that of an earlier moment is not seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[int, int]] = []  # allocated, and the most so far

    def mark(self) -> None:
        device = self._device
        self._marks.append((torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)))

    def abandon(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""

    def end(self) -> tuple[int, int] | None:
        if len(self._marks) < 2:
            return None
        (begin, before), (now, most) = self._marks[:2]
        return max(now - begin, most - begin if most > before else 0), now - begin


_running: dict[int, _HostBytes] = {}
"""By thread. Held here: who has begun one may be collected on another thread, which cannot end it."""


@atexit.register
def _end_here() -> None:
    """The program ends in the middle of a step."""
    running = _running.get(threading.get_ident())
    if running is not None:
        running.stop()


def _ends_ours(enable: Callable[..., Any]) -> Callable[..., Any]:
    """A profiler of the program's is about to begin: PyTorch would refuse it beside ours."""

    def enabled(*args: Any, **kwargs: Any) -> Any:
        _end_here()
        return enable(*args, **kwargs)

    return enabled


_PLACES: Final = ((profiler, "_enable_profiler"), (profiler_legacy, "_enable_profiler_legacy"))
_lock = threading.RLock()
_others: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""While one of ours runs: what is in PyTorch's places, and what was."""


def _exchange() -> None:
    """While one of ours runs, a profiler of the program's ends it. The caller has the lock."""
    if _running and not _others:
        for module, name in _PLACES:
            was = getattr(module, name, None)
            if was is not None:
                ours = _ends_ours(was)
                _others[module, name] = (ours, was)
                setattr(module, name, ours)
    elif not _running:
        for (module, name), (ours, was) in _others.items():
            if getattr(module, name, None) is ours:
                setattr(module, name, was)
        _others.clear()


class LossMeter:
    """Of the loss of the forward that is about to run, on this thread.

    Args:
        device: of the model.

    Raises:
        RuntimeError: it cannot be measured here.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("a device of no known kind")
        self._bytes: _Bytes = _HostBytes() if device.type == "cpu" else _CardBytes(device)
        self._outputs: list[tuple[weakref.ref[Any], int]] = []  # storages, with their bytes
        self._dense: list[bool] = []
        self._alive: int | None = None  # bytes of the outputs, as backward comes to them

    def __del__(self) -> None:
        if "_bytes" in self.__dict__:  # the model has gone in the middle of a step
            self._bytes.abandon()

    def returned(self, output: Any) -> None:
        """The forward has."""
        leaves = tensors_of(output)
        parts = [part.untyped_storage() for leaf in leaves for part in parts_of(leaf)]
        storages = {storage._cdata: storage for storage in parts}
        self._outputs = [(weakref.ref(storage), storage.nbytes()) for storage in storages.values()]
        self._dense = [True] * len(leaves)
        self._bytes.mark()

    def reached(self, gradients: Sequence[tuple[int, Tensor | None]]) -> None:
        """See `output_use.Meter`."""
        if self._alive is None:
            self._bytes.mark()
            self._alive = sum(size for ref, size in self._outputs if ref() is not None)
        for place, gradient in gradients:
            if gradient is not None and gradient.layout is torch.strided:
                whole = gradient.numel() * gradient.element_size()
                with suppress(NotImplementedError):  # several at once (is_grads_batched) have no storage
                    self._dense[place] = gradient.untyped_storage().nbytes() >= whole

    def so_far(self) -> int:
        """What the loop has made of the outputs, as another forward is about to run. That is all."""
        self._bytes.mark()
        found = self._bytes.end()
        gone = sum(size for ref, size in self._outputs if ref() is None)
        return 0 if found is None else max(found[1] + gone, 0)

    def stop(self) -> None:
        """Nothing more is measured."""
        self._bytes.stop()

    def end(self, use: OutputUse | None) -> LossBytes | None:
        """What the loss has taken; None where backward did not come to the outputs.

        Args:
            use: which of the outputs it has come to.
        """
        found = self._bytes.end()
        if found is None or self._alive is None or use is None:
            return None
        peak, left = found
        whole = sum(size for _, size in self._outputs)
        drops_output = self._alive * 2 < whole
        # What has gone of the outputs makes room only where the loop drops them.
        left = max(left + whole - (0 if drops_output else self._alive), 0)
        peak = peak if drops_output else max(peak, left)
        return LossBytes(max(peak, 0), left, tuple(self._dense), use, drops_output)


def assumed_bytes(trace: Trace) -> tuple[int, int] | None:
    """`peak` and `left`, as of `LossBytes`, of the loss that a trace has assumed; None: it has none."""
    if trace.loss_ops is None:
        return None
    begin, reached = trace.loss_ops
    ends: dict[int, int] = {}
    for buffer, _, _, _, release in trace.graph.saves():
        ends[buffer] = max(ends.get(buffer, 0), release)
    changes = [0] * (reached - begin + 2)
    left = 0
    for buffer, (size, first, end, _, resident) in enumerate(trace.graph.buffers()):
        if resident or not begin <= first < reached:
            continue
        last = max(end, ends.get(buffer, 0))
        changes[first - begin] += size
        changes[min(last, reached) - begin] -= size
        left += size if last > reached else 0
    scratch = [op[6] for op in trace.graph.ops()[begin:reached]]
    live = itertools.accumulate(changes[: reached - begin])
    peak = max((now + more for now, more in zip(live, scratch, strict=True)), default=0)
    return max(peak, left), left
