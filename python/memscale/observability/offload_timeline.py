# SPDX-License-Identifier: Apache-2.0
"""The engine's events as charts and traces draw them: bytes held over time, and rows without overlaps.

    events of a block    out ──────┐          ┌─ in ─┐
                         │         wait_settle │      wait_arrive
    held                 ├─────────────────────┴──────────┤      from the first event to the last

The engine writes an event when it ends and keeps the latest ones. So a block whose first event is a copy back
was offloaded before the oldest event began, and one whose last event belongs to its way out is offloaded
still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from memscale.offload.figures import TIER_NAMES, OffloadEvent, OffloadFigures

__all__ = ["bounds", "held_series", "latest_steps", "rows"]

_WAY_OUT: Final = ("out", "wait_settle")


def bounds(events: Sequence[OffloadEvent]) -> tuple[int, int]:
    """When the first event began and the last one ended; (0, 0) without any."""
    return min((event.begin_ns for event in events), default=0), max(
        (event.end_ns for event in events), default=0
    )


def held_series(figures: OffloadFigures) -> dict[str, list[tuple[int, int]]]:
    """Bytes in each tier over time, as far as the events tell: points (ns, bytes from then on), in order."""
    first, last = bounds(figures.events)
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for own in _by_ticket(figures.events).values():
        latest = max(own, key=lambda event: event.end_ns)
        seen_leaving = any(event.kind == "out" for event in own)
        begin = min(event.begin_ns for event in own) if seen_leaving else first
        changes[latest.tier][begin] += latest.bytes
        is_offloaded = figures.held_count > 0 and latest.kind in _WAY_OUT
        changes[latest.tier][last if is_offloaded else latest.end_ns] -= 0 if is_offloaded else latest.bytes
    return {tier: _summed(changes[tier]) for tier in TIER_NAMES.values() if tier in changes}


def _by_ticket(events: Sequence[OffloadEvent]) -> dict[int, list[OffloadEvent]]:
    found: dict[int, list[OffloadEvent]] = defaultdict(list)
    for event in events:
        found[event.ticket].append(event)
    return found


def _summed(changes: dict[int, int]) -> list[tuple[int, int]]:
    points, held = [], 0
    for at in sorted(changes):
        held += changes[at]
        points.append((at, held))
    return points


def latest_steps(figures: OffloadFigures, count: int) -> tuple[int, int]:
    """Begin and end of the latest steps, between which nothing is held; of everything if there are fewer."""
    first, last = bounds(figures.events)
    total: dict[int, int] = defaultdict(int)
    for points in held_series(figures).values():
        before = 0
        for at, held in points:
            total[at] += held - before
            before = held
    begins, held = [], 0
    for at, size in _summed(total):
        if size and not held:
            begins.append(at)
        held = size
    return (begins[-count], last) if len(begins) > count else (first, last)


def rows(events: Sequence[OffloadEvent]) -> list[list[OffloadEvent]]:
    """Events in as few rows as it takes, so that none overlaps another of its row."""
    found: list[list[OffloadEvent]] = []
    for event in sorted(events, key=lambda event: (event.begin_ns, event.end_ns, event.ticket)):
        free = next((row for row in found if row[-1].end_ns <= event.begin_ns), None)
        if free is None:
            found.append([event])
        else:
            free.append(event)
    return found
