# SPDX-License-Identifier: Apache-2.0
"""The report of a step that ran out of memory: one block of at most 14 lines.

where      phase, module, line of the program
asked      what could not be allocated, by whom
memory     what the device holds, and what of that is not ours
filled by  measured, by category
modules    predicted for the peak of the planned step
planned    what was promised, and under which budget
snapshot   where the allocator's history is, if it was asked for
fix        what would help, with predicted peak and time each; the cheapest first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memscale.plans.budget import budget_for
from memscale.survival.oom_errors import asked_bytes, who_ran_out
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.plan import Plan
    from memscale.survival.memory_now import MemoryNow
    from memscale.survival.where import Where

MOST_LINES: Final = 14

_SHOWN_MODULES: Final = 4
_SHOWN_CATEGORIES: Final = 5
_STATE_IN_8_BIT: Final = 0.26
"""Of FP32 moments: a byte each and a scale for each block."""


@dataclass(frozen=True)
class Fix:
    """What would help.

    Attributes:
        write: what to write, or do.
        peak_bytes: device-used peak of the step with it, predicted; 0: not known.
        slowdown: step time against the present plan's; 0: not known.
    """

    write: str
    peak_bytes: int = 0
    slowdown: float = 0.0

    @property
    def text(self) -> str:
        """In a line."""
        effect = []
        if self.peak_bytes:
            effect.append(f"peak {format_bytes(self.peak_bytes)}")
        if self.slowdown:
            effect.append(f"× {self.slowdown:.2f} of the time")
        return f"{self.write}: {', '.join(effect)}" if effect else self.write


def report_lines(
    error: BaseException,
    where: Where,
    now: MemoryNow,
    plan: Plan | None,
    why_not_survived: str = "",
    snapshot: str = "",
) -> list[str]:
    """The block.

    Args:
        error: what was raised.
        where: it was.
        now: what was in memory when it was caught.
        plan: in force; None: none.
        why_not_survived: a reason, where survival was asked for; else "".
        snapshot: where it is, or why there is none; "": nobody asked.
    """
    asked = asked_bytes(error)
    by = f"by {who_ran_out(error)}"
    lines = [f"where      {where.text}"]
    lines.append(f"asked      {format_bytes(asked) if asked else 'an unknown size'}, refused {by}")
    lines.append(f"memory     {_device_text(now, plan)}")
    held = sorted(now.by_category.items(), key=lambda item: -item[1])
    shown = [f"{name} {format_bytes(size)}" for name, size in held if size][:_SHOWN_CATEGORIES]
    lines.append(f"filled by  {', '.join(shown)}")
    if plan is not None:
        modules = sorted(plan.predicted.by_module.items(), key=lambda item: -item[1])[:_SHOWN_MODULES]
        named = [f"{path or 'the model itself'} {format_bytes(size)}" for path, size in modules if size]
        if named:
            lines.append(f"modules    {', '.join(named)} (predicted, at the peak)")
        lines.append(
            f"planned    peak {format_bytes(plan.predicted.device_used_peak_bytes)}, budget "
            f"{format_bytes(plan.budget_bytes)}{'' if plan.fits else ': it was known not to fit'}"
        )
    if why_not_survived:
        lines.append(f"survival   not possible: {why_not_survived}")
    if snapshot:
        lines.append(f"snapshot   {snapshot}")
    fixes = fixes_for(plan, now)
    lines += [f"fix {place}      {fix.text}" for place, fix in enumerate(fixes, 1)]
    return lines[:MOST_LINES]


def _device_text(now: MemoryNow, plan: Plan | None) -> str:
    if now.device.type == "cuda":
        context = 0 if plan is None else plan.predicted.context_bytes
        others = max(0, now.total - now.free - now.reserved - context)
        parts = [
            f"{format_bytes(now.allocated)} allocated",
            f"{format_bytes(now.reserved - now.allocated)} reserved and unused (fragmentation)",
            f"{format_bytes(context)} context",
            f"{format_bytes(others)} other processes",
            f"{format_bytes(now.free)} free of {format_bytes(now.total)}",
        ]
        return ", ".join(parts)
    limit = f"; this process may have {format_bytes(now.limit)} (RLIMIT_DATA)" if now.limit else ""
    return (
        f"this process {format_bytes(now.allocated)}, interpreter included; {format_bytes(now.free)} free of "
        f"{format_bytes(now.total)}{limit}"
    )


def fixes_for(plan: Plan | None, now: MemoryNow) -> list[Fix]:
    """What would help, the cheapest in time first.

    Args:
        plan: that was in force.
        now: what was in memory.
    """
    if plan is None:
        return [Fix("memscale.predict(model, sample_input=batch).explain() says what would fit")]
    fixes = []
    peak, time_ns = plan.predicted.device_used_peak_bytes, max(plan.predicted.step_time_ns, 1)
    tighter = [point for point in plan.frontier if point[0] < peak]
    if tighter:
        wanted = [point for point in tighter if point[0] <= peak * 9 // 10] or tighter
        chosen = [max(wanted), min(tighter)]
        for smaller, ns in dict.fromkeys(chosen):
            write = f'Config(memory_budget="{_budget_text(smaller)}")'
            fixes.append(Fix(write, smaller, ns / time_ns))
    state = now.by_category.get("optimizer state", 0)
    if state * 20 > peak:
        saved = int(state * (1 - _STATE_IN_8_BIT))
        fixes.append(Fix("Config(use_8bit_optimizer=True), which rounds", max(peak - saved, 0)))
    varying = sum(plan.predicted.by_category.get(name, 0) for name in ("activation", "temporary", "input"))
    if varying * 5 > peak:
        fixes.append(Fix("half the batch, accumulated twice", peak - varying // 2))
    fixes.sort(key=lambda fix: fix.slowdown or 1.0)
    return fixes


def _budget_text(peak: int) -> str:
    """A budget that a peak fits into, as one writes it."""
    budget, unit = budget_for(peak), (10, "KiB") if peak < 64 << 20 else (20, "MiB")
    return f"{-(-budget // (1 << unit[0]))}{unit[1]}"
