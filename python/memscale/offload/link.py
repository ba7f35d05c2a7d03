# SPDX-License-Identifier: Apache-2.0
"""The link between a device and the tiers of an offload engine, in numbers that a decision counts with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from memscale.offload.tier_room import TierRoom, placeable_bytes


@dataclass(frozen=True)
class OffloadLink:
    """The way off the device and back, as the decision counts with it.

    Attributes:
        out_bytes_per_us: rate of copies from the device beside a running step, above 0.
        in_bytes_per_us: rate of copies back, above 0.
        offload_ns: fixed cost of one copy; one storage is copied out and back.
        least_bytes: smaller storages are not moved; above 0.
        limit_bytes: most bytes off the device at once; None: no limit.
        window_out_bytes: of one call, most bytes that wait on the device for their copy out.
        window_in_bytes: of one call, most bytes that come back ahead of their use.
        staging_bytes: memory of a CPU host that the engine takes for itself as soon as anything is moved.
        tiers: where it goes; of `limit_bytes` only what can surely be placed there counts.
    """

    out_bytes_per_us: int
    in_bytes_per_us: int
    offload_ns: int = 20_000
    least_bytes: int = 1 << 20
    limit_bytes: int | None = None
    window_out_bytes: int = 64 << 20
    window_in_bytes: int = 64 << 20
    staging_bytes: int = 0
    tiers: tuple[TierRoom, ...] = ()

    def limit_for(self, sizes: Collection[int]) -> int | None:
        """Most bytes off the device at once, of storages of such sizes."""
        if self.limit_bytes is None or not self.tiers:
            return self.limit_bytes
        return min(self.limit_bytes, placeable_bytes(self.tiers, sizes))
