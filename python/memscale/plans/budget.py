# SPDX-License-Identifier: Apache-2.0
"""The safety reserve of a budget, and the budget that a peak needs."""

from __future__ import annotations

from typing import Final

_RESERVE_PPM: Final = 5_000


_RESERVE_FLOOR_BYTES: Final = 256 * 1024


def reserve_bytes(budget: int) -> int:
    """Part of a budget that a plan leaves free for what a trace cannot see.

    0.5 %, and at least 256 KiB: the largest under-estimate seen over the models of the test suite was 0.36 %
    (`bench/python/truth.py` measures it anew).
    """
    return max(_RESERVE_FLOOR_BYTES, budget * _RESERVE_PPM // 1_000_000)


def budget_for(peak_bytes: int) -> int:
    """The smallest budget that a device-used peak fits into, the reserve included."""
    budget = peak_bytes + _RESERVE_FLOOR_BYTES
    if budget * _RESERVE_PPM // 1_000_000 > _RESERVE_FLOOR_BYTES:
        budget = peak_bytes * 1_000_000 // (1_000_000 - _RESERVE_PPM)
        while budget - reserve_bytes(budget) < peak_bytes:
            budget += 1
    return budget
