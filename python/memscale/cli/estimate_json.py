# SPDX-License-Identifier: Apache-2.0
"""Answers as one JSON document. Fields are added, never renamed, within a version (docs/guide/cli.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from memscale import __version__

if TYPE_CHECKING:
    from memscale.cli.answers import Answer, Subject
    from memscale.plans.plan import Plan, Prediction

__all__ = ["ESTIMATE_VERSION", "document"]

ESTIMATE_VERSION: Final = 1


def document(subject: Subject, answers: Sequence[Answer]) -> dict[str, Any]:
    """Everything that was found, as plain data; sizes in bytes, times in nanoseconds."""
    return {
        "format": "memscale-estimate",
        "version": ESTIMATE_VERSION,
        "memscale": __version__,
        "model": {**asdict(subject), "notes": list(subject.notes)},
        "fits": all(answer.verdict != "no" for answer in answers),
        "cases": [_case(answer) for answer in answers],
    }


def _case(answer: Answer) -> dict[str, Any]:
    prediction, plan = answer.predicted.prediction, answer.predicted.plan
    hardware = answer.hardware
    return {
        "batch": answer.batch,
        "sequence": answer.length,
        "device": {
            "name": hardware.name,
            "kind": hardware.device_kind,
            "total_bytes": hardware.total_bytes,
            "capability": None if hardware.compute_capability is None else list(hardware.compute_capability),
        },
        "verdict": answer.verdict,
        "budget_bytes": plan.budget_bytes,
        "budget_source": plan.budget_source,
        "smallest_peak_bytes": plan.smallest_peak_bytes,
        "plain": _step(plan.plain),
        "planned": _step(plan.predicted),
        "plan": _plan(plan),
        "advice": list(prediction.advice),
        "notes": list(prediction.notes),
    }


def _step(step: Prediction) -> dict[str, Any]:
    return {
        "allocated_peak_bytes": step.allocated_peak_bytes,
        "reserved_peak_bytes": step.reserved_peak_bytes,
        "device_used_peak_bytes": step.device_used_peak_bytes,
        "context_bytes": step.context_bytes,
        "error_band_bytes": list(step.error_band_bytes),
        "step_time_ns": step.step_time_ns,
        "fits": step.fits,
        "by_category": step.by_category,
        "by_module": step.by_module,
        "phase_peaks": step.timeline.phase_peaks(),
        "peak": asdict(step.peak),
        "holders": [asdict(holder) for holder in step.groups or step.holders],
        "method": step.method,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "slowdown_ppm": round(1_000_000 * plan.slowdown),
        "time_bound_ppm": plan.time_bound_ppm,
        "choices": [asdict(choice) for choice in plan.active],
        "steps": [asdict(step) for step in plan.steps],
    }
