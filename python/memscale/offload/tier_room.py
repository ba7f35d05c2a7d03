# SPDX-License-Identifier: Apache-2.0
"""The bytes that an offload engine can always place in its tiers, in any order of blocks.

A block lies in one tier as a whole, in the first that has room. So one that is refused has found less
than its own size in each of them, and all but one may end with nearly as much unused as the largest
block has. In a tier of host memory a large block fills seven eighths of its slab or more, and so do
small ones of theirs (`src/offload/offload_slabs.c`); the last slab of small ones may stand in the way of
a large block. A file is cut to pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["TierRoom", "placeable_bytes"]

_SLAB_BYTES = 64 << 20
_SMALL_MOST = _SLAB_BYTES // 8
_ALIGNMENT, _PAGE = 512, 4096
_FILLED, _PARTS = 7, 8


@dataclass(frozen=True)
class TierRoom:
    """A tier.

    Attributes:
        size: what blocks may take of it.
        has_slabs: it is host memory, and not a file.
    """

    size: int
    has_slabs: bool


def placeable_bytes(tiers: Sequence[TierRoom], sizes: Collection[int]) -> int:
    """The most that blocks may have in sum so that none of them is refused.

    Args:
        tiers: in the order in which they are tried; their order makes no difference.
        sizes: those that a block may have. None: nothing is lost.
    """
    if not sizes:
        return sum(tier.size for tier in tiers)
    rooms = [_sure_bytes(tier, sizes) for tier in tiers]
    some = (part for count in range(1, len(rooms) + 1) for part in itertools.combinations(rooms, count))
    return max((sum(part) - (len(part) - 1) * max(sizes) for part in some), default=0)


def _sure_bytes(tier: TierRoom, sizes: Collection[int]) -> int:
    """What a tier surely holds when it refuses a block, together with that block."""
    smallest, largest = min(sizes), max(sizes)
    unit = _ALIGNMENT if tier.has_slabs else _PAGE
    size = tier.size
    if tier.has_slabs:
        size = size * _FILLED // _PARTS
        if smallest <= _SMALL_MOST < largest:
            size -= min(_SLAB_BYTES, largest)
    return max(0, size) * smallest // (smallest + unit)
