# SPDX-License-Identifier: Apache-2.0
"""The charts of a report, each as one SVG element that stands in an HTML page (see `report_svg`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from memscale.core.timeline import PHASES
from memscale.observability.report_svg import WIDTH, Canvas, Unit, ticks

if TYPE_CHECKING:
    from memscale.core.plan import Plan
    from memscale.core.timeline import Timeline
    from memscale.observability.step_view import StepView

Curve = Sequence[tuple[float, int]]
"""Points (milliseconds since the step began, bytes)."""

CATEGORY_ORDER: Final = (
    "context", "parameter", "buffer", "optimizer_state", "gradient", "input", "workspace", "activation",
    "temporary", "fragmentation",
)  # fmt: skip
"""From the bottom of a stack to its top: what stays, then what comes and goes."""

_MOST_POINTS: Final = 640  # of a curve; more cannot be told apart on a screen and make the file large
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
        repeats: (begin ms, end ms) of what runs a second time.
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


# ---- memory over time ------------------------------------------------------------------------------


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
            self.canvas.text(self.x(panel.repeats[0][0]), self.top - 4, "runs again", colour="again")

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


# ---- the peak --------------------------------------------------------------------------------------


def categories(plan: Plan) -> str:
    """Bytes by category at the moment of the peak, plain and planned."""
    sizes = {
        name: (plan.plain.by_category.get(name, 0), plan.predicted.by_category.get(name, 0))
        for name in [*plan.plain.by_category, *plan.predicted.by_category]
    }
    ordered = sorted(sizes.items(), key=lambda item: (-max(item[1]), item[0]))
    unit = Unit(size for pair in sizes.values() for size in pair)
    most = max([size for pair in sizes.values() for size in pair] or [1]) or 1
    row, left = 40.0, 150.0
    canvas = Canvas(30 + row * len(ordered), "bytes by category at the peak, plain and planned")
    canvas.legend(WIDTH - _RIGHT, 14, [("plain", "plain"), ("planned", "planned")])
    for index, (name, pair) in enumerate(ordered):
        y = 26 + row * index
        canvas.text(left - 10, y + 19, name.replace("_", " "), colour="ink", anchor="end")
        for size, shift, colour in zip(pair, (0.0, 15.0), ("plain", "planned"), strict=True):
            width = (WIDTH - left - 110) * size / most
            canvas.box((left, y + shift, max(width, 1), 12), colour, f"{name}: {size} bytes")
            canvas.text(left + width + 6, y + shift + 10.5, unit.text(size))
    return canvas.svg()


@dataclass(frozen=True)
class Step:
    """One bar of a waterfall: a change, or with `total` a level that is reached."""

    name: str
    bytes: int
    colour: str
    total: bool = False


def waterfall(steps: Sequence[Step], label: str) -> str:
    """Bars from level to level, one below the other. Each change begins where the last bar ended."""
    row, left, room = 27.0, 250.0, 120.0
    level, spans = 0, []
    for step in steps:
        begin = 0 if step.total else level
        level = step.bytes if step.total else level + step.bytes
        spans.append((begin, level))
    most = max([*(max(span) for span in spans), 1])
    unit = Unit([most])
    canvas = Canvas(8 + row * len(steps), label)

    def x(size: int) -> float:
        return left + (WIDTH - left - room) * size / most

    for index, (step, (begin, end)) in enumerate(zip(steps, spans, strict=True)):
        y = 4 + row * index
        low, high = sorted((begin, end))
        canvas.text(left - 10, y + 15, _shortened(step.name, 36), colour="ink", anchor="end", bold=step.total)
        canvas.box(
            (x(low), y + 3, max(x(high) - x(low), 1), row - 9),
            step.colour,
            f"{step.name}: {step.bytes} bytes",
        )
        sign = "" if step.total or step.bytes < 0 else "+"
        canvas.text(
            x(high) + 6, y + 16, f"{sign}{unit.text(step.bytes)}", colour="ink" if step.total else "soft"
        )
        if index + 1 < len(steps):
            canvas.line((x(end), y + row - 6, x(end), y + row + 3), "soft", 0.8)
    return canvas.svg()


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def frontier(plan: Plan) -> str:
    """Peak against step time of every plan there was to choose from, with the one chosen."""
    chosen = (plan.predicted.device_used_peak_bytes, plan.predicted.step_time_ns)
    points = sorted({*plan.frontier, chosen})
    near = plan.budget_bytes < 2 * points[-1][0]  # a budget far away would squeeze the points together
    unit = Unit([points[-1][0], plan.budget_bytes if near else 0])
    most = max(points[-1][0], plan.budget_bytes if near else 0, 1) * 1.08
    fastest, slowest, top, height = *_time_axis([ns / 1e6 for _, ns in points]), 24.0, 230.0
    canvas = Canvas(top + height + 44, "peak against step time of every plan")

    def at(point: tuple[int, int]) -> tuple[float, float]:
        return _LEFT + _INNER * point[0] / most, high(point[1] / 1e6)

    def high(ms: float) -> float:
        return top + height * (1 - (ms - fastest) / (slowest - fastest))

    canvas.text(4, 12, "predicted step time, ms")
    for value in ticks(slowest, least=fastest):
        y = high(value)
        canvas.line((_LEFT, y, WIDTH - _RIGHT, y), "grid", 0.7)
        canvas.text(_LEFT - 8, y + 4, f"{value:g}", anchor="end")
    for value in ticks(most / unit.bytes, 8):
        canvas.text(
            _LEFT + _INNER * value * unit.bytes / most, top + height + 16, f"{value:g}", anchor="middle"
        )
    canvas.text(WIDTH - _RIGHT, top + height + 34, f"peak, {unit.name}", anchor="end")
    places = [at(point) for point in points]
    corners = [place for (x, y), (_, after) in zip(places, [*places[1:], places[-1]], strict=True)
               for place in ((x, y), (x, after))]  # fmt: skip
    if near:
        x = _LEFT + _INNER * plan.budget_bytes / most
        canvas.line((x, top, x, top + height), "budget", 1.4, "6 4")
        canvas.text(x - 5, top + height - 6, "budget", colour="budget", anchor="end")
    canvas.curve(corners, "grid", 1.2)
    for place, (peak, ns) in zip(places, points, strict=True):
        canvas.dot(*place, "plain", 3, f"peak {unit.text(peak)}, {ns / 1e6:.1f} ms")
    x, y = at(chosen)
    canvas.dot(x, y, "planned", 6)
    canvas.text(x + 9, y - 8, "chosen", colour="planned", bold=True)
    return canvas.svg()


def _time_axis(times: Sequence[float]) -> tuple[float, float]:
    """Where an axis of times begins and ends: at 0, unless all lie close together far away from it."""
    low, high = min(times), max(times)
    spread = high - low
    if spread * 2 < high and spread > 0:
        return low - spread * 0.25, high + spread * 0.25
    return 0.0, max(high * 1.08, 1e-9)


# ---- the allocator ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A stretch of a segment: `colour` says what it holds, "" that it is free."""

    bytes: int
    colour: str
    tip: str


