# SPDX-License-Identifier: Apache-2.0
"""The charts of a report, each as one SVG element that stands in an HTML page.

Colours are CSS variables of the page, so that a chart follows the page into dark mode: matplotlib draws with
stand-in colours, and `_svg` replaces each by its variable. No pyplot: nothing global is touched.
"""

from __future__ import annotations

import importlib
import io
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale.core.plan import PHASES
from memscale.errors import MemScaleError

if TYPE_CHECKING:
    from memscale.core.plan import Plan, Timeline

Curve = Sequence[tuple[float, int]]
"""Points (milliseconds since the step began, bytes)."""

_STAND_INS = {
    "#010101": "var(--ink)",
    "#020202": "var(--soft)",
    "#030303": "var(--grid)",
    "#040404": "var(--plain)",
    "#050505": "var(--planned)",
    "#060606": "var(--again)",
    "#070707": "var(--budget)",
    "#080808": "var(--forward)",
    "#090909": "var(--backward)",
    "#0a0a0a": "var(--optimizer)",
}
_INK, _SOFT, _GRID, _PLAIN, _PLANNED, _AGAIN, _BUDGET, *_PHASE_COLOURS = _STAND_INS
_MOST_POINTS = 700  # of a curve; more cannot be told apart on a screen and make the file large
_WIDTH = 9.6  # inches of 72 px; the page scales it


