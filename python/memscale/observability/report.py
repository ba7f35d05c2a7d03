# SPDX-License-Identifier: Apache-2.0
"""A plan or a prediction as one HTML file that explains it: curves, peak, modules, frontier, every choice.

The file needs nothing else: no scripts, no network. Charts are SVG inside the page.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.errors import MemScaleError
from memscale.observability import report_charts, report_timelines
from memscale.observability.report_detail import Detail, category_steps
from memscale.observability.report_offload import offload_chart, tier_rows
from memscale.observability.report_timelines import CATEGORY_ORDER, Curve
from memscale.plans.plan import Plan
from memscale.plans.rows import PlanRow, plan_rows
from memscale.plans.words import bytes_range, ms_range
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.offload.figures import OffloadFigures
    from memscale.plans.plan import Holder, Prediction

__all__ = ["write_report"]

_HOLDERS: Final = 25
_MODULES_AT_ONCE: Final = 24
_MOST_MODULES: Final = 400


def write_report(
    subject: Plan | Prediction,
    path: str | os.PathLike[str],
    *,
    title: str = "MemScale plan",
    measured: Sequence[tuple[str, str]] | None = None,
    timeline_measured: dict[str, list[tuple[float, int]]] | None = None,
    detail: Detail | None = None,
    offload: OffloadFigures | None = None,
) -> None:
    """Writes a report about a plan, or about a prediction and its plan.

    Args:
        subject: from `memscale.plan` or `memscale.predict`, from `executor.plan`, or read from JSON.
        path: the HTML file; replaced if it exists.
        title: heading of the page.
        measured: (name, value) rows of what a real run showed, as a table.
        timeline_measured: measured memory over one step, by name ("plain" and "wrapped", say): points
            (milliseconds since the step began, bytes).
        detail: what only the memory graph knows, see `report_detail.detail_of`; without it the page lacks
            categories over time, what each part of the plan saves, and the allocator's segments.
        offload: what the engine of a run has done, from `executor.offload_figures()`.

    Raises:
        ValueError: a prediction without a plan.
        MemScaleError: Jinja2 is not installed.
        OSError: the file cannot be written.

    Example:
        >>> write_report(memscale.plan(model, sample_input=batch), "report.html")
    """
    plan = subject if isinstance(subject, Plan) else subject.plan
    if plan is None:
        raise ValueError("this prediction has no plan: it is part of another prediction; give that one")
    curves: dict[str, Curve] = {name: curve for name, curve in (timeline_measured or {}).items() if curve}
    advice = plan.advice if isinstance(subject, Plan) else subject.advice
    page = _page(plan, advice, title, measured or (), curves, detail or Detail(), offload)
    Path(path).write_text(page, encoding="utf-8")


def _page(
    plan: Plan,
    advice: Sequence[str],
    title: str,
    measured: Sequence[tuple[str, str]],
    curves: dict[str, Curve],
    detail: Detail,
    offload: OffloadFigures | None,
) -> str:
    jinja2 = _optional("jinja2")
    template = resources.files("memscale.observability").joinpath("templates/report.html.j2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = format_bytes
    groups = plan.predicted.groups or plan.predicted.holders
    rows = plan_rows(plan)
    text: str = environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        plan=plan,
        about=detail.about,
        advice=advice,
        summary=[_split(line) for line in plan.summary_lines()],
        measured=measured,
        active=[_row(row) for row in rows if row.applied],
        kept=[_row(row) for row in rows if not row.applied],
        kept_count=sum(row.count for row in rows if not row.applied),
        peak=_moment(plan.predicted),
        holders=[_holder(holder) for holder in groups[:_HOLDERS]],
        modules=_modules(plan),
        modules_at_once=_MODULES_AT_ONCE,
        segment_legend=[name for name in CATEGORY_ORDER if name not in ("context", "fragmentation")],
        charts=_charts(plan, curves, detail, offload),
        offload=offload,
        tiers=() if offload is None else tier_rows(offload),
    )
    return text


def _charts(
    plan: Plan, curves: dict[str, Curve], detail: Detail, offload: OffloadFigures | None
) -> dict[str, Any]:
    """Every chart by name; "" for one that there is nothing to draw for."""
    safe = _optional("markupsafe").Markup  # the charts escape what is in them
    budget = plan.budget_bytes - plan.predicted.context_bytes
    drawn = {
        "timelines": "",
        "measured": report_timelines.measured(curves, plan.budget_bytes) if curves else "",
        "categories": report_charts.categories(plan) if plan.predicted.by_category else "",
        "saved": "",
        "changes": "",
        "segments": "",
        "offload": "" if offload is None else offload_chart(offload),
        "frontier": report_charts.frontier(plan) if plan.frontier else "",
    }
    if detail.views:
        drawn["timelines"] = report_timelines.stacks(detail.views, detail.reserved, budget)
    elif plan.predicted.timeline.live_bytes:
        drawn["timelines"] = report_timelines.timelines(plan)
    if plan.does_something:
        changes = category_steps(plan.plain, plan.predicted)
        drawn["changes"] = report_charts.waterfall(changes, "from the plain to the planned peak by category")
        if detail.saved:
            drawn["saved"] = report_charts.waterfall(detail.saved, "what each part of the plan saves")
    if detail.segments:
        drawn["segments"] = report_charts.segments(detail.segments, "the allocator's segments at the peak")
    return {name: safe(chart) for name, chart in drawn.items()}


def _optional(name: str) -> Any:
    """Imports a package that only reports need.

    Raises:
        MemScaleError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MemScaleError(f"a report needs {name}: pip install 'memscale[report]' ({error})") from error


