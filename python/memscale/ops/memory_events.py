# SPDX-License-Identifier: Apache-2.0
"""What the CPU allocates and releases on one thread, as PyTorch's operator-level profiler tells it.

Only one profiler may run on a thread. It changes no bit of what is computed.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress
from typing import Any, Final

import torch

from memscale.log import quiet

_MEMORY_ALONE: Final = (False, True, False, False, False)
"""No shapes of inputs, memory, no stack, no FLOPs, no modules."""


def begin() -> None:
    """From here on, on this thread.

    Raises:
        AttributeError, TypeError: this PyTorch has it in another way.
        RuntimeError: another profiler runs here.
    """
    _have_it_complain()
    _enable()


def end() -> list[list[int]]:
    """Bytes of allocations and, negative, of releases, in order; a list for each thread that had any.

    Raises:
        RuntimeError: no profiler runs here.
    """
    return [
        [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
        for events in _disable()
    ]


def _enable() -> None:
    kinds: Any = torch._C._profiler
    autograd: Any = torch._C._autograd
    configuration = kinds.ProfilerConfig(kinds.ProfilerState.CPU, *_MEMORY_ALONE, kinds._ExperimentalConfig())
    autograd._enable_profiler_legacy(configuration)


def _disable() -> list[list[Any]]:
    autograd: Any = torch._C._autograd
    found: list[list[Any]] = autograd._disable_profiler_legacy()
    return found


@functools.cache
def _have_it_complain() -> None:
    """The first time that memory from before a profiler is freed, PyTorch says so on stderr: unseen, once."""
    thread = threading.Thread(target=_free_what_was_there, name="memscale-events")
    thread.start()
    thread.join()


def _free_what_was_there() -> None:
    early = torch.UntypedStorage(1, device="cpu")
    with suppress(AttributeError, RuntimeError, TypeError), quiet():
        _enable()
        del early
        _disable()