def optional(name: str) -> Any:
    """Imports a package that only reports need.

    Raises:
        MemScaleError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MemScaleError(f"a report needs {package}: pip install memscale[report] ({error})") from error


def timelines(plan: Plan) -> str:
    """Predicted memory over the step: plain above, planned below, with the budget across both."""
    panels = [("plain", plan.plain.timeline, _PLAIN), ("planned", plan.predicted.timeline, _PLANNED)]
    scale = _Scale([*plan.plain.timeline.live_bytes, *plan.predicted.timeline.live_bytes, plan.budget_bytes])
    figure = _figure(5.2)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, (name, timeline, colour) in zip(axes, panels, strict=True):
        _dress(ax, scale)
        _shade_phases(ax, timeline)
        ends = _ends_ms(timeline)
        curve = _thinned(list(zip(ends, timeline.live_bytes, strict=True)))
        _area(ax, curve, scale, colour, plan.budget_bytes)
        _mark_recompute(ax, timeline)
        _budget_line(ax, plan.budget_bytes, scale)
        ax.set_title(f"{name}, predicted", loc="left")
    axes[0].set_ylim(0, scale.top)
    axes[0].set_xlim(left=0)
    axes[1].set_xlabel("predicted time, ms")
    return _svg(figure, "timelines")


def measured(curves: dict[str, Curve], budget_bytes: int) -> str:
    """Measured memory over the step, one panel for each curve, on one scale."""
    scale = _Scale([*(size for curve in curves.values() for _, size in curve), budget_bytes])
    figure = _figure(0.8 + 2.2 * len(curves))
    axes = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, (name, curve) in zip(axes, curves.items(), strict=True):
        _dress(ax, scale)
        _area(ax, _thinned(list(curve)), scale, _PLAIN if name == "plain" else _PLANNED, budget_bytes)
        _budget_line(ax, budget_bytes, scale)
        ax.set_title(f"{name}, measured", loc="left", parse_math=False)
    axes[0].set_ylim(0, scale.top)
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("measured time, ms")
    return _svg(figure, "measured")


def categories(plan: Plan) -> str:
    """Bytes by category at the moment of the peak, plain and planned."""
    sizes = {
        name: (plan.plain.by_category.get(name, 0), plan.predicted.by_category.get(name, 0))
        for name in [*plan.plain.by_category, *plan.predicted.by_category]
    }
    ordered = sorted(sizes.items(), key=lambda item: (max(item[1]), item[0]))
    scale = _Scale([size for pair in sizes.values() for size in pair])
    figure = _figure(0.9 + 0.55 * len(ordered))
    ax = figure.subplots()
    _dress(ax, None)
    ax.grid(visible=False, axis="y")
    for row, (_, pair) in enumerate(ordered):
        for size, shift, colour in zip(pair, (0.19, -0.19), (_PLAIN, _PLANNED), strict=True):
            ax.barh(row + shift, size / scale.unit, height=0.34, color=colour)
            ax.annotate(
                scale.text(size),
                (size / scale.unit, row + shift),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
    ax.set_yticks(range(len(ordered)), [name.replace("_", " ") for name, _ in ordered], parse_math=False)
    ax.set_xlim(0, scale.top * 1.08)
    ax.set_xlabel(scale.name)
    _legend(figure, [("plain", _PLAIN), ("planned", _PLANNED)])
    return _svg(figure, "categories")


def frontier(plan: Plan) -> str:
    """Peak against step time of every plan there was to choose from, with the one chosen."""
    chosen = (plan.predicted.device_used_peak_bytes, plan.predicted.step_time_ns)
    points = sorted({*plan.frontier, chosen})
    near = plan.budget_bytes < 2 * points[-1][0]  # a budget far away would squeeze the points together
    scale = _Scale([points[-1][0], plan.budget_bytes if near else 0])
    peaks, times = [peak / scale.unit for peak, _ in points], [ns / 1e6 for _, ns in points]
    at = (chosen[0] / scale.unit, chosen[1] / 1e6)
    figure = _figure(3.4)
    ax = figure.subplots()
    _dress(ax, None)
    ax.step(peaks, times, where="post", color=_GRID)
    ax.plot(peaks, times, "o", ms=4, color=_PLAIN)
    ax.plot(*at, "o", ms=10, color=_PLANNED)
    ax.annotate("chosen", at, (-8, -4), textcoords="offset points", ha="right", va="top", color=_PLANNED)
    if near:
        ax.axvline(plan.budget_bytes / scale.unit, color=_BUDGET, ls="--", lw=1.4)
        ax.annotate(
            "budget", (plan.budget_bytes / scale.unit, 1), (5, -12), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=_BUDGET,
        )  # fmt: skip
    ax.set_xlim(0, scale.top)
    ax.set_xlabel(f"peak, {scale.name}")
    ax.set_ylabel("predicted step time, ms")
    return _svg(figure, "frontier")


class _Scale:
    """A unit that suits the largest of some sizes, and a round upper end."""

    def __init__(self, sizes: Sequence[int]) -> None:
        largest = max([*sizes, 1])
        self.unit, self.name = 1, "B"
        for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
            if largest >= 2 * 1024**power:
                self.unit, self.name = 1024**power, name
        self.top = largest / self.unit * 1.12

    def text(self, size: int) -> str:
        value = size / self.unit
        return (
            f"{value:.0f}"
            if value >= 100 or value == 0
            else f"{value:.1f}"
            if value >= 0.1
            else f"{value:.1g}"
        )


def _figure(height: float) -> Any:
    return optional("matplotlib.figure").Figure(figsize=(_WIDTH, height), layout="constrained")


def _dress(ax: Any, scale: _Scale | None) -> None:
    ax.spines[:].set_visible(False)
    ax.tick_params(color=_GRID, labelcolor=_SOFT, length=0)
    ax.xaxis.label.set_color(_SOFT)
    ax.yaxis.label.set_color(_SOFT)
    ax.grid(color=_GRID, lw=0.6)
    ax.set_axisbelow(True)
    if scale is not None:
        ax.set_ylabel(scale.name)


def _area(ax: Any, curve: Curve, scale: _Scale, colour: str, budget_bytes: int) -> None:
    """A curve, filled, with its peak named: above the budget line if it would lie on it."""
    times, sizes = [time for time, _ in curve], [size / scale.unit for _, size in curve]
    ax.fill_between(times, sizes, step="pre", color=colour, alpha=0.25, lw=0)
    ax.step(times, sizes, where="pre", color=colour, lw=1.3)
    if curve:
        at, highest = max(curve, key=lambda point: point[1])
        ax.plot(at, highest / scale.unit, "o", ms=4, color=colour)
        right = at < 0.6 * curve[-1][0]
        up = 12 if 0 <= (budget_bytes - highest) / scale.unit < 0.07 * scale.top else 3
        ax.annotate(
            f"peak {scale.text(highest)} {scale.name}", (at, highest / scale.unit), (6 if right else -6, up),
            textcoords="offset points", ha="left" if right else "right", color=_INK,
        )  # fmt: skip


def _budget_line(ax: Any, budget_bytes: int, scale: _Scale) -> None:
    ax.axhline(budget_bytes / scale.unit, color=_BUDGET, ls="--", lw=1.4)
    ax.annotate(
        "budget", (1, budget_bytes / scale.unit), (-4, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", color=_BUDGET,
    )  # fmt: skip


def _ends_ms(timeline: Timeline) -> list[float]:
    """When each operation ends: where the next begins. The last one's end is not known; it gets its start."""
    starts = [ns / 1e6 for ns in timeline.time_ns]
    return [*starts[1:], *starts[-1:]]


