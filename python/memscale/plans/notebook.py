# SPDX-License-Identifier: Apache-2.0
"""Plans and predictions as HTML for a notebook: a verdict, peaks side by side, what fills them, what is done.

Tables alone, in the colours of the notebook; the whole page is `save_report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from memscale.plans.rows import plan_rows
from memscale.plans.words import bytes_range, ms_range
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.data import PlanData, PredictionData

__all__ = ["plan_html", "prediction_html"]

_MOST_ROWS: Final = 12


def prediction_html(prediction: PredictionData) -> str:
    """A prediction, its plan's choices beside it where it has one."""
    steps = {"planned" if prediction.plain else "step": prediction}
    if prediction.plain is not None:
        steps = {"plain": prediction.plain, **steps}
    plan = prediction.plan
    return _whole(prediction, steps, None if plan is None else _choices(plan), prediction.advice)


def plan_html(plan: PlanData) -> str:
    """A plan: what it brings, and what it does."""
    steps = {"plain": plan.plain, "planned": plan.predicted}
    return _whole(plan.predicted, steps, _choices(plan), plan.advice)


def _whole(
    step: PredictionData, steps: dict[str, PredictionData], choices: str | None, advice: Sequence[str]
) -> str:
    verdict = "fits" if step.fits else "does not fit"
    peak, budget = format_bytes(step.device_used_peak_bytes), format_bytes(step.budget_bytes)
    where = f" on {step.device}" if step.device else ""
    parts = [f"<p><b>{verdict}</b>: {peak} of {budget}{escape(where)}</p>", _peaks(steps), choices or ""]
    if advice:
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in advice) + "</ul>")
    return f"<div>{''.join(parts)}</div>"


def _peaks(steps: dict[str, PredictionData]) -> str:
    """Peaks, step time, and what is alive at the peaks, a column for each step."""
    found = list(steps.values())
    rows = [
        ("device used", [format_bytes(step.device_used_peak_bytes) for step in found]),
        ("allocated", [format_bytes(step.allocated_peak_bytes) for step in found]),
        ("step time", [f"{step.step_time_ns / 1e6:.1f} ms" for step in found]),
    ]
    names = {name for step in found for name, size in step.by_category.items() if size > 0}
    for name in sorted(names, key=lambda name: -max(step.by_category.get(name, 0) for step in found)):
        sizes = [format_bytes(step.by_category.get(name, 0)) for step in found]
        rows.append((name.replace("_", " "), sizes))
    return _table("at the peak", ["", *steps], ([name, *cells] for name, cells in rows))


def _choices(plan: PlanData) -> str:
    rows = [row for row in plan_rows(plan) if row.applied]
    if not rows and not plan.steps:
        return "<p>nothing is done: every module is kept</p>"
    cells = [
        [row.modules, row.technique, bytes_range(row.bytes), ms_range(row.ns), row.reason]
        for row in rows[:_MOST_ROWS]
    ]
    cells += [["", step.technique, "", "", ""] for step in plan.steps]
    more = f"<p>and {len(rows) - _MOST_ROWS} more: explain()</p>" if len(rows) > _MOST_ROWS else ""
    return _table("what is done", ["module", "technique", "frees", "costs", "why"], cells) + more


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{columns}</tr>{body}</table>"
