# SPDX-License-Identifier: Apache-2.0
"""Memory over the operations of one step."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("forward", "backward", "optimizer")

_PHASE_OF_RECOMPUTE = 1  # a recompute happens in backward


@dataclass(frozen=True)
class Timeline:
    """Memory over one step, one entry per operation that runs.

    Attributes:
        live_bytes: highest number of allocated bytes while the operation runs.
        phase: index into `PHASES`.
        recompute: 1 where the operation is of a recompute.
        time_ns: when the operation starts, by the cost model.
    """

    live_bytes: tuple[int, ...]
    phase: tuple[int, ...]
    recompute: tuple[int, ...]
    time_ns: tuple[int, ...]

    def rise_bytes(self, phases: Collection[str]) -> int:
        """How far memory rises in some phases, above the lowest in them.

        Args:
            phases: of `PHASES`.
        """
        pairs = zip(self.live_bytes, self.phase, strict=True)
        live = [size for size, phase in pairs if PHASES[phase] in phases]
        return max(live) - min(live) if live else 0

    def phase_peaks(self) -> dict[str, int]:
        """Highest number of allocated bytes in each phase; "recompute" is that within recomputes."""
        peaks: dict[str, int] = {}
        for live, phase, again in zip(self.live_bytes, self.phase, self.recompute, strict=True):
            for name in (PHASES[phase], "recompute")[: 1 + again]:
                peaks[name] = max(peaks.get(name, 0), live)
        return peaks


def timeline_of(
    replay: Mapping[str, Any], phases: list[int], times_ns: array[int], recompute_ns: int
) -> Timeline:
    """A replay's byte strings as a timeline.

    Args:
        replay: what `_core.replay` returned.
        phases: phase of each graph operation.
        times_ns: duration of each graph operation.
        recompute_ns: fixed cost of one checkpointed call, spent where a recompute begins.
    """
    live, ops = array("Q"), array("I")
    live.frombytes(replay["live"])
    ops.frombytes(replay["ops"])
    recompute = tuple(replay["recompute"])
    now, before = 0, 0
    times: list[int] = []
    for op, again in zip(ops, recompute, strict=True):
        if again and not before:
            now += recompute_ns
        times.append(now)
        now += times_ns[op]
        before = again
    phase = tuple(
        _PHASE_OF_RECOMPUTE if again else phases[op] for op, again in zip(ops, recompute, strict=True)
    )
    return Timeline(tuple(live), phase, recompute, tuple(times))
