# SPDX-License-Identifier: Apache-2.0
"""How much of a path technique a plan takes: what the budget does not demand stays as it is.

    all of it    traced and decided first. What its peak leaves of the budget is room
    less         parts are spared while there is room, those first that save most time for their bytes; traced
                 and decided again. The peak is not the sum of parts: if there is room still, more is spared,
                 and if it is too much, half of that
    and then     what checkpoints could make room for, if that is faster

A part is a parameter, of state and of gradients, or a block of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from memscale.core.plan import Amount

if TYPE_CHECKING:
    from memscale.core.plan import Plan
    from memscale.core.step_ways import Tried

Spared = Mapping[str, frozenset[str]]
"""Technique → names of the parts that it leaves as they are."""

NOTHING: Final[Spared] = {}

_MOST_TRACES: Final = 4
"""Beside those of the ways themselves, over all of them: a large model takes seconds for each."""

_WITH_CHECKPOINTS: Final = 2  # of them at most to find out whether checkpoints are cheaper

_REASONS: Final = {
    "leaves": "the budget demands all of it",
    "in_part": "what there was room for stays",
    "stays": "there was room for all of it",
}


class Part(NamedTuple):
    """What a path technique may leave as it is.

    Attributes:
        technique: name.
        name: of the part: a parameter's, or a block's path.
        bytes: that it has in memory then, all through the step.
        ns: what it saves: the time of its copies.
        group: number of its parameter group, where it has one.
    """

    technique: str
    name: str
    bytes: int
    ns: int
    group: int = 0


def greedy(parts: Iterable[Part], room: int, spared: Spared = NOTHING) -> Spared:
    """What to spare in so much room.

    Never less for more room: where a part fits that did not, whatever was spared in its place was smaller.

    Args:
        parts: of all techniques; those that save most time for their bytes come first, the largest of them.
        room: bytes.
        spared: already, and not to be counted.
    """
    found = {name: set(names) for name, names in spared.items()}
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


def all_spared(parts: Iterable[Part], spared: Spared) -> frozenset[str]:
    """Techniques of which nothing is left."""
    names: dict[str, set[str]] = {}
    for part in parts:
        names.setdefault(part.technique, set()).add(part.name)
    return frozenset(name for name, every in names.items() if every <= spared.get(name, frozenset()))


def amounts_of(technique: str, parts: Iterable[Part], spared: Spared) -> tuple[Amount, ...]:
    """What leaves and what stays, by parameter group."""
    groups: dict[int, list[Part]] = {}
    for part in parts:
        if part.technique == technique:
            groups.setdefault(part.group, []).append(part)
    return tuple(_amount(group, mine, spared.get(technique, frozenset())) for group, mine in groups.items())


def _amount(group: int, parts: Sequence[Part], spared: frozenset[str]) -> Amount:
    staying = [part for part in parts if part.name in spared]
    leaving = [part for part in parts if part.name not in spared]
    rule = "leaves" if not staying else "in_part" if leaving else "stays"
    return Amount(
        group=group,
        rule=rule,
        reason=_REASONS[rule],
        leaving=len(leaving),
        leaving_bytes=sum(part.bytes for part in leaving),
        staying=len(staying),
        staying_bytes=sum(part.bytes for part in staying),
        ns=sum(part.ns for part in leaving),
    )


# ---- the search --------------------------------------------------------------------------------------


@dataclass
class Refiner:
    """Finds how much of a way's techniques a plan is to take.

    Args:
        most_bytes: device-used bytes that a step may have.
        again: traces and decides a way with parts spared.
        better: of two, the one to take.
    """

    most_bytes: int
    again: Callable[[Tried, Spared], Tried]
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
        spared = greedy(way.parts, self.most_bytes - way.plan.smallest_peak_bytes)
        return way.plan.predicted.step_time_ns - sum(
            part.ns for part in way.parts if part.name in spared.get(part.technique, frozenset())
        )

    def _room(self, plan: Plan) -> int:
        return self.most_bytes - plan.predicted.device_used_peak_bytes

    def _filled(self, way: Tried) -> Tried:
        """With as much spared as there is room for."""
        room = self._room(way.plan)
        while self.traces < _MOST_TRACES:
            spared = greedy(way.parts, room, way.spared)
            if spared == way.spared:
                break
            made = self._again(way, spared)
            if made.plan.fits and self.better(way, made) is made:
                way, room = made, self._room(made.plan)
            else:
                room //= 2
        return way

    def _with_checkpoints(self, way: Tried) -> Tried:
        """With more spared than there is room for, if the checkpoints that make room are faster."""
        room = self.most_bytes - way.plan.smallest_peak_bytes
        for _ in range(_WITH_CHECKPOINTS):
            spared = greedy(way.parts, room, way.spared)
            known = room <= self._room(way.plan) or spared == way.spared
            if known or self.traces >= _MOST_TRACES:
                break
            made = self._again(way, spared)
            if self.better(way, made) is made:
                return made
            room //= 2
        return way

    def _again(self, way: Tried, spared: Spared) -> Tried:
        self.traces += 1
        return self.again(way, spared)
