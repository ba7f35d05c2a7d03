# SPDX-License-Identifier: Apache-2.0
"""Log lines of plans: one block at `wrap`, and one line when a step was re-planned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memscale import _core, events, log
from memscale.core.verification import PRECISION
from memscale.optim.offload.attach import offloaded_bytes
from memscale.torchkit import sharding
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.config.config import Config
    from memscale.core.planner import Planned
    from memscale.core.wrapped import Wrapped
    from memscale.hardware.detect import Hardware
    from memscale.plans.plan import Plan
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.open_graph import OpenGraphs

_NOT_BUILT = {"auto_policy": "the policy"}
"""Switches that are accepted and do nothing in this version, with what they will switch."""


_SHOWN_SHAPES = 3
"""Of the tensors that a forward is given, in the log."""


def fields_without_effect(config: Config) -> list[str]:
    """Fields of a configuration that are on or set, and have no effect in this version."""
    fields = [name for name in _NOT_BUILT if getattr(config, name)]
    if config.async_offload and not config.enable_offloading:
        fields.append("async_config" if config.async_config is not None else "async_offload")
    if config.max_cpu_offload_gb is not None and not (config.enable_offloading and config.async_offload):
        fields.append("max_cpu_offload_gb")
    return fields


def _why_useless(field: str) -> str:
    missing = _NOT_BUILT.get(field)
    return f"{field} ({'offload is off' if missing is None else f'{missing} is not in this version'})"


def announce(executor: Wrapped, replaced: Planned | None, changed: Sequence[str] | None) -> None:
    """Logs the plan that was just attached. One that was found again, or does the same, is no news.

    Args:
        executor: has it in force.
        replaced: what was in force before, if anything.
        changed: why a new plan was made, in words; None if one from before was found again.
    """
    planned = executor.planned
    assert planned is not None
    if replaced is None or replaced.trace.method != planned.trace.method:
        _warn_of_recording(planned)
    if replaced is not None:
        _announce_replan(planned, replaced, changed, executor.open.waiting)
        return
    plan = planned.plan
    for note in plan.notes:
        if note.startswith("offload: async_config."):  # a folder that cannot be used was asked for by name
            log.LOGGER.warning("%s: nothing is offloaded", note)
    lines = [f"device     {_hardware_line(planned.hardware)}", *plan.summary_lines()]
    precise = [step for step in plan.steps if step.technique in PRECISION]
    lines += [f"step       {step.technique}: {step.reason}" for step in precise]
    if not plan.exact:
        lines.append("exact      no: gradients round differently, as exact=False allows")
    lines += executor.switched_off
    lines += [f"note       {note}" for note in plan.notes]
    useless = fields_without_effect(executor.config)
    if useless:
        lines.append(f"no effect  {', '.join(map(_why_useless, useless))}")
    lines.append("undo       memscale.detach(model)")
    log.block(lines)
    events.tell("plan", _in_a_line(plan), **_facts_of(plan))
    if not plan.fits:
        _warn_unmet(planned)


def _announce_replan(
    planned: Planned, replaced: Planned, changed: Sequence[str] | None, waiting: int
) -> None:
    """Says what is new. `waiting`: forwards of this step whose graphs wait for their backward."""
    plan = planned.plan
    does_otherwise = _what_it_does(plan) != _what_it_does(replaced.plan)
    fits_now = plan.fits and not replaced.plan.fits  # it was said not to
    if changed is not None and (does_otherwise or fits_now):
        log.LOGGER.info(
            "re-planned (%s): peak %s%s, %d modules checkpointed%s",
            ", ".join(changed) or "the step has changed",
            format_bytes(plan.predicted.device_used_peak_bytes),
            ", which fits now" if fits_now else "",
            len(plan.active),
            "".join(f", {step.technique}" for step in plan.steps),
        )
        events.tell("replan", ", ".join(changed) or "the step has changed", **_facts_of(plan))
    if waiting and does_otherwise:
        log.LOGGER.warning(
            "%d of this step's forwards ran under a plan for fewer, and their graphs wait: this step may "
            "peak above the prediction and the budget, later ones do not",
            waiting,
        )
    if changed is not None and replaced.plan.fits and not plan.fits:
        _warn_unmet(planned)


def _in_a_line(plan: Plan) -> str:
    steps = "".join(f", {step.technique}" for step in plan.steps)
    peak, budget = format_bytes(plan.predicted.device_used_peak_bytes), format_bytes(plan.budget_bytes)
    return f"peak {peak} of {budget}, {len(plan.active)} of {len(plan.choices)} modules{steps}"


def _facts_of(plan: Plan) -> dict[str, Any]:
    """A plan in numbers."""
    return {
        "digest": plan.digest,
        "predicted_bytes": plan.predicted.device_used_peak_bytes,
        "plain_bytes": plan.plain.device_used_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "step_ns": plan.predicted.step_time_ns,
    }


def _what_it_does(plan: Plan) -> tuple[Any, ...]:
    return tuple((item.module, item.techniques) for item in plan.active), tuple(plan.steps)


def announce_return(executor: Wrapped, optimizer: torch.optim.Optimizer | None) -> None:
    """Warns where state that is about to come back to memory is too much for the budget.

    Args:
        executor: about to end.
        optimizer: of the model; None: not known, and its state has stayed.
    """
    planned, back = executor.planned, 0 if optimizer is None else offloaded_bytes(optimizer)
    if planned is None or not back:
        return
    here = sum(tensor.nbytes for tensor in (*executor.model.parameters(), *executor.model.buffers()))
    if here + back > planned.plan.budget_bytes:
        log.LOGGER.warning(
            "%s of optimizer state come back to memory: with the model's %s that is above the budget of %s",
            format_bytes(back),
            format_bytes(here),
            format_bytes(planned.plan.budget_bytes),
        )


def _warn_of_recording(planned: Planned) -> None:
    """A step that is recorded runs for real before there is a plan for it."""
    if planned.trace.method != "empirical":
        return
    plain, budget = _core.replay(planned.trace.graph)["peak_bytes"], planned.plan.budget_bytes
    if plain > budget:
        log.LOGGER.warning(
            "planned from a step that really ran: the plain step takes %s, and only repeated blocks are "
            "checkpointed while it is recorded, so recording may have peaked above the budget of %s",
            format_bytes(plain),
            format_bytes(budget),
        )


def _warn_unmet(planned: Planned) -> None:
    plan = planned.plan
    over = plan.predicted.device_used_peak_bytes - plan.budget_bytes
    by = f"by {format_bytes(over)}" if over > 0 else "with the safety reserve counted"
    log.LOGGER.warning(
        "the budget of %s cannot be met (%s): the smallest plan peaks at %s. What would help: %s",
        format_bytes(plan.budget_bytes),
        by,
        format_bytes(plan.smallest_peak_bytes),
        "; ".join(plan.advice),
    )


def warn_of_evaluation(plan: Plan, shapes: Sequence[Sequence[int]]) -> None:
    """A forward without gradients is about to run that does not fit.

    Args:
        plan: for it.
        shapes: of the tensors that it is given.
    """
    shown = ", ".join(str(list(shape)) for shape in shapes[:_SHOWN_SHAPES])
    used = plan.predicted.device_used_peak_bytes
    log.LOGGER.warning(
        "a forward without gradients does not fit: it is predicted to peak at %s, and the budget is %s%s "
        "(arguments of %s%s). What would help: %s",
        format_bytes(used),
        format_bytes(plan.budget_bytes),
        "" if used > plan.budget_bytes else ", with the safety reserve counted",
        shown,
        ", …" if len(shapes) > _SHOWN_SHAPES else "",
        "; ".join(plan.advice),
    )


def warn_of_open_graphs(graphs: OpenGraphs) -> bool:
    """Warns if more forwards wait for their backward than are planned for; returns whether it has."""
    if not graphs.are_too_many:
        return False
    log.LOGGER.warning(
        "the model runs forward while graphs of %d earlier forwards wait for their backward: plans count "
        "%d forwards a step, so the peak is above the prediction by what the others keep",
        graphs.waiting,
        graphs.planned,
    )
    return True


def _hardware_line(hardware: Hardware) -> str:
    if hardware.device_kind == "cpu":
        line = f"{hardware.name}, {format_bytes(hardware.total_bytes)}"
        return f"{line}; this process holds {format_bytes(hardware.process_bytes)} now, interpreter included"
    line = f"{hardware.name}, {format_bytes(hardware.total_bytes)}"
    return f"{line}, context {format_bytes(hardware.context_bytes)}"


def announce_verification(executor: Wrapped, args: Any, kwargs: Any, facts: StepFacts) -> None:
    """Runs the proof on the first batch and logs it.

    Raises:
        VerificationError: the plan changes a result.
    """
    from memscale.core.verification import compare

    try:
        reason = sharding.why_no_backward(executor.model, inside=facts.forward is not None)
        if reason:
            log.LOGGER.warning("not verified: %s", reason)
            return
        report = compare(executor, args, kwargs, facts)
    except torch.cuda.OutOfMemoryError:
        log.LOGGER.warning("not verified: the step without the plan does not fit into the device's memory")
        return
    level = logging.INFO if report.passed else logging.ERROR
    log.block(report.table().splitlines(), "MemScale: verification", level)
    report.require()
