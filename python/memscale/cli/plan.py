# SPDX-License-Identifier: Apache-2.0
"""`memscale plan`: the treatment of each module, the reason, and the effect of other budgets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale import __version__
from memscale.cli.answers import answers_for
from memscale.cli.arguments import Options
from memscale.cli.problems import DOES_NOT_FIT, FITS, UsageError, require_writable
from memscale.cli.progress import Progress
from memscale.cli.text import safe, table
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.cli.answers import Answer, Subject
    from memscale.plans.plan import Plan

__all__ = ["PLAN_DOCUMENT_VERSION", "document", "run"]

PLAN_DOCUMENT_VERSION: Final = 1


def run(options: Options) -> int:
    """Carries the command out and prints the plan.

    Raises:
        UsageError: it cannot be carried out.
    """
    require_writable(options.save)
    with Progress() as progress:
        subject, (answer, *_) = answers_for(options, progress.say)
        frontier = None
        if options.frontier:
            progress.say("trying other budgets")
            frontier = _frontier(answer.predicted.plan)
        if options.save is not None:
            _save(answer.predicted.plan, options.save)
        if options.as_json:
            text = json.dumps(document(subject, answer, frontier), indent=2)
        else:
            text = safe(_screen(subject, answer, frontier, options.verbose))
    print(text)
    if options.save is not None and not options.as_json:
        print(f"\nsaved: {options.save}")
    return FITS if answer.verdict != "no" else DOES_NOT_FIT


def document(
    subject: Subject, answer: Answer, frontier: Sequence[tuple[int, int, int]] | None
) -> dict[str, Any]:
    """The answer as plain data; sizes in bytes, times in nanoseconds.

    Args:
        subject: what was asked about.
        answer: with the plan.
        frontier: rows of `text.frontier_rows`; None: not asked for.
    """
    plan = answer.predicted.plan
    found = {
        "format": "memscale-plan",
        "version": PLAN_DOCUMENT_VERSION,
        "memscale": __version__,
        "model": {**asdict(subject), "notes": list(subject.notes)},
        "batch": answer.batch,
        "sequence": answer.length,
        "device": answer.hardware.name,
        "verdict": answer.verdict,
        "fits": plan.fits,
        "mode": plan.mode,
        "budget_bytes": plan.budget_bytes,
        "budget_source": plan.budget_source,
        "pressure_ppm": round(1_000_000 * plan.pressure),
        "plain_peak_bytes": plan.plain.device_used_peak_bytes,
        "planned_peak_bytes": plan.predicted.device_used_peak_bytes,
        "planned_allocated_peak_bytes": plan.predicted.allocated_peak_bytes,
        "smallest_peak_bytes": plan.smallest_peak_bytes,
        "plain_step_ns": plan.plain.step_time_ns,
        "planned_step_ns": plan.predicted.step_time_ns,
        "time_bound_ppm": plan.time_bound_ppm,
        "digest": plan.digest,
        "choices": [asdict(choice) for choice in plan.choices],
        "advice": list(answer.predicted.prediction.advice),
        "notes": list(plan.notes),
    }
    if frontier is not None:
        names = ("budget_bytes", "peak_bytes", "step_ns")
        found["frontier"] = [dict(zip(names, row, strict=True)) for row in frontier]
    return found


# ---- parts -----------------------------------------------------------------------------------------


def _frontier(plan: Plan) -> list[tuple[int, int, int]]:
    from memscale.plans.text import frontier_rows

    return frontier_rows(plan)


def _save(plan: Plan, path: str) -> None:
    try:
        Path(path).write_text(plan.to_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path!r}: {error.strerror or error}") from error


def _screen(
    subject: Subject, answer: Answer, frontier: Sequence[tuple[int, int, int]] | None, verbose: bool
) -> str:
    from memscale.cli.estimate_text import head_rows, headline

    plan = answer.predicted.plan
    head = "\n".join(f"{name:8}{value}" for name, value in head_rows(subject, answer))
    parts = [head, headline(answer), plan.explain(verbose)]
    if frontier is not None:
        parts.append(_frontier_table(plan, frontier))
    return "\n\n".join(parts)


def _frontier_table(plan: Plan, frontier: Sequence[tuple[int, int, int]]) -> str:
    if not frontier:
        return "frontier   nothing to choose from: every module is kept"
    plain = max(plan.plain.step_time_ns, 1)
    rows = [["budget", "peak", "step time", "", ""]]
    for budget, peak, ns in frontier:
        chosen = peak == plan.predicted.device_used_peak_bytes and ns == plan.predicted.step_time_ns
        row = [format_bytes(budget), format_bytes(peak), f"{ns / 1e6:.1f} ms", f"× {ns / plain:.3f}"]
        rows.append([*row, "this plan" if chosen else ""])
    return "frontier: the fastest plan found within a budget\n" + table(rows, right=(0, 1, 2, 3))
