# SPDX-License-Identifier: Apache-2.0
"""A plan as one HTML file that explains it: curves, categories, frontier, every choice.

The file needs nothing else: no scripts, no network. Charts are SVG inside the page.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memscale.core.units import format_bytes
from memscale.observability import report_charts
from memscale.observability.report_charts import Curve, optional

if TYPE_CHECKING:
    from memscale.core.plan import Choice, Plan

__all__ = ["write_report"]


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    title: str = "MemScale plan",
    measured: Sequence[tuple[str, str]] | None = None,
    timeline_measured: dict[str, list[tuple[float, int]]] | None = None,
) -> None:
    """Writes a report about a plan.

    Args:
        plan: from `memscale.plan`, from `executor.plan`, or read with `Plan.from_json`.
        path: the HTML file; replaced if it exists.
        title: heading of the page.
        measured: (name, value) rows of what a real run showed, as a table.
        timeline_measured: measured memory over one step, by name ("plain" and "wrapped", say): points
            (milliseconds since the step began, bytes).

    Raises:
        MemScaleError: matplotlib or Jinja2 is not installed.
        OSError: the file cannot be written.

    Example:
        >>> write_report(memscale.plan(model, sample_input=batch), "report.html")
    """
    page = _page(
        plan,
        title,
        measured or (),
        {name: curve for name, curve in (timeline_measured or {}).items() if curve},
    )
    Path(path).write_text(page, encoding="utf-8")


def _page(plan: Plan, title: str, measured: Sequence[tuple[str, str]], curves: dict[str, Curve]) -> str:
    jinja2 = optional("jinja2")
    template = resources.files("memscale.observability").joinpath("templates/report.html.j2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = format_bytes
    safe = optional("markupsafe").Markup  # the charts: matplotlib escapes what is in them
    text: str = environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        plan=plan,
        summary=[_split(line) for line in plan.summary_lines()],
        measured=measured,
        active=[_row(choice) for choice in plan.active],
        kept=[_row(choice) for choice in plan.choices if not choice.techniques],
        timelines=safe(report_charts.timelines(plan)) if plan.predicted.timeline.live_bytes else "",
        categories=safe(report_charts.categories(plan)) if plan.predicted.by_category else "",
        frontier=safe(report_charts.frontier(plan)) if plan.frontier else "",
        measured_chart=safe(report_charts.measured(curves, plan.budget_bytes)) if curves else "",
    )
    return text


def _split(line: str) -> tuple[str, str]:
    """A line of the plan's summary as its first word and the rest."""
    name, _, rest = line.partition(" ")
    return name, rest.strip()


def _row(choice: Choice) -> dict[str, Any]:
    return {
        "module": choice.module or "(model)",
        "type": choice.type,
        "technique": " + ".join(choice.techniques) or "keep",
        "bytes": format_bytes(choice.bytes),
        "time": f"{choice.ns / 1e6:.2f} ms",
        "reason": choice.reason,
    }