# ---- rows ------------------------------------------------------------------------------------------


def _split(line: str) -> tuple[str, str]:
    """A line of the plan's summary as its first word and the rest."""
    name, _, rest = line.partition(" ")
    return name, rest.strip()


def _row(row: PlanRow) -> dict[str, Any]:
    return {
        "module": row.modules,
        "count": row.count,
        "type": row.type,
        "technique": row.technique,
        "bytes": "" if row.barred else bytes_range(row.bytes),
        "time": "" if row.barred else ms_range(row.ns),
        "reason": row.reason,
        "notes": row.notes,
    }


def _moment(prediction: Prediction) -> str:
    """The moment of the peak in words; "" if nothing is known of it."""
    peak = prediction.peak
    if not peak.operation:
        return ""
    again = " while it runs for the second time" if peak.recompute else ""
    module = f" of {peak.module}" if peak.module else ""
    source = f" ({peak.source})" if peak.source else ""
    return f"{peak.phase}, {peak.operation}{module}{source}{again}"


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "bytes": format_bytes(holder.bytes),
        "count": holder.count,
        "category": holder.category,
        "module": holder.module or "(model)",
        "what": f"{holder.name.rpartition('.')[2]} {_form(holder)}".strip() or "–",
        "made": holder.operation or "before the step",
        "source": holder.source,
    }


def _form(holder: Holder) -> str:
    return "" if holder.shape is None else f"{holder.dtype}{list(holder.shape)}"


def _modules(plan: Plan) -> list[dict[str, Any]]:
    """Modules with what they and all below them hold at each step's peak, the largest first."""
    plain, planned = plan.plain.by_module_rolled_up, plan.predicted.by_module_rolled_up
    largest = max([*plain.values(), *planned.values(), 1])

    def rank(path: str) -> tuple[Any, ...]:
        numbered = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]
        return -max(plain.get(path, 0), planned.get(path, 0)), numbered

    return [
        {
            "path": path or "(model)",
            "plain": plain.get(path, 0),
            "planned": planned.get(path, 0),
            "share": round(100 * max(plain.get(path, 0), planned.get(path, 0)) / largest, 1),
            "planned_share": round(100 * planned.get(path, 0) / largest, 1),
        }
        for path in sorted({*plain, *planned}, key=rank)[:_MOST_MODULES]
    ]
