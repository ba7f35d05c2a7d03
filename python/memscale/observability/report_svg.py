# SPDX-License-Identifier: Apache-2.0
"""Draws shapes and text of one chart as an SVG element of an HTML page.

Colours are CSS variables of the page, so that a chart follows the page into dark mode and onto paper. Text
stays text. Coordinates are pixels of a drawing 960 wide, which the page scales, with one digit after the
point: a screen shows no more, and files stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from memscale.units import format_bytes

__all__ = ["WIDTH", "Canvas", "Unit", "ticks"]

WIDTH: Final = 960

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_CHARACTER: Final = 6.7  # pixels of an average character at 12 pixels


class Unit:
    """A unit of memory that suits the largest of some sizes."""

    def __init__(self, sizes: Iterable[int]) -> None:
        largest = max([*sizes, 1])
        self.bytes, self.name = 1, "B"
        for power, name in enumerate(_UNITS, start=1):
            if largest >= 2 * 1024**power:
                self.bytes, self.name = 1024**power, name

    def number(self, size: int) -> str:
        """A size in this unit, without its name."""
        value = abs(size) / self.bytes
        sign = "−" if size < 0 else ""
        if value >= 99.95 or value == 0:
            return f"{sign}{value:.0f}"
        return f"{sign}{value:.1f}" if value >= 0.1 else f"{sign}{value:.1g}"

    def text(self, size: int) -> str:
        """A size in this unit, with its name; one that is too small for it in its own."""
        if size and abs(size) * 10 < self.bytes:
            return format_bytes(size).replace("-", "−")
        return f"{self.number(size)} {self.name}"


def ticks(most: float, count: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers from `least` up to `most`, about `count` of them."""
    if most <= least:
        return [least]
    rough = (most - least) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(least / step), int(most / step * 1.0001) + 1)]


class Canvas:
    """One chart under construction."""

    def __init__(self, height: float, label: str) -> None:
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def svg(self) -> str:
        """The finished element."""
        head = f'<svg viewBox="0 0 {WIDTH} {_n(self.height)}" role="img" aria-label="{escape(self._label)}">'
        return "\n".join([head, *self._parts, "</svg>"])

    def line(
        self, ends: tuple[float, float, float, float], colour: str, width: float = 1, dash: str = ""
    ) -> None:
        """A straight line from (x1, y1) to (x2, y2)."""
        x1, y1, x2, y2 = map(_n, ends)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="var(--{colour})" stroke-width="{_n(width)}"{dashes}/>'
        )

    def box(
        self, box: tuple[float, float, float, float], colour: str, tip: str = "", opacity: float = 1
    ) -> None:
        """A filled rectangle (x, y, width, height), with a text that shows when it is pointed at."""
        x, y, width, height = map(_n, box)
        seen = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
        head = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="var(--{colour})"{seen}'
        self._parts.append(f"{head}><title>{escape(tip)}</title></rect>" if tip else f"{head}/>")

    def area(
        self, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], colour: str,
        opacity: float = 1, tip: str = "",
    ) -> None:  # fmt: skip
        """What lies between two curves over the same stretch."""
        path = f"{_path(upper)}{_path(lower[::-1], first='L')}Z"
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<path d="{path}" fill="var(--{colour})" fill-opacity="{opacity:g}">{title}</path>'
        )

    def curve(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.4) -> None:
        """A line through points."""
        self._parts.append(
            f'<path d="{_path(points)}" fill="none" stroke="var(--{colour})" stroke-width="{_n(width)}"/>'
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5, tip: str = "") -> None:
        """A filled circle."""
        head = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="var(--{colour})"'
        self._parts.append(f"{head}><title>{escape(tip)}</title></circle>" if tip else f"{head}/>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = "soft",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text; `anchor` is start, middle or end."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" fill="var(--{colour})"{where}{weight}>{escape(text)}</text>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Colours and what they stand for, in a row that ends at `x`."""
        for colour, name in reversed(entries):
            x -= _CHARACTER * len(name)
            self.text(x, y, name)
            x -= 15
            self.box((x, y - 9, 10, 10), colour)
            x -= 14


def _n(number: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{number:.1f}".rstrip("0").rstrip(".") if number else "0"


def _path(points: Sequence[tuple[float, float]], first: str = "M") -> str:
    """Points as path commands. Points in one line, sideways or upright, are left out."""
    parts: list[str] = []
    last = (math.nan, math.nan)
    for x, y in points:
        if not parts:
            parts.append(f"{first}{_n(x)} {_n(y)}")
        elif _n(y) == _n(last[1]):
            if _n(x) != _n(last[0]):
                parts.append(f"H{_n(x)}")
        elif _n(x) == _n(last[0]):
            parts.append(f"V{_n(y)}")
        else:
            parts.append(f"L{_n(x)} {_n(y)}")
        last = (x, y)
    return "".join(parts)
