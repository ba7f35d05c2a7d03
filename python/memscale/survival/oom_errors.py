# SPDX-License-Identifier: Apache-2.0
"""Recognises an exception that means: there was not enough memory.

PyTorch has one type for a card's own allocator, `torch.OutOfMemoryError`. All others are `RuntimeError` with
a text: the CPU's allocator, the driver (pinning, kernels that are loaded late), libraries that allocate on
their own. Errors after which a context is lost (an illegal access, an assertion in the allocator) are none
of these: nothing can be repeated after them.

Sources: c10/core/CPUAllocator.cpp, c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/cuda/Exceptions.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import torch

CARD: Final = "the card's allocator"
HOST: Final = "the host's allocator"
DRIVER: Final = "the driver"
LIBRARY: Final = "a library of the card"
PYTHON: Final = "Python"

_TEXTS: Final = (
    (HOST, "DefaultCPUAllocator: can't allocate memory"),
    (HOST, "DefaultCPUAllocator: not enough memory"),
    (HOST, "std::bad_alloc"),
    (DRIVER, "CUDA error: out of memory"),
    (DRIVER, "CUDA driver error: out of memory"),
    (DRIVER, "cudaErrorMemoryAllocation"),
    (DRIVER, "MPS backend out of memory"),
    (LIBRARY, "CUBLAS_STATUS_ALLOC_FAILED"),
    (LIBRARY, "CUSOLVER_STATUS_ALLOC_FAILED"),
    (LIBRARY, "CUSPARSE_STATUS_ALLOC_FAILED"),
    (LIBRARY, "CUDNN_STATUS_ALLOC_FAILED"),
)

_CREATING: Final = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUSOLVER_STATUS_NOT_INITIALIZED")
"""A handle could not be made; where it says so, memory was missing."""

_LOST: Final = ("INTERNAL ASSERT", "illegal memory access", "device-side assert", "device not ready")
"""After these the context, or the allocator's own state, is not to be trusted."""

_HOST_BYTES: Final = re.compile(r"allocate (\d+) bytes")
_CARD_BYTES: Final = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def who_ran_out(error: BaseException) -> str | None:
    """Who had no memory left, in words; None: the error is another one.

    Args:
        error: as caught. What it was raised from counts, too.
    """
    for item in _chain(error):
        text = str(item)
        if any(lost in text for lost in _LOST):
            return None
        if isinstance(item, torch.OutOfMemoryError):
            return CARD
        if isinstance(item, MemoryError):
            return PYTHON
        if not isinstance(item, RuntimeError):
            continue
        for who, part in _TEXTS:
            if part in text:
                return who
        if any(part in text for part in _CREATING) and "reate(" in text:
            return LIBRARY
    return None


def asked_bytes(error: BaseException) -> int:
    """What could not be allocated, in bytes; 0 where the error does not say."""
    for item in _chain(error):
        text = str(item)
        host = _HOST_BYTES.search(text)
        if host is not None:
            return int(host[1])
        card = _CARD_BYTES.search(text)
        if card is not None:
            return int(float(card[1]) * _UNITS[card[2]])
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was explicitly raised from."""
    seen: set[int] = set()
    item: BaseException | None = error
    while item is not None and id(item) not in seen:
        seen.add(id(item))
        yield item
        item = item.__cause__