def segments(found: Sequence[Sequence[Block]], label: str) -> str:
    """A map of memory: segments side by side in rows, each with its blocks in order of address.

    Args:
        found: the blocks of each segment, in the order to show.
        label: for readers that do not see.
    """
    sizes = [sum(block.bytes for block in blocks) for blocks in found]
    rows = min(max(round(sum(sizes) / max([*sizes, 1])), 6), 18)
    width_bytes = max([*sizes, -(-sum(sizes) // rows), 1])
    scale, row, gap = (WIDTH - 2) / (width_bytes * 1.02), 30.0, 3.0
    boxes, x, y = [], 0.0, 2.0
    for blocks, size in zip(found, sizes, strict=True):
        if x > 0 and x + size * scale > WIDTH:
            x, y = 0.0, y + row
        boxes.append((x, y, blocks, size * scale))
        x += size * scale + gap
    canvas = Canvas(y + row + 2, label)
    for x, y, blocks, width in boxes:
        canvas.box((x, y, max(width, 0.5), row - 8), "free")
        for begin, end, colour, tip in _merged(blocks, scale):
            canvas.box((x + begin, y, end - begin, row - 8), colour, tip)
    return canvas.svg()


def _merged(blocks: Sequence[Block], scale: float) -> Iterator[tuple[float, float, str, str]]:
    """Blocks in use as (begin, end, colour, tip) in pixels; those too narrow to see are merged."""
    at = 0.0
    pending: tuple[float, float, str, str] | None = None
    for block in blocks:
        begin, at = at, at + block.bytes * scale
        if not block.colour:
            continue
        if (
            pending is not None
            and begin - pending[1] < 0.3
            and (pending[2] == block.colour and at - pending[0] < 1.5)
        ):
            pending = (pending[0], at, block.colour, f"{block.tip} and others")
            continue
        if pending is not None:
            yield pending
        pending = (begin, at, block.colour, block.tip)
    if pending is not None:
        yield pending


# ---- common ----------------------------------------------------------------------------------------


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
    """Stretches in which something runs again; gaps too small to see are closed."""
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
