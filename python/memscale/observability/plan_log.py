# SPDX-License-Identifier: Apache-2.0
"""What a wrap says: one block, then silence; one line when a step had to be planned anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memscale.core.units import format_bytes
from memscale.observability import logs

if TYPE_CHECKING:
    from memscale.core.config import Config
    from memscale.core.executor import Executor
    from memscale.core.hardware import Hardware
    from memscale.core.planner import Planned
    from memscale.core.tracer import StepFacts

_NOT_BUILT = {
    "enable_offloading": "CPU offload",
    "enable_tiling": "tiling",
    "use_mixed_precision": "mixed precision",
    "use_8bit_optimizer": "8-bit optimizer state",
    "async_offload": "the asynchronous engine",
    "auto_policy": "the policy",
}
"""Switches that are accepted and do nothing in this version, with what they will switch."""

_NOT_BUILT_LIMITS = ("max_cpu_offload_gb", "observability_port")


def fields_without_effect(config: Config) -> list[str]:
    """Fields of a configuration that are on or set, and have no effect in this version."""
    fields = [name for name in _NOT_BUILT if getattr(config, name)]
    return fields + [name for name in _NOT_BUILT_LIMITS if getattr(config, name) is not None]


def announce(executor: Executor, replaced: Planned | None, facts: StepFacts) -> None:
    """Logs the plan that was just attached.

    Args:
        executor: has it in force.
        replaced: what was in force before, if anything.
        facts: what the plan was made for.
    """
    planned = executor.planned
    assert planned is not None
    plan = planned.plan
    if replaced is not None:
        if plan.digest != replaced.plan.digest:
            logs.LOGGER.info(
                "planned anew (%s): peak %s, %d modules checkpointed",
                _what_changed(facts),
                format_bytes(plan.predicted.device_used_peak_bytes),
                len(plan.active),
            )
        if replaced.plan.fits and not plan.fits:
            _warn_unmet(planned)
        return
    lines = [f"device     {_hardware_line(planned.hardware)}", *plan.summary_lines()]
    if planned.cache_off:
        lines.append("use_cache  switched off while blocks are checkpointed")
    lines += [f"note       {note}" for note in plan.notes]
    useless = fields_without_effect(executor.config)
    if useless:
        lines.append(f"no effect  {', '.join(useless)}: not built in this version")
    lines.append("undo       memscale.detach(model)")
    logs.block(lines)
    if not plan.fits:
        _warn_unmet(planned)


def _what_changed(facts: StepFacts) -> str:
    parts = []
    if facts.grads_present:
        parts.append("gradients are kept between forwards")
    if facts.carried_bytes:
        parts.append(f"the last output is still held, {format_bytes(sum(facts.carried_bytes))}")
    if facts.optimizer is not None:
        parts.append(type(facts.optimizer).__name__)
    return ", ".join(parts) or "changed batch"


def _warn_unmet(planned: Planned) -> None:
    plan = planned.plan
    over = plan.predicted.device_used_peak_bytes - plan.budget_bytes
    by = f"by {format_bytes(over)}" if over > 0 else "with the safety reserve counted"
    logs.LOGGER.warning(
        "the budget of %s cannot be met (%s): the smallest plan peaks at %s. What would help: %s",
        format_bytes(plan.budget_bytes),
        by,
        format_bytes(plan.smallest_peak_bytes),
        "; ".join(plan.advice),
    )


def _hardware_line(hardware: Hardware) -> str:
    if hardware.device_kind == "cpu":
        line = f"{hardware.name}, {format_bytes(hardware.total_bytes)}"
        return f"{line}; this process holds {format_bytes(hardware.process_bytes)} now, interpreter included"
    line = f"{hardware.name}, {format_bytes(hardware.total_bytes)}"
    return f"{line}, context {format_bytes(hardware.context_bytes)}"


def announce_verification(executor: Executor, args: Any, kwargs: Any, facts: StepFacts) -> None:
    """Runs the proof on the first batch and logs it.

    Raises:
        VerificationError: the plan changes a result.
    """
    from memscale.core.verification import compare

    report = compare(executor, args, kwargs, facts)
    if not report.equal:
        logs.LOGGER.error(report.table())
        report.require()
    logs.LOGGER.info("%s", report.summary())
