# SPDX-License-Identifier: Apache-2.0
"""Charts of a report: memory over the step, a panel for each step, as one SVG element (see `report_svg`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from memscale.observability.report_svg import WIDTH, Canvas, Unit, ticks
from memscale.plans.timeline import PHASES

if TYPE_CHECKING:
    from memscale.observability.step_view import StepView
    from memscale.plans.plan import Plan
    from memscale.plans.timeline import Timeline

Curve = Sequence[tuple[float, int]]
"""Points (milliseconds since the step began, bytes)."""

CATEGORY_ORDER: Final = (
    "context", "parameter", "buffer", "optimizer_state", "gradient", "input", "workspace", "activation",
    "temporary", "fragmentation",
)  # fmt: skip
"""From the bottom of a stack to its top: what stays, then what comes and goes."""

_MOST_POINTS: Final = 640  # of a curve; more are not visible on a screen and make the file large
_LEFT, _RIGHT = 64, 12
_INNER: Final = WIDTH - _LEFT - _RIGHT


@dataclass
class _Panel:
    """Memory over one step, to be drawn into a frame.

    Attributes:
        title: above the frame.
        ends_ms: end of each interval, rising; an interval begins where the one before ends.
        layers: (colour, name, bytes in each interval), from the bottom of the stack.
        phases: (name, begin ms, end ms).
        repeats: (begin ms, end ms) of what is recomputed.
        held: bytes that the allocator holds in each interval, as a line above the stack; empty: none.
    """

    title: str
    ends_ms: Sequence[float]
    layers: Sequence[tuple[str, str, Sequence[int]]]
    phases: Sequence[tuple[str, float, float]] = ()
    repeats: Sequence[tuple[float, float]] = ()
    held: Sequence[int] = ()
    totals: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.totals = [sum(sizes) for sizes in zip(*(layer[2] for layer in self.layers), strict=True)]


def timelines(plan: Plan) -> str:
    """Predicted memory over the step: plain above, planned below, with the budget across both."""
    panels = [
        _of_timeline(f"{name}, predicted", timeline, colour)
        for name, timeline, colour in (
            ("plain", plan.plain.timeline, "plain"),
            ("planned", plan.predicted.timeline, "planned"),
        )
    ]
    return _draw(panels, plan.budget_bytes - plan.predicted.context_bytes, "predicted time, ms")


def stacks(views: Mapping[str, StepView], reserved: Mapping[str, Sequence[int]], budget_bytes: int) -> str:
    """Predicted memory over the step by category, one panel per step, on one scale.

    Args:
        views: steps by name.
        reserved: bytes that the allocator holds, by name, one per row of the step; may lack any.
        budget_bytes: what the allocator may hold.
    """
    panels = [_of_view(f"{name}, predicted", view, reserved.get(name, ())) for name, view in views.items()]
    return _draw(panels, budget_bytes, "predicted time, ms")


def measured(curves: Mapping[str, Curve], budget_bytes: int) -> str:
    """Measured memory over the step, one panel for each curve, on one scale."""
    panels = []
    for name, curve in curves.items():
        points = _thinned(list(curve))
        colour = "plain" if name == "plain" else "planned"
        layer = (colour, "allocated", [size for _, size in points])
        panels.append(_Panel(f"{name}, measured", [time for time, _ in points], [layer]))
    return _draw(panels, budget_bytes, "measured time, ms")


def _of_timeline(title: str, timeline: Timeline, colour: str) -> _Panel:
    starts = [ns / 1e6 for ns in timeline.time_ns]
    ends = [*starts[1:], *starts[-1:]]  # the last one's end is not known; it gets its start
    curve = _thinned(list(zip(ends, timeline.live_bytes, strict=True)))
    return _Panel(
        title,
        [time for time, _ in curve],
        [(colour, "allocated", [size for _, size in curve])],
        [(PHASES[phase], begin, end) for phase, begin, end in _runs(timeline.phase, starts, ends)],
        _closed(_runs(timeline.recompute, starts, ends), ends[-1] if ends else 0),
    )


def _of_view(title: str, view: StepView, reserved: Sequence[int]) -> _Panel:
    starts, ends = [ns / 1e6 for ns in view.times_ns[:-1]], [ns / 1e6 for ns in view.times_ns[1:]]
    kept = _highest_rows(ends, view.live_bytes)
    layers = []
    for name in CATEGORY_ORDER:
        if name in view.categories:
            sizes = view.series(name)
            layers.append((f"c-{name}", name.replace("_", " "), [sizes[row] for row, _ in kept]))
    rounded = [max(view.live_bytes[row] - sum(view.by_category[row]), 0) for row, _ in kept]
    if any(rounded):
        layers.append(("c-fragmentation", "rounding", rounded))
    return _Panel(
        title,
        [end for _, end in kept],
        layers,
        [(PHASES[phase], begin, end) for phase, begin, end in _runs(view.phase, starts, ends)],
        _closed(_runs(view.recompute, starts, ends), ends[-1] if ends else 0),
        [reserved[row] for row, _ in kept] if reserved else (),
    )


def _draw(panels: Sequence[_Panel], budget_bytes: int, below: str) -> str:
    """Panels one below the other, with common axes."""
    height, gap = 190.0, 44.0
    unit = Unit([budget_bytes, *(size for panel in panels for size in panel.totals)])
    highest = [max([*panel.totals, *panel.held, 0]) for panel in panels]
    top_bytes = max([budget_bytes if budget_bytes < 3 * max(highest) else 0, *highest, 1]) * 1.3
    longest = max([*(panel.ends_ms[-1] for panel in panels if panel.ends_ms), 1e-9])
    legend = panels[0].layers if len(panels[0].layers) > 1 else ()
    head = 26.0 if legend else 4.0
    canvas = Canvas(head + len(panels) * (height + gap) + 18, "; ".join(panel.title for panel in panels))
    if legend:
        names = {name: colour for panel in panels for colour, name, _ in panel.layers}
        if any(panel.held for panel in panels):
            names["reserved"] = "ink"
        canvas.legend(WIDTH - _RIGHT, 14, [(colour, name) for name, colour in names.items()])
    for index, panel in enumerate(panels):
        frame = _Frame(canvas, head + 20 + index * (height + gap), height, longest, top_bytes)
        frame.draw(panel, unit, budget_bytes)
    frame.label_time(below)
    return canvas.svg()


@dataclass
class _Frame:
    """Where a panel is drawn: the rectangle below `top`, `longest_ms` wide and `top_bytes` high."""

    canvas: Canvas
    top: float
    height: float
    longest_ms: float
    top_bytes: float

    def x(self, ms: float) -> float:
        return _LEFT + _INNER * ms / self.longest_ms

    def y(self, size: float) -> float:
        return self.top + self.height * (1 - size / self.top_bytes)

    def draw(self, panel: _Panel, unit: Unit, budget_bytes: int) -> None:
        canvas = self.canvas
        canvas.text(_LEFT, self.top - 6, panel.title, colour="ink", bold=True)
        canvas.text(_LEFT - 8, self.top - 6, unit.name, anchor="end")
        for value in ticks(self.top_bytes / unit.bytes, 4):
            y = self.y(value * unit.bytes)
            canvas.line((_LEFT, y, WIDTH - _RIGHT, y), "grid", 0.7)
            canvas.text(_LEFT - 8, y + 4, f"{value:g}", anchor="end")
        self._phases(panel)
        self._layers(panel)
        self._budget(budget_bytes)
        self._repeats(panel)
        self._peak(panel, unit, budget_bytes)

    def label_time(self, words: str) -> None:
        bottom = self.top + self.height
        for value in ticks(self.longest_ms, 8):
            self.canvas.text(self.x(value), bottom + 16, f"{value:g}", anchor="middle")
        self.canvas.text(WIDTH - _RIGHT, bottom + 34, words, anchor="end")

    def _phases(self, panel: _Panel) -> None:
        for name, begin, end in panel.phases:
            left, right = self.x(begin), self.x(end)
            self.canvas.box((left, self.top, right - left, self.height), name, opacity=0.1)
            if right - left > 7 * len(name):
                self.canvas.text(left + 4, self.top + 13, name, colour=name)

    def _layers(self, panel: _Panel) -> None:
        single = len(panel.layers) == 1
        below = [0] * len(panel.ends_ms)
        for colour, name, sizes in panel.layers:
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            if any(sizes):
                upper, lower = self._steps(panel, above), self._steps(panel, below)
                self.canvas.area(upper, lower, colour, 0.3 if single else 0.85, name)
                if single:
                    self.canvas.curve(upper, colour)
            below = above
        if panel.held:
            self.canvas.curve(self._steps(panel, panel.held), "ink", 0.9)

    def _steps(self, panel: _Panel, sizes: Sequence[int]) -> list[tuple[float, float]]:
        points, begin = [], 0.0
        for end, size in zip(panel.ends_ms, sizes, strict=True):
            y = self.y(size)
            points += [(self.x(begin), y), (self.x(end), y)]
            begin = end
        return points

    def _budget(self, budget_bytes: int) -> None:
        if budget_bytes > self.top_bytes:
            self.canvas.text(WIDTH - _RIGHT - 4, self.top - 6, "budget above", colour="budget", anchor="end")
            return
        y = self.y(budget_bytes)
        self.canvas.line((_LEFT, y, WIDTH - _RIGHT, y), "budget", 1.4, "6 4")
        self.canvas.text(WIDTH - _RIGHT - 4, y - 5, "budget", colour="budget", anchor="end")

    def _repeats(self, panel: _Panel) -> None:
        for begin, end in panel.repeats:
            left = self.x(begin)
            self.canvas.box((left, self.top + 1, max(self.x(end) - left, 0.5), 5), "again")
        if panel.repeats:
            self.canvas.text(self.x(panel.repeats[0][0]), self.top - 4, "recompute", colour="again")

    def _peak(self, panel: _Panel, unit: Unit, budget_bytes: int) -> None:
        if not panel.totals:
            return
        highest = max(panel.totals)
        row = panel.totals.index(highest)
        begin = panel.ends_ms[row - 1] if row else 0.0
        x, y = self.x((begin + panel.ends_ms[row]) / 2), self.y(highest)
        right = x < _LEFT + 0.6 * _INNER
        near = 0 <= self.y(highest) - self.y(budget_bytes) < 16  # its line would run through the words
        self.canvas.dot(x, y, "ink", 3)
        self.canvas.text(
            x + (7 if right else -7), y - (20 if near else 5), f"peak {unit.text(highest)}", colour="ink",
            anchor="start" if right else "end",
        )  # fmt: skip


def _runs(
    values: Sequence[int], starts: Sequence[float], ends: Sequence[float]
) -> Iterator[tuple[int, float, float]]:
    """Stretches of equal values: (value, begin ms, end ms)."""
    begin = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[begin]:
            yield values[begin], starts[begin], ends[index - 1]
            begin = index


def _closed(runs: Iterator[tuple[int, float, float]], longest: float) -> list[tuple[float, float]]:
    """Stretches of recomputation; gaps too small to see are closed."""
    spans: list[tuple[float, float]] = []
    for again, begin, end in runs:
        if not again:
            continue
        if spans and begin - spans[-1][1] <= longest / _MOST_POINTS:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return spans


def _thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `_MOST_POINTS` points, each the highest of its stretch of time."""
    rows = _highest_rows([time for time, _ in curve], [size for _, size in curve])
    return [(end, curve[row][1]) for row, end in rows]


def _highest_rows(ends: Sequence[float], sizes: Sequence[int]) -> list[tuple[int, float]]:
    """(row, end) of at most `_MOST_POINTS` stretches of time: the highest row of each, and its end."""
    if len(ends) <= _MOST_POINTS:
        return list(enumerate(ends))
    first, last = ends[0], ends[-1]
    edges = [first + (last - first) * index / _MOST_POINTS for index in range(1, _MOST_POINTS)]
    highest: dict[int, tuple[int, float]] = {}
    for row, end in enumerate(ends):
        stretch = bisect_right(edges, end)
        best = highest.get(stretch)
        highest[stretch] = (row if best is None or sizes[row] > sizes[best[0]] else best[0], end)
    return [highest[stretch] for stretch in sorted(highest)]
