# SPDX-License-Identifier: Apache-2.0
"""The picture of the landing page: a model's peaks on a card under budgets, by `gpu_budget.csv`."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

from figures import Results

__all__ = ["Bar", "bars_of", "caption", "picture"]

MODEL: Final = ("gpt2", "fp32")
"""The model and precision that are drawn."""

GIB: Final = 1 << 30
WIDTH: Final = 720
LEFT: Final = 150
RIGHT: Final = 120
STEP: Final = 44
HEIGHT_OF_BAR: Final = 20


@dataclass(frozen=True)
class Bar:
    """A step that ran: all of it in bytes, with what the CUDA context takes.

    Attributes:
        label: what was asked for.
        measured: the peak that the card had.
        predicted: the peak that was predicted before.
        budget: what it was not to exceed; None: no budget.
    """

    label: str
    measured: int
    predicted: int
    budget: int | None


@dataclass(frozen=True)
class Run:
    """The rows of one picture, and where they were measured."""

    bars: tuple[Bar, ...]
    machine: str
    day: str
    commit: str
    torch: str


def bars_of(results: Results) -> Run:
    """The plain step and each budget, of the last commit that has them.

    Raises:
        figures.FigureError: there is no such row.
    """
    rows = results.rows("gpu_budget", None, model=MODEL[0], precision=MODEL[1])
    first = rows[0]
    context = int(first["context_bytes"])
    bars = [
        Bar(
            "no budget",
            context + int(first["plain_reserved_bytes"]),
            context + int(first["plain_predicted_reserved_bytes"]),
            None,
        )
    ]
    for row in rows:
        context, budget = int(row["context_bytes"]), int(row["budget_bytes"])
        measured, predicted = int(row["reserved_bytes"]), int(row["predicted_reserved_bytes"])
        bars.append(Bar(f"budget {gib(budget)}", context + measured, context + predicted, budget))
    return Run(tuple(bars), first["machine"], first["date"][:10], first["commit"].rstrip("+"), first["torch"])


def gib(count: int) -> str:
    """Bytes as text."""
    return f"{count / GIB:.2f} GiB"


def caption(run: Run) -> str:
    """What the picture shows, in words, with where it was measured."""
    held = sum(1 for bar in run.bars if bar.budget is not None and bar.measured <= bar.budget)
    budgets = sum(1 for bar in run.bars if bar.budget is not None)
    worst = max(abs(bar.predicted / bar.measured - 1) for bar in run.bars)
    return (
        f"A training step of GPT-2 in FP32 on one {run.machine}: its peak without a budget, and under "
        f"{budgets} budgets, {held} of them held. The prediction, made before the step ran, is within "
        f"{100 * worst:.2f} % of the measured peak. PyTorch {run.torch}, {run.day}, commit {run.commit}."
    )


def _description(run: Run) -> str:
    parts = [f"{bar.label}: measured {gib(bar.measured)}, predicted {gib(bar.predicted)}" for bar in run.bars]
    return "; ".join(parts)


def picture(run: Run) -> str:
    """An SVG that takes its colours from the page: classes `bar`, `budget`, `predicted`, `currentColor`."""
    longest = max(max(bar.measured, bar.budget or 0) for bar in run.bars)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = STEP * len(run.bars) + 44
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="picture-title picture-text">',
        '<title id="picture-title">Measured peak of a training step under budgets</title>',
        f'<desc id="picture-text">{escape(_description(run))}</desc>',
    ]
    for at, bar in enumerate(run.bars):
        parts += _drawn(bar, 8 + at * STEP, scale)
    foot = height - 12
    parts += [
        f'<rect class="bar" x="{LEFT}" y="{foot - 11}" width="22" height="12"/>',
        f'<text x="{LEFT + 30}" y="{foot}">measured peak</text>',
        f'<path class="predicted" d="M{LEFT + 160} {foot - 13}v16"/>',
        f'<text x="{LEFT + 170}" y="{foot}">predicted</text>',
        f'<path class="budget" d="M{LEFT + 270} {foot - 13}v16"/>',
        f'<text x="{LEFT + 280}" y="{foot}">budget</text>',
    ]
    return "\n".join([*parts, "</svg>"])


def _drawn(bar: Bar, top: int, scale: float) -> list[str]:
    middle = top + HEIGHT_OF_BAR - 5
    width = bar.measured * scale
    end = LEFT + width
    parts = [
        f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect class="bar" x="{LEFT}" y="{top}" width="{width:.1f}" height="{HEIGHT_OF_BAR}"/>',
        f'<path class="predicted" d="M{LEFT + bar.predicted * scale:.1f} {top + 3}v{HEIGHT_OF_BAR - 6}"/>',
    ]
    if bar.budget is not None:
        at = LEFT + bar.budget * scale
        end = max(end, at)
        parts.append(f'<path class="budget" d="M{at:.1f} {top - 5}v{HEIGHT_OF_BAR + 10}"/>')
    parts.append(f'<text x="{end + 10:.1f}" y="{middle}">{gib(bar.measured)}</text>')
    return parts
