# SPDX-License-Identifier: Apache-2.0
"""Runs a CPU kernel once on zeros and tells what it allocates.

How oneDNN lays out the operands of a convolution, or blocks a low-precision product, depends on shapes,
processor and version, and no formula follows it closely. But a kernel allocates the same for the same
signature, whatever the numbers are. So the first time that a trace meets a signature, the operator itself
runs on zeros of that shape, and PyTorch's operator-level profiler tells each allocation and release in order:

    live bytes           ┌─┐ scratch
                      ┌──┘ └──┐                  peak: what the graph has to hold while the operation runs,
    ──────────────────┘output └────              outputs included

The run happens on a thread of its own. A fresh thread has no dispatch mode, no autocast, no saved-tensor hook
and no profiler of the caller's, and what happens there is invisible to all of these. Nothing random is drawn,
so no generator moves.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memscale.ops import memory_events
from memscale.torchkit.described_calls import Call, Shape

OPERAND_BYTES = 256 << 20
"""The most that operands and outputs of one run may take. The step itself will take as much."""

SLOW_FLOPS = 100_000_000
"""The most that one run may compute in a low precision for which the processor has no instructions."""

_KNOWN_LIMIT = 4096
"""Signatures remembered by a process; beyond that, all are forgotten."""

Events = tuple[int, ...]
"""Bytes of allocations and, negative, of releases, in order."""

_known: dict[Any, Events | None] = {}


def _events_of(work: Callable[[], object]) -> Events:
    """What `work` allocates and releases on this thread."""
    memory_events.begin()
    result = None
    try:
        result = work()  # held until the record ends: its release is not part of the operator
    finally:
        threads = memory_events.end()
    del result
    return tuple(itertools.chain(*threads))


def highest(events: Iterable[float]) -> int:
    """Most bytes at once."""
    return math.ceil(max(itertools.accumulate(events, initial=0)))


def alike(*runs: Events) -> bool:
    """Whether parts of a call allocate and release in the same order."""
    return len({tuple(size > 0 for size in events) for events in runs}) == 1


def _real(value: Any) -> Any:
    if isinstance(value, Shape):
        return value.zeros()
    return tuple(map(_real, value)) if isinstance(value, tuple) else value


def run_aside(call: Call, gradients: bool) -> Events | None:
    """One run on zeros, or None where the operator or the profiler refuses."""
    found: list[Events] = []
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)  # OpenMP gives a new thread the number of the environment
        try:
            args, kwargs = _real(call.args), {name: _real(value) for name, value in call.kwargs}
            torch.set_grad_enabled(gradients)
            found.append(_events_of(lambda: call.func(*args, **kwargs)))
        except Exception:  # zeros may be invalid for an operator, and the profiler's interface is not public
            return

    thread = threading.Thread(target=work, name="memscale-scratch")
    thread.start()
    thread.join()
    return found[0] if found else None


def peak(call: Call, gradients: bool = True) -> int | None:
    """The peak of one run."""
    events = run(call, gradients)
    return None if events is None else highest(events)


def run(call: Call, gradients: bool = True) -> Events | None:
    """One run, remembered. Few operators ask whether gradients are enabled."""
    key = (
        call[:3],
        gradients,
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
    )
    if key not in _known:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        _known[key] = run_aside(call, gradients)
    return _known[key]


def forget() -> None:
    """Every call is measured once more when it is met next."""
    _known.clear()


def remembered() -> list[tuple[Any, ...]]:
    """Function, arguments and keywords of the calls that have been run."""
    return [tuple(key[0]) for key in _known]


def flop_limit(dtype: torch.dtype, usual: int, slow: int = SLOW_FLOPS) -> int:
    """The most that a run may compute: less where the processor has no instructions for low precision."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return slow
    if dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return slow
    return usual


def line(
    call: Call, places: Sequence[tuple[int, int]], batch: int, share: int, gradients: bool = True
) -> Events | None:
    """Runs a part of a batch, and where that is not all of it half of the part: the line through both."""
    large = run(call.cut(places, share), gradients)
    if share == batch or large is None:
        return large
    half = share // 2
    small = run(call.cut(places, half), gradients) if half else ()
    if small is None:
        return None
    if not alike(large, small):
        large, small = (highest(large),), (highest(small),)
    more = (batch - share) / (share - half)
    return tuple(math.ceil(most + (most - least) * more) for most, least in zip(large, small, strict=True))
