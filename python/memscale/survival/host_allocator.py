# SPDX-License-Identifier: Apache-2.0
"""Has the C library give freed memory of a CPU host back to the system, after memory has run out.

glibc keeps what is freed for later, up to 32 MiB a piece, in a heap that shrinks at its end only. Holes in it
count as used, and do not fit the tensors of a tighter plan. From the first time that memory has run out,
large tensors get pages of their own, which go back as soon as they are freed. That takes some time for each.

Source: malloc(3), mallopt(3).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1 << 20


@functools.cache
def _library() -> Any:
    """The C library, if it has these functions."""
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None
    except (OSError, AttributeError, TypeError):
        return None


def give_back() -> None:
    """Gives back what is free, and has large pieces given back at once from now on."""
    library = _library()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.malloc_trim(ctypes.c_size_t(0))
