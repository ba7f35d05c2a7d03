# SPDX-License-Identifier: Apache-2.0
"""Advice on how to make a step fit, from known numbers, without another trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

from memscale import _core
from memscale.hardware.allocator_settings import EXPANDABLE
from memscale.plans.budget import budget_for, reserve_bytes
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.plan import Plan, Prediction


FIXED: Final = ("parameter", "gradient", "optimizer_state", "buffer")
"""Categories that do not depend on the batch."""

_OPTIMIZER_WAYS: Final = {
    "fused": "an optimizer made with fused=True works without them",
    "foreach": "with foreach=False it works on one weight at a time",
}
"""What a switch of PyTorch's own optimizers does to the temporaries of their step."""

_SAVED_BY_8BIT: Final = 1 - (1 + 4 / 128) / 4
"""Of a moment in FP32: a byte is left, and an FP32 scale for 128 of them."""

_WORTH: Final = 50
"""What saves less than this part of the peak is not named."""

_VARYING: Final = ("activation", "temporary", "input")


def least_bytes(buffers: Iterable[tuple[int, int, int, int, bool]], step_begins: int) -> int:
    """What a step needs at some time whatever its batch: the most that is held at once of what is `FIXED`.

    Args:
        buffers: of a graph, see `Graph.buffers`.
        step_begins: number of the optimizer's first operation. What begins later depends on weights.
    """
    changes: list[tuple[int, int]] = []
    for size, begin, end, category, _ in buffers:
        if begin >= step_begins or _core.CATEGORY_NAMES[category] in FIXED:
            changes += (begin, size), (end + 1, -size)
    held = most = 0
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    return most


def unmet_advice(
    predicted: Prediction, checkpointing: bool, switches: Collection[str] = (), least: int = 0
) -> tuple[str, ...]:
    """What would help when no plan fits, by what fills the memory at the smallest plan's peak.

    Args:
        predicted: the step under the smallest plan.
        checkpointing: whether the configuration allows it.
        switches: see `fake_optimizer.free_switches`.
        least: `least_bytes` of the step.
    """
    needed = budget_for(predicted.smallest_peak_bytes)
    lines = [f"raise the budget to {format_bytes(needed)} ({needed} bytes)"]
    if not checkpointing:
        lines.append("allow checkpointing (enable_checkpointing=True)")
    is_step = predicted.peak.phase == "optimizer"
    names = (*FIXED, "temporary") if is_step else FIXED
    fixed = max(least, sum(predicted.by_category.get(name, 0) for name in names))
    left = predicted.budget_bytes - reserve_bytes(predicted.budget_bytes) - predicted.context_bytes - fixed
    varying = predicted.reserved_peak_bytes - fixed
    better = _of_optimizer(predicted, switches)
    if left > 0 and varying > 0:
        return (*lines, f"or a batch (or sequence) of about {100 * left // varying} % of this one", *better)
    return (*lines, *better, f"a smaller batch would not do: {_why_not_smaller(predicted, fixed)}")


def _of_optimizer(predicted: Prediction, switches: Collection[str]) -> list[str]:
    """What another optimizer, or another state of this one, would save at the peak: the most comes first."""
    worth = predicted.reserved_peak_bytes // _WORTH
    found: list[tuple[int, str]] = []
    if "8bit" in switches:
        saved = int(predicted.by_category.get("optimizer_state", 0) * _SAVED_BY_8BIT)
        what = "8-bit optimizer state (use_8bit_optimizer=True, which rounds it) would save"
        found.append((saved, f"{what} {format_bytes(saved)}"))
    temporary = predicted.by_category.get("temporary", 0)
    ways = [text for switch, text in _OPTIMIZER_WAYS.items() if switch in switches]
    if ways and predicted.peak.phase == "optimizer":
        what = f"the peak is in the optimizer's step, where {format_bytes(temporary)} are temporary"
        found.append((temporary, f"{what}: {', '.join(ways)}"))
    return [line for saved, line in sorted(found, reverse=True) if saved > worth]


def _why_not_smaller(predicted: Prediction, fixed: int) -> str:
    """What leaves no room for any batch, and what would take less of it."""
    if not fixed:
        held = format_bytes(reserve_bytes(predicted.budget_bytes))
        context = format_bytes(predicted.context_bytes)
        beside = f" and the device's context takes {context}" if predicted.context_bytes else ""
        return f"a plan leaves {held} of a budget free{beside}, which is all of this one"
    if fixed > sum(predicted.by_category.get(name, 0) for name in ("parameter", "buffer")):
        return (
            f"weights, gradients, optimizer state and its step alone take {format_bytes(fixed)}; "
            "an optimizer with less state, or fewer trainable weights, would"
        )
    return f"weights and buffers alone take {format_bytes(fixed)}"  # nothing is trained, or not at the peak


def allocator_hint(predicted: Prediction, used_bytes: int) -> str:
    """Says when segments that grow would make a difference; "" when they would not.

    Args:
        predicted: the step under a plan, with the allocator as it is set.
        used_bytes: its device-used peak with expandable segments.
    """
    saved = predicted.device_used_peak_bytes - used_bytes
    if saved * 50 < predicted.device_used_peak_bytes:
        return ""
    return (
        f"PYTORCH_ALLOC_CONF={EXPANDABLE} would save {format_bytes(saved)} of fragmentation: the same plan "
        f"would peak at {format_bytes(used_bytes)}"
    )


def advice_of(plan: Plan) -> tuple[str, ...]:
    """What a user of `predict` should know at once: what the plan does, what would do without it."""
    if not plan.fits:
        return plan.advice
    lines = []
    plain, predicted = plan.plain, plan.predicted
    if not plan.does_something:
        free = plan.budget_bytes - reserve_bytes(plan.budget_bytes) - plain.device_used_peak_bytes
        lines.append(f"fits without a plan; {format_bytes(max(free, 0))} are left")
    else:
        needed = budget_for(plain.device_used_peak_bytes)
        saved = format_bytes(plain.device_used_peak_bytes - predicted.device_used_peak_bytes)
        does = [step.technique for step in plan.steps]
        does += [f"checkpoints {len(plan.active)} modules"] if plan.active else []
        lines.append(
            f"without a plan it needs a budget of {format_bytes(needed)} ({needed} bytes); the plan "
            f"({', '.join(does)}) saves {saved} at × {plan.slowdown:.2f} of the time"
        )
    if plan.smallest_peak_bytes < predicted.device_used_peak_bytes:
        needed = budget_for(plan.smallest_peak_bytes)
        lines.append(f"minimum feasible budget: {format_bytes(needed)} ({needed} bytes)")
    return (*lines, *plan.advice)


def varying_share(prediction: Prediction) -> float:
    """Share of the reserved peak that grows with the batch."""
    varying = sum(prediction.by_category.get(name, 0) for name in _VARYING)
    return varying / max(prediction.reserved_peak_bytes, 1)
