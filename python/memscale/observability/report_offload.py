# SPDX-License-Identifier: Apache-2.0
"""What an offload engine did, for a report: the tiers over time, and below them copies and waits.

pageable ▁▂▄▆███▆▄▂▁      bytes in each tier, one upon the other
file     ▁▁▂▃▄▄▃▂▁▁
copies out   ███ ██
copies back          ██ ███
waits                █  █         the program stands still
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from memscale.observability.offload_timeline import held_series, latest_steps
from memscale.observability.report_svg import WIDTH, Canvas, Unit, ticks
from memscale.offload.figures import TIER_NAMES
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.offload.figures import OffloadEvent, OffloadFigures

__all__ = ["offload_chart", "tier_rows"]

_MOST_STEPS: Final = 3
"""Steps that are drawn: in more of them copies are too narrow to see."""

_MOST_POINTS: Final = 640
_LEFT, _RIGHT = 100, 12
_INNER: Final = WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _ROW = 26.0, 170.0, 24.0
_ROWS_TOP: Final = _TOP + _HEIGHT + 14
_HEADROOM: Final = 1.18  # above the peak, for what is written there

_ROWS: Final = (("copies out", ("out",)), ("copies back", ("in",)), ("waits", ("wait_settle", "wait_arrive")))

Points = Sequence[tuple[int, int]]


def tier_rows(figures: OffloadFigures) -> list[dict[str, Any]]:
    """The tiers as rows of a table."""
    names = ("out_bytes", "in_bytes", "held_bytes", "held_peak_bytes", "taken_bytes", "limit_bytes")
    return [
        {"tier": tier.tier, "cells": [format_bytes(getattr(tier, name)) for name in names]}
        for tier in figures.tiers
    ]


def offload_chart(figures: OffloadFigures) -> str:
    """Bytes in the tiers, copies and waits over the latest steps; "" without events."""
    if not figures.events:
        return ""
    begin, end = latest_steps(figures, _MOST_STEPS)
    series = held_series(figures)
    canvas = Canvas(_ROWS_TOP + _ROW * len(_ROWS) + 40, "bytes in the tiers, copies and waits over time")
    canvas.legend(WIDTH - _RIGHT, 14, [(f"t-{tier}", tier) for tier in series])
    chart = _Chart(canvas, begin, end)
    chart.held(list(series.items()))
    for number, (name, kinds) in enumerate(_ROWS):
        own = [event for event in figures.events if event.kind in kinds]
        chart.row(_ROWS_TOP + _ROW * number, name, own)
    chart.label_time(_ROWS_TOP + _ROW * len(_ROWS))
    return canvas.svg()


class _Chart:
    """Draws what lies between two moments."""

    def __init__(self, canvas: Canvas, begin_ns: int, end_ns: int) -> None:
        self.canvas = canvas
        self.begin = begin_ns
        self.span = max(end_ns - begin_ns, 1)
        self.most = 1  # bytes at one moment

    def x(self, ns: int) -> float:
        return _LEFT + _INNER * min(max((ns - self.begin) / self.span, 0), 1)

    def y(self, size: float) -> float:
        return _TOP + _HEIGHT * (1 - size / (_HEADROOM * self.most))

    def held(self, tiers: Sequence[tuple[str, Points]]) -> None:
        """The tiers as areas, one upon the other."""
        moments = self._moments([at for _, points in tiers for at, _ in points])
        layers = [[_highest(points, at, until) for at, until in moments] for _, points in tiers]
        totals = [sum(sizes) for sizes in zip(*layers, strict=True)]
        self.most = max([*totals, 1])
        self._axis()
        below = [0] * len(moments)
        for (tier, _), sizes in zip(tiers, layers, strict=True):
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            self.canvas.area(self._steps(moments, above), self._steps(moments, below), f"t-{tier}", 0.8, tier)
            below = above
        self._peak(moments[totals.index(max(totals))][0], max(totals))

    def _axis(self) -> None:
        unit = Unit([self.most])
        self.canvas.text(_LEFT - 8, _TOP - 6, unit.name, anchor="end")
        for value in ticks(_HEADROOM * self.most / unit.bytes, 4):
            y = self.y(value * unit.bytes)
            self.canvas.line((_LEFT, y, WIDTH - _RIGHT, y), "grid", 0.7)
            self.canvas.text(_LEFT - 8, y + 4, f"{value:g}", anchor="end")

    def _peak(self, at: int, size: int) -> None:
        x, y = self.x(at), self.y(size)
        right = x < _LEFT + 0.6 * _INNER
        self.canvas.dot(x, y, "ink", 3)
        self.canvas.text(
            x + (7 if right else -7), y - 5, f"at most {Unit([self.most]).text(size)}", colour="ink",
            anchor="start" if right else "end",
        )  # fmt: skip

    def _moments(self, changes: Sequence[int]) -> list[tuple[int, int]]:
        """Stretches of time without a change, or too short for one to be seen."""
        inside = {at for at in changes if self.begin < at < self.begin + self.span}
        step = self.span / _MOST_POINTS
        seen: dict[int, int] = {}
        for at in sorted(inside):
            seen.setdefault(int((at - self.begin) / step), at)
        edges = [self.begin, *seen.values(), self.begin + self.span]
        return [(at, until) for at, until in pairwise(edges) if until > at]

    def _steps(self, moments: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[tuple[float, float]]:
        return [
            (self.x(at), self.y(size)) for stretch, size in zip(moments, sizes, strict=True) for at in stretch
        ]

    def row(self, top: float, name: str, events: Sequence[OffloadEvent]) -> None:
        """When anything of a kind was under way, in a line for each tier."""
        self.canvas.text(_LEFT - 8, top + 14, name, colour="ink", anchor="end")
        self.canvas.line((_LEFT, top + _ROW - 5, WIDTH - _RIGHT, top + _ROW - 5), "grid", 0.7)
        tiers = [tier for tier in TIER_NAMES.values() if any(event.tier == tier for event in events)]
        for number, tier in enumerate(tiers):
            colour = "bad" if name == "waits" else f"t-{tier}"
            height = (_ROW - 9) / len(tiers)
            for left, right, count, size, ns in self._merged([e for e in events if e.tier == tier]):
                what = f"{name}, {tier}: {count}, {format_bytes(size)}, {ns / 1e6:.2f} ms"
                place = (left, top + 3 + number * height, max(right - left, 0.5), height)
                self.canvas.box(place, colour, what, 0.8)

    def _merged(self, events: Sequence[OffloadEvent]) -> list[tuple[float, float, int, int, int]]:
        """Events as (left, right, count, bytes, ns); what overlaps, or is too close to tell apart, is one."""
        found: list[tuple[float, float, int, int, int]] = []
        for event in sorted(events, key=lambda event: event.begin_ns):
            if event.end_ns < self.begin:
                continue
            left, right, took = self.x(event.begin_ns), self.x(event.end_ns), event.end_ns - event.begin_ns
            if found and left - found[-1][1] < 0.4:
                first, last, count, size, ns = found.pop()
                found.append((first, max(last, right), count + 1, size + event.bytes, ns + took))
            else:
                found.append((left, right, 1, event.bytes, took))
        return found

    def label_time(self, bottom: float) -> None:
        for value in ticks(self.span / 1e6, 8):
            self.canvas.text(
                self.x(self.begin + int(value * 1e6)), bottom + 14, f"{value:g}", anchor="middle"
            )
        self.canvas.text(WIDTH - _RIGHT, bottom + 32, "measured time, ms", anchor="end")


def _highest(points: Points, begin: int, end: int) -> int:
    """The most bytes between two moments."""
    first = bisect_right(points, begin, key=lambda point: point[0])
    last = bisect_left(points, end, key=lambda point: point[0])
    return max((held for _, held in points[max(first - 1, 0) : last]), default=0)
