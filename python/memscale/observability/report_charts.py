# SPDX-License-Identifier: Apache-2.0
"""Charts of a report: the peak, the frontier, the allocator. Each is one SVG element (see `report_svg`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memscale.observability.report_svg import WIDTH, Canvas, Unit, ticks

if TYPE_CHECKING:
    from memscale.plans.plan import Plan

_LEFT, _RIGHT = 64, 12
_INNER: Final = WIDTH - _LEFT - _RIGHT


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
    fastest, slowest, top, height = *time_axis([ns / 1e6 for _, ns in points]), 24.0, 230.0
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


def time_axis(times: Sequence[float]) -> tuple[float, float]:
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
