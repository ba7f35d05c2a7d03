# SPDX-License-Identifier: Apache-2.0
"""Measures the scratch of cuDNN's convolutions on the present card, by running each once.

Which algorithm cuDNN picks, and the workspace that it asks for, depends on shapes, layouts, card and version;
no formula follows it (`cuda/scratch` has one for cards that are not there). But a call takes the same for the
same signature. So the first time that a trace on a card meets one, the operator runs on empty tensors of
these shapes, and the allocator's own record says what it took.

That needs the call's operands and its workspace for a moment, as every step of the model does. What does not
fit is not measured, nothing stays in the allocator, and what a program records itself is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memscale.cuda.scratch import Block
from memscale.torchkit.described_calls import Call, Shape, describe

PROBED: Final = frozenset(("aten::convolution", "aten::convolution_backward"))
"""Operators that are measured."""

_KNOWN_LIMIT: Final = 4096
_PAGE: Final = 512
_SPARE: Final = 3
"""A call is not run where this many times its operands are not free: the workspace may be as large."""

Measure = Callable[[Call, torch.device], "tuple[Block, ...] | None"]

_known: dict[Any, tuple[Block, ...] | None] = {}


def blocks(
    func: Any, args: Sequence[Any], outputs: Sequence[Tensor], measure: Measure | None = None
) -> tuple[Block, ...] | None:
    """Blocks that a call allocates and frees inside, their bytes as the allocator rounds them.

    Args:
        func: the operator overload.
        args: positional arguments; fakes of the card's tensors.
        outputs: the tensors that it returned.
        measure: gives the blocks of one call on a card; None: `measured`.

    Returns:
        The blocks; None where the call was not measured.
    """
    device = args[0].device
    call = describe(func, args, {}, sum(output.untyped_storage().nbytes() for output in outputs))
    measure = measure or measured
    key = (measure, call[:3], device, *_settings())
    if key not in _known:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        _known[key] = measure(call, device)
    return _known[key]


def _settings() -> tuple[Any, ...]:
    """What else decides the algorithm."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.get_deterministic_debug_mode(),
        torch._C._get_cudnn_allow_tf32(),
    )  # fmt: skip


def measured(call: Call, device: torch.device) -> tuple[Block, ...] | None:
    """Runs a call in a thread of its own, where no mode and no hook of the caller's is in force."""
    found: list[tuple[Block, ...]] = []

    def work() -> None:
        try:
            with torch.cuda.device(device), torch.no_grad():
                if (
                    not torch._C._cuda_isHistoryEnabled()
                    and _SPARE * call.room <= torch.cuda.mem_get_info()[0]
                ):
                    found.append(_taken(call, device))
        except Exception:  # no memory, or none of these functions in this PyTorch
            return

    thread = threading.Thread(target=work, name="memscale-probe")
    thread.start()
    thread.join()
    torch.cuda.empty_cache()
    return found[0] if found else None


def _taken(call: Call, device: torch.device) -> tuple[Block, ...]:
    """Blocks of the second of two runs: the first makes handles, and finds the algorithm."""
    args = [_real(value, device) for value in call.args]
    call.func(*args)
    torch.cuda.synchronize()
    record: Any = torch.cuda.memory._record_memory_history
    record("all", context=None, stacks="python", max_entries=10_000)
    try:
        made = call.func(*args)
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
    finally:
        record(None)
    del made
    return lives(trace)


def lives(trace: Sequence[dict[str, Any]]) -> tuple[Block, ...]:
    """What was allocated and given back, and in which phases it was there: one begins after each release."""
    found: list[Block] = []
    there: dict[int, tuple[int, int]] = {}  # address → size, first phase
    phase, is_over = 0, False
    for event in trace:
        if event["action"] == "alloc":
            phase += is_over
            is_over = False
            there[event["addr"]] = -(-event["size"] // _PAGE) * _PAGE, phase
        elif event["action"] == "free_completed" and event["addr"] in there:
            found.append((*there.pop(event["addr"]), phase))
            is_over = True
    return tuple(found)


def _real(value: Any, device: torch.device) -> Any:
    """A tensor for its description: rubbish, which takes as long and as much as anything."""
    if isinstance(value, Shape):
        return torch.empty(value.reach, dtype=value.dtype, device=device).as_strided(value.size, value.stride)
    return [_real(item, device) for item in value] if isinstance(value, tuple) else value