def _runs(values: Sequence[int], timeline: Timeline) -> Iterator[tuple[int, float, float]]:
    """Stretches of equal values: (value, begin ms, end ms)."""
    ends, begin = _ends_ms(timeline), 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[begin]:
            yield values[begin], timeline.time_ns[begin] / 1e6, ends[index - 1]
            begin = index


def _shade_phases(ax: Any, timeline: Timeline) -> None:
    for phase, begin, end in _runs(timeline.phase, timeline):
        colour = _PHASE_COLOURS[phase]
        ax.axvspan(begin, end, color=colour, alpha=0.1, lw=0)
        ax.annotate(
            PHASES[phase], (begin, 0), (3, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
            color=_SOFT, fontsize=9,
        )  # fmt: skip


def _mark_recompute(ax: Any, timeline: Timeline) -> None:
    """A bar along the top wherever something runs for the second time; gaps too small to see are closed."""
    spans: list[tuple[float, float]] = []
    gap = timeline.time_ns[-1] / 1e6 / _MOST_POINTS if timeline.time_ns else 0.0
    for again, begin, end in _runs(timeline.recompute, timeline):
        if not again:
            continue
        if spans and begin - spans[-1][1] <= gap:
            begin = spans.pop()[0]
        spans.append((begin, end))
    for begin, end in spans:
        ax.axvspan(begin, end, ymin=0.955, ymax=0.985, color=_AGAIN, lw=0)
    if spans:
        ax.annotate(
            "runs again", (spans[0][0], 0.955), (0, -11), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=_AGAIN, fontsize=9,
        )  # fmt: skip


def _legend(figure: Any, entries: Sequence[tuple[str, str]]) -> None:
    patch = optional("matplotlib.patches").Patch
    handles = [patch(color=colour, label=name) for name, colour in entries]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, labelcolor=_SOFT
    )


def _thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `_MOST_POINTS` points, each the highest of its stretch of time."""
    if len(curve) <= _MOST_POINTS:
        return curve
    first, last = curve[0][0], curve[-1][0]
    edges = [first + (last - first) * index / _MOST_POINTS for index in range(1, _MOST_POINTS)]
    highest: dict[int, tuple[float, int]] = {}
    for point in curve:
        stretch = bisect_right(edges, point[0])
        if stretch not in highest or point[1] > highest[stretch][1]:
            highest[stretch] = point
    return list(highest.values())


def _svg(figure: Any, name: str) -> str:
    """The figure as an SVG element in the page's colours, without anything that names another site."""
    buffer = io.StringIO()
    to_hex = optional("matplotlib.colors").to_hex
    style = {
        "svg.fonttype": "none",  # text stays text: small, and searchable
        "svg.hashsalt": name,  # the same identifiers every time, other ones for each chart
    }
    with optional("matplotlib").rc_context(style):
        for text in figure.findobj(optional("matplotlib.text").Text):
            if to_hex(text.get_color()) == "#000000":  # matplotlib's own default
                text.set_color(_INK)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's
    for colour, variable in _STAND_INS.items():
        svg = svg.replace(colour, variable)
    return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1).strip()
