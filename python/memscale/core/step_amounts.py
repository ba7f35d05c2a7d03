# SPDX-License-Identifier: Apache-2.0
"""Finds how much of an optimizer-side technique a budget demands; the rest stays resident.

    all of it    traced and decided first. What its peak leaves of the budget is room
    less         parts stay resident while there is room, those first that save most time for their bytes;
                 traced and decided again. The peak is not the sum of parts: if there is room still, more
                 stays resident, and if it is too much, half of that
    and then     what checkpoints could make room for, if that is faster

A part is a parameter, of state and of gradients, or a block of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memscale.core.amounts import NOTHING, Resident
from memscale.techniques.base import Part

if TYPE_CHECKING:
    from memscale.core.variants import Tried
    from memscale.plans.plan import Plan


_MOST_TRACES: Final = 4
"""Beside those of the ways themselves, over all of them: a large model takes seconds for each."""

_WITH_CHECKPOINTS: Final = 2  # of them at most to find out whether checkpoints are cheaper


def greedy(parts: Iterable[Part], room: int, resident: Resident = NOTHING) -> Resident:
    """What to keep resident in so much room.

    Never less for more room: where a part fits that did not, whatever was resident in its place was smaller.

    Args:
        parts: of all techniques; those that save most time for their bytes come first, the largest of them.
        room: bytes.
        resident: already, and not to be counted.
    """
    found = {name: set(names) for name, names in resident.items()}
    order = sorted(enumerate(parts), key=lambda item: (-_rate(item[1]), -item[1].ns, item[0]))
    for _, part in order:
        mine = found.setdefault(part.technique, set())
        if part.bytes <= room and part.name not in mine and part.ns > 0:
            mine.add(part.name)
            room -= part.bytes
    return {name: frozenset(names) for name, names in found.items() if names}


def _rate(part: Part) -> int:
    """Time per byte, coarse enough for parts of all sizes to be alike over the same link."""
    return round(8 * part.ns / max(part.bytes, 1))


# ---- the search --------------------------------------------------------------------------------------


@dataclass
class Refiner:
    """Finds how much of a way's techniques a plan is to take.

    Args:
        most_bytes: device-used bytes that a step may have.
        again: traces and decides a way with parts resident.
        better: of two, the one to take.
    """

    most_bytes: int
    again: Callable[[Tried, Resident], Tried]
    better: Callable[[Tried, Tried], Tried]
    traces: int = 0

    def refined(self, ways: Sequence[Tried], best: Tried) -> list[Tried]:
        """More ways, the best first with least of what it takes. Those that could not win are left out."""
        found: list[Tried] = []
        for way in sorted(ways, key=self._bound):
            if not way.plan.fits or not way.parts or self._bound(way) >= best.plan.predicted.step_time_ns:
                continue
            mine = self._filled(way)
            mine = mine if not mine.parts else self._with_checkpoints(mine)
            if mine is not way:
                found.append(mine)
                best = self.better(best, mine)
        return found

    def _bound(self, way: Tried) -> int:
        """About the shortest time that a way could take."""
        resident = greedy(way.parts, self.most_bytes - way.plan.smallest_peak_bytes)
        return way.plan.predicted.step_time_ns - sum(
            part.ns for part in way.parts if part.name in resident.get(part.technique, frozenset())
        )

    def _room(self, plan: Plan) -> int:
        return self.most_bytes - plan.predicted.device_used_peak_bytes

    def _filled(self, way: Tried) -> Tried:
        """With as much resident as there is room for."""
        room = self._room(way.plan)
        while self.traces < _MOST_TRACES:
            resident = greedy(way.parts, room, way.resident)
            if resident == way.resident:
                break
            made = self._again(way, resident)
            if made.plan.fits and self.better(way, made) is made:
                way, room = made, self._room(made.plan)
            else:
                room //= 2
        return way

    def _with_checkpoints(self, way: Tried) -> Tried:
        """With more resident than there is room for, if the checkpoints that make room are faster."""
        room = self.most_bytes - way.plan.smallest_peak_bytes
        for _ in range(_WITH_CHECKPOINTS):
            resident = greedy(way.parts, room, way.resident)
            known = room <= self._room(way.plan) or resident == way.resident
            if known or self.traces >= _MOST_TRACES:
                break
            made = self._again(way, resident)
            if self.better(way, made) is made:
                return made
            room //= 2
        return way

    def _again(self, way: Tried, resident: Resident) -> Tried:
        self.traces += 1
        return self.again(way, resident)
