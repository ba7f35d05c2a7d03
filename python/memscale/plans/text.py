# SPDX-License-Identifier: Apache-2.0
"""A plan as text: a few lines for the log, or a page that says why each module is treated as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memscale.log import table
from memscale.plans.budget import budget_for
from memscale.plans.rows import AS_ONE, PlanRow, plan_rows, regions, technique_words
from memscale.plans.words import bytes_range, few, kept_words, ms_range, range_parts, ranges
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.data import Amount, Choice, PlanData, StepChoice

__all__ = ["bound_words", "explain", "frontier_rows", "summary_lines"]

_FRONTIER_POINTS: Final = 12
_LOG_PARTS: Final = 12
_LARGEST_PRESSURE: Final = 1000
_AMOUNTS: Final = ("leaving_bytes", "staying_bytes")
_LEFT_OUT: Final = ("exclude: ", "only: ", "kept: ")  # notes that the table's last column needs
_HEADERS: Final = ("n", "modules", "type", "technique", "frees each", "costs each", "why")


def summary_lines(plan: PlanData) -> list[str]:
    """Budget, peaks, time and what is applied, a line each."""
    lines = [
        f"budget     {format_bytes(plan.budget_bytes)} ({plan.budget_source})",
        f"plain      peak {format_bytes(plan.plain.device_used_peak_bytes)}, "
        f"memory pressure {_pressure(plan)}",
        f"planned    peak {format_bytes(plan.predicted.device_used_peak_bytes)}, "
        f"{'fits' if plan.fits else 'DOES NOT FIT'}; step time × {plan.slowdown:.2f} expected",
    ]
    if not plan.does_something:
        why = "the plain step fits" if plan.fits else "nothing here can be checkpointed"
        return [*lines, f"plan       nothing to do: {why}"]
    words = [*map(_step_words, plan.steps), *_techniques(plan.active)]
    return [*lines, *(f"plan       {line}" for line in words), *_offload_line(plan), *_bound_line(plan)]


def _pressure(plan: PlanData) -> str:
    """The plain peak as a share of the budget. Of a budget of a few bytes, ten digits would say no more."""
    if plan.pressure > _LARGEST_PRESSURE:
        return f"over {_LARGEST_PRESSURE:,} times the budget"
    return f"{100 * plan.pressure:.0f} %"


def _offload_line(plan: PlanData) -> list[str]:
    on_host = plan.predicted.context_bytes == 0  # a card's copies pass through host memory
    staging = plan.staging_bytes + plan.path_staging_bytes if on_host else 0
    offloaded = (
        f"at most {format_bytes(plan.away_peak_bytes)} off the device at once" if plan.away_peak_bytes else ""
    )
    taken = f"{format_bytes(staging)} of the budget for staging buffers and tables" if staging else ""
    parts = ", ".join(filter(None, (offloaded, taken)))
    return [f"offload    {parts}"] if parts else []


def bound_words(plan: PlanData) -> str:
    """How far the plan may be from the best one, in words; "" where nothing is known of that."""
    if not plan.fits:
        return ""
    if not plan.does_something or plan.time_bound_ppm == 0:
        return "no plan that fits is faster, by the cost model"
    percent = -(-plan.time_bound_ppm // 1000) / 10  # up: "at most" must stay true
    return f"at most {percent:.1f} % slower than the best possible plan that fits, by the cost model"


def explain(plan: PlanData, verbose: bool) -> str:
    """Every choice with its rule, what it frees and costs, and what was rejected and why.

    Args:
        plan: any plan.
        verbose: one row per module; False: what is alike shares a row.
    """
    at_peak = sorted(plan.predicted.by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in at_peak if size)
    lines = [
        *summary_lines(plan),
        *([] if plan.does_something else _bound_line(plan)),
        *(f"step       {line}" for step in plan.steps for line in _step_lines(step)),
        f"at peak    {parts}",
        f"smallest   peak {format_bytes(plan.smallest_peak_bytes)} is the lowest that any plan found reaches",
        f"digest     {plan.digest} ({', '.join(filter(None, (f'{plan.profile} profile', plan.mode)))})",
        *(f"advice     {line}" for line in plan.advice),
        *(f"note       {note}" for note in plan.notes if note.startswith(_LEFT_OUT)),
    ]
    if plan.choices:
        lines += ["", _table(plan_rows(plan, verbose))]
    return "\n".join(lines)


def frontier_rows(plan: PlanData, most: int = _FRONTIER_POINTS) -> list[tuple[int, int, int]]:
    """Budgets and what the fastest plan within each brings, from the plain step down to the smallest plan.

    Args:
        plan: its `frontier` is asked for.
        most: evenly spaced budgets to look at; those with the same best plan share a row.

    Returns:
        (budget bytes with the safety reserve, peak bytes, step ns), the largest budget first; empty where
        there is no frontier.
    """
    points = [(budget_for(peak), peak, ns) for peak, ns in plan.frontier]
    if not points:
        return []
    low, high = min(points)[0], max(points)[0]
    rows: list[tuple[int, int, int]] = []
    for step in range(most):
        budget = high - (high - low) * step // max(most - 1, 1)
        ns, peak = min((ns, peak) for needed, peak, ns in points if needed <= budget)
        if not rows or rows[-1][1:] != (peak, ns):
            rows.append((budget, peak, ns))
    return rows


# ---- parts -----------------------------------------------------------------------------------------


def _bound_line(plan: PlanData) -> list[str]:
    words = bound_words(plan)
    return [f"bound      {words}"] if words else []


def _step_words(step: StepChoice) -> str:
    """A step technique and where it is attached, or how much of it is used, in a line."""
    if any(step.modules):
        where = ", ".join(few(range_parts(step.modules), _LOG_PARTS))
        return f"{step.technique} {len(step.modules)} × {' or '.join(step.types)}: {where}"
    if not step.amounts:
        return step.technique
    leaving, staying = (sum(getattr(item, name) for item in step.amounts) for name in _AMOUNTS)
    stays = f", {format_bytes(staying)} stay" if staying else ""
    return f"{step.technique}: {format_bytes(leaving)} leave{stays}"


def _step_lines(step: StepChoice) -> list[str]:
    """What a step technique does and brings."""
    saved, added = format_bytes(abs(step.bytes)), f"{abs(step.ns) / 1e6:.2f} ms"
    brings = f"{saved} {'less' if step.bytes >= 0 else 'more'} at the peak"
    time = f"{added} {'more' if step.ns > 0 else 'less'} a step"
    without = "without it the budget is met too" if step.other_fits else "without it the budget is not met"
    bits = "bit-equal at this precision" if step.exact else "rounds differently"
    return [
        f"{step.technique}: {step.reason} ({bits})",
        f"{step.technique}: {brings}, {time}; {without}",
        *(f"{step.technique}: {_amount_words(amount)}" for amount in step.amounts),
    ]


def _amount_words(amount: Amount) -> str:
    """How much of a technique is used for a parameter group, in a line."""
    leaves = f"{format_bytes(amount.leaving_bytes)} of {amount.leaving} leave in {amount.ns / 1e6:.2f} ms"
    stays = f", {format_bytes(amount.staying_bytes)} of {amount.staying} stay" if amount.staying else ""
    return f"group {amount.group}: {leaves}{stays}: {amount.reason}"


def _techniques(active: tuple[Choice, ...]) -> list[str]:
    """Each technique with the modules that it is applied to; regions of several modules apart."""
    alone: dict[tuple[str, str, str], list[str]] = {}
    as_one: dict[str, list[str]] = {}
    for region in regions(active):
        first = region[0]
        technique = technique_words(first)
        if len(region) > 1:
            as_one.setdefault(technique, []).append(ranges(choice.module for choice in region))
            continue
        kept = f", keeping {kept_words(first.kept)}" if first.kept else ""
        alone.setdefault((technique, first.type, kept), []).append(first.module)
    return [
        *(
            f"{technique} {len(modules)} × {kind}: {', '.join(few(range_parts(modules), _LOG_PARTS))}{kept}"
            for (technique, kind, kept), modules in alone.items()
        ),
        *(
            f"{technique}{AS_ONE} {len(parts)} ×: {', '.join(few(parts, _LOG_PARTS))}"
            for technique, parts in as_one.items()
        ),
    ]


def _table(rows: list[PlanRow]) -> str:
    """The rows, each followed by its notes."""
    cells = [
        (
            row.count,
            row.modules,
            row.type,
            row.technique,
            "" if row.barred else bytes_range(row.bytes),
            "" if row.barred else ms_range(row.ns),
            row.reason,
        )
        for row in rows
    ]
    head, rule, *body = table(cells, _HEADERS).splitlines()
    lines = [head, rule]
    for line, row in zip(body, rows, strict=True):
        lines.append(line)
        lines += [f"       {note}" for note in row.notes]
    return "\n".join(lines)
