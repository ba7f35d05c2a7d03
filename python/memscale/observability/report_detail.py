# SPDX-License-Identifier: Apache-2.0
"""What a report shows beyond the plan itself: derived from the memory graph, for one file, and not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from memscale.observability.report_charts import Block, Step
from memscale.observability.segments import allocator_view
from memscale.observability.step_view import StepView, core_plan
from memscale.plans.rows import AS_ONE, regions

if TYPE_CHECKING:
    from memscale import _core
    from memscale.core.decision_engine import DecisionEngine
    from memscale.plans.plan import Choice, Plan, Prediction
    from memscale.trace.step import Trace

__all__ = ["Detail", "category_steps", "detail_of", "technique_steps"]

_MOST_STEPS: Final = 10


@dataclass(frozen=True)
class Detail:
    """What the charts of a report are drawn from.

    Attributes:
        about: (name, value) rows for the head of the page: model, step, device.
        views: steps by name, "plain" and "planned".
        saved: bars from the plain peak to the planned one, by what the plan does.
        segments: blocks of each segment of the allocator at the peak; empty for one without segments.
        reserved: bytes that the allocator holds after each row of a view, by name.
    """

    about: Sequence[tuple[str, str]] = ()
    views: Mapping[str, StepView] = field(default_factory=dict)
    saved: Sequence[Step] = ()
    segments: Sequence[Sequence[Block]] = ()
    reserved: Mapping[str, Sequence[int]] = field(default_factory=dict)


def detail_of(
    plan: Plan, traces: tuple[Trace, Trace], engine: DecisionEngine, about: Sequence[tuple[str, str]] = ()
) -> Detail:
    """Derives the detail of a plan.

    Args:
        plan: made for the second trace.
        traces: of the plain step, and of the step that the plan is for.
        engine: what decided.
        about: rows for the head of the page.
    """
    plans = {"plain": None, "planned": core_plan(plan, traces[1].graph)}
    views, allocators = {}, {}
    for (name, chosen), trace in zip(plans.items(), traces, strict=True):
        views[name] = view = StepView.of(trace.graph, chosen, engine.rates, engine.sim)
        if engine.sim["kind"] == "cuda":
            allocators[name] = allocator_view(trace.graph, chosen, view, engine.sim)
    planned = allocators.get("planned")
    return Detail(
        about=about,
        views=views,
        saved=technique_steps(plan, traces[1], engine) if plan.does_something else (),
        segments=() if planned is None else planned.segments,
        reserved={name: view.reserved_bytes for name, view in allocators.items() if view is not None},
    )


# ---- waterfalls ------------------------------------------------------------------------------------


def technique_steps(plan: Plan, trace: Trace, engine: DecisionEngine) -> list[Step]:
    """Bars from the plain peak to the planned one: what each part of the plan takes off, by replay.

    The parts are added one after the other, in the order of the plan. How much one of them saves depends on
    those before it; the sum does not.

    Args:
        plan: made for this trace.
        trace: of a step.
        engine: what decided.
    """
    predictor, plain = engine.predictor, plan.plain.device_used_peak_bytes

    def used(part: _core.Plan | None) -> int:
        return predictor.peaks(trace, part)[1] + plan.predicted.context_bytes

    steps = [Step("plain peak", plain, "plain", total=True)]
    level = used(None)
    if level != plain:
        # Not one by one: each would be another trace.
        name = " and ".join(step.technique for step in plan.steps) or "key/value cache off"
        steps.append(Step(name, level - plain, "good" if level <= plain else "bad"))
    applied: list[Choice] = []
    for name, part in parts_of(plan.active):
        applied += part
        reached = used(core_plan(replace(plan, choices=tuple(applied)), trace.graph))
        steps.append(Step(name, reached - level, "good" if reached <= level else "bad"))
        level = reached
    steps.append(Step("planned peak", plan.predicted.device_used_peak_bytes, "planned", total=True))
    return steps


def parts_of(choices: Sequence[Choice]) -> list[tuple[str, list[Choice]]]:
    """Choices by technique and class of module; the last part takes what would be too many bars.

    The choices of a region stay together: a joined one means nothing without those before it.
    """
    parts: dict[tuple[str, str], list[Choice]] = {}
    for region in regions(choices):
        technique, kind = "+".join(region[0].techniques), region[0].type
        key = (technique, kind) if len(region) == 1 else (technique + AS_ONE, "modules")
        parts.setdefault(key, []).extend(region)
    named = [
        (
            f"{technique} {len(part)} {kind}" if kind == "modules" else f"{technique} {len(part)} × {kind}",
            part,
        )
        for (technique, kind), part in parts.items()
    ]
    if len(named) <= _MOST_STEPS:
        return named
    rest = [choice for _, part in named[_MOST_STEPS - 1 :] for choice in part]
    return [*named[: _MOST_STEPS - 1], (f"{len(rest)} other modules", rest)]


def category_steps(plain: Prediction, planned: Prediction) -> list[Step]:
    """Bars from the plain peak to the planned one, by category of what is alive at each peak."""
    names = dict.fromkeys([*plain.by_category, *planned.by_category])
    changes = {name: planned.by_category.get(name, 0) - plain.by_category.get(name, 0) for name in names}
    steps = [Step("plain peak", plain.device_used_peak_bytes, "plain", total=True)]
    for name, change in sorted(changes.items(), key=lambda item: item[1]):
        if change:
            steps.append(Step(name.replace("_", " "), change, "good" if change < 0 else "bad"))
    return [*steps, Step("planned peak", planned.device_used_peak_bytes, "planned", total=True)]
