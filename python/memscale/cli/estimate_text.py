# SPDX-License-Identifier: Apache-2.0
"""Answers as plain text: one screen for one step, a fit table for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from memscale.cli import terminal
from memscale.cli.text import cut, table
from memscale.errors import MemScaleError
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.cli.answers import Answer, Subject
    from memscale.plans.plan import Holder, Prediction

__all__ = ["fit_table", "head_rows", "headline", "screen", "short_name"]

_BAR: Final = 24
_HOLDERS, _MODULES = 8, 8
_COLUMNS: Final = 6  # of a fit table beside each other
_WIDEST: Final = 36


def screen(subject: Subject, answer: Answer, verbose: bool) -> str:
    """Everything about one step on one device.

    Args:
        subject: what was asked about.
        answer: the prediction.
        verbose: every module, holder and choice, and the largest sizes that fit (takes some traces).
    """
    predicted = answer.predicted.prediction
    parts = [_head(subject, answer), _verdict(answer), _peaks(answer), _categories(answer)]
    parts.append(_holders(predicted, verbose))
    parts.append(_modules(predicted, verbose))
    parts.append(_plan(answer, verbose))
    parts.append(_advice(answer, verbose))
    return "\n\n".join(part for part in parts if part)


def short_name(device: str) -> str:
    """A card's name without its maker.

    Example:
        >>> short_name("NVIDIA GeForce RTX 3090")
        'RTX 3090'
    """
    return device.removeprefix("NVIDIA ").removeprefix("GeForce ")


# ---- one step --------------------------------------------------------------------------------------


def head_rows(subject: Subject, answer: Answer | None) -> list[tuple[str, str]]:
    """What was asked, as (name, value) rows: model, step, device, notes."""
    rows = [("model", f"{subject.name} ({', '.join([subject.origin, *_weights(subject)])})")]
    notes = list(subject.notes)
    if answer is None:
        rows.append(("step", _how(subject)))
    else:
        where = answer.hardware
        memory = f", {format_bytes(where.total_bytes)}" if where.total_bytes else ""
        rows += [("step", _step(subject, answer)), ("device", f"{where.name}{memory}")]
        notes += answer.predicted.prediction.notes
    return rows + [("note", note) for note in dict.fromkeys(notes)]


def _weights(subject: Subject) -> Iterator[str]:
    """How many weights there are, in which format, and how many are trained."""
    if subject.parameters is not None:
        yield f"{_count(subject.parameters)} weights"
    if subject.quantization:
        yield subject.quantization
    if subject.lora is not None:
        yield f"LoRA {subject.lora['rank']} on {', '.join(subject.lora['targets'])}"
    if subject.trained is not None and (subject.trained != subject.parameters):
        yield f"{_count(subject.trained)} trained"


def _head(subject: Subject, answer: Answer | None) -> str:
    return "\n".join(f"{name:8}{value}" for name, value in head_rows(subject, answer))


def _how(subject: Subject) -> str:
    own = "transformers' checkpoints" if subject.checkpointing == "hf" else ""
    times = f"{subject.accumulate} micro-batches" if subject.accumulate > 1 else ""
    return ", ".join(part for part in (subject.dtype, subject.optimizer, times, own) if part)


def _step(subject: Subject, answer: Answer) -> str:
    size = ""
    if answer.batch is not None:
        size = f"batch {answer.batch}"
    if answer.length is not None:
        size += f"{' × ' if size else ''}{answer.length} {subject.measure}"
    return ", ".join(part for part in (size, _how(subject)) if part)


def _count(number: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,}"


def headline(answer: Answer) -> str:
    """Whether it fits, in a line."""
    predicted, plan = answer.predicted.prediction, answer.predicted.plan
    budget = f"{format_bytes(plan.budget_bytes)} ({plan.budget_source})"
    peak = format_bytes(predicted.device_used_peak_bytes)
    if answer.verdict == "plain":
        return f"FITS: {peak} of {budget}"
    if answer.verdict == "plan":
        return f"FITS WITH A PLAN: {peak} of {budget}, step time × {plan.slowdown:.2f}"
    return f"DOES NOT FIT: {peak} with the smallest plan, budget {budget}"


def _verdict(answer: Answer) -> str:
    predicted, plan = answer.predicted.prediction, answer.predicted.plan
    low, high = (format_bytes(size) for size in predicted.error_band_bytes)
    lines = [headline(answer), f"  a measured peak is expected between {low} and {high}"]
    if answer.verdict == "plan":
        lines.append(f"  without a plan it would be {format_bytes(plan.plain.device_used_peak_bytes)}")
    if answer.verdict == "no":
        over = predicted.device_used_peak_bytes - plan.budget_bytes
        lines.append(f"  {format_bytes(over)} too much" if over > 0 else "  the safety reserve does not fit")
    return "\n".join(lines)


def _peaks(answer: Answer) -> str:
    """Peaks side by side, plain and planned."""
    plan = answer.predicted.plan
    steps = [plan.plain] if answer.verdict == "plain" else [plan.plain, plan.predicted]
    names = ["plain", "planned"][: len(steps)]
    rows = [["", *names]]
    rows.append(["allocated", *(format_bytes(step.allocated_peak_bytes) for step in steps)])
    if answer.hardware.device_kind == "cuda":
        rows.append(["reserved", *(format_bytes(step.reserved_peak_bytes) for step in steps)])
        rows.append(["device used", *(format_bytes(step.device_used_peak_bytes) for step in steps)])
    rows.append(["step time", *(f"{step.step_time_ns / 1e6:.1f} ms" for step in steps)])
    return "peak\n" + table(rows, right=(1, 2))


def _categories(answer: Answer) -> str:
    predicted = answer.predicted.prediction
    peak, total = predicted.peak, max(predicted.device_used_peak_bytes, 1)
    rows = []
    for name, size in sorted(predicted.by_category.items(), key=lambda item: -item[1]):
        if size > 0:
            share = size / total
            bar = "█" * round(_BAR * share) or "▏"
            rows.append((name.replace("_", " "), format_bytes(size), f"{100 * share:.0f} %", bar))
    moment = " ".join(
        part
        for part in (
            f"in {peak.phase}",
            "(recompute)" if peak.recompute else "",
            f"at {peak.operation}" if peak.operation else "",
            f"of {peak.module}" if peak.module else "",
            f"({peak.source})" if peak.source else "",
        )
        if part
    )
    return f"at the peak, {moment}\n" + table(rows, right=(1, 2)) if rows else ""


def _holders(predicted: Prediction, verbose: bool) -> str:
    groups = predicted.groups or predicted.holders
    shown = groups if verbose else groups[:_HOLDERS]
    if not shown:
        return ""
    rows = [_holder(holder) for holder in shown]
    left = len(groups) - len(shown)
    more = f"\n  … and {left} smaller (--verbose)" if left else ""
    return "largest holders\n" + table(rows, right=(0, 1)) + more


def _holder(holder: Holder) -> tuple[str, ...]:
    made = holder.operation or ("resident" if not holder.source else "")
    return (
        format_bytes(holder.bytes),
        f"{holder.count} ×" if holder.count > 1 else "",
        holder.category.replace("_", " "),
        cut(_what(holder), _WIDEST),
        cut(holder.module or "(model)", _WIDEST),
        " ".join(part for part in (made, holder.source) if part),
    )


def _what(holder: Holder) -> str:
    """The tensor; the path of its name is that of the module beside it."""
    form = "" if holder.shape is None else f"{holder.dtype}{list(holder.shape)}"
    return " ".join(word for word in (holder.name.rpartition(".")[2], form) if word) or "-"


def _modules(predicted: Prediction, verbose: bool) -> str:
    rolled = predicted.by_module_rolled_up
    total = max(rolled.get("", 0), 1)
    paths = [path for path in rolled if path]
    if not verbose:
        paths = [path for path in paths if path.count(".") <= _depth(paths)][:_MODULES]
    if not paths:
        return ""
    rows = [(format_bytes(rolled[path]), f"{100 * rolled[path] / total:.0f} %", path) for path in paths]
    return "by module, children included\n" + table(rows, right=(0, 1))


def _depth(paths: Sequence[str]) -> int:
    """The least depth at which a model has more than a few modules: that of its blocks."""
    for depth in range(4):
        if sum(path.count(".") <= depth for path in paths) >= 4:
            return depth
    return 4


def _plan(answer: Answer, verbose: bool) -> str:
    plan = answer.predicted.plan
    if not plan.does_something and not verbose:
        return ""
    if verbose:
        return "plan\n" + "\n".join(f"  {line}" for line in plan.explain(verbose=True).splitlines())
    lines = [line for line in plan.summary_lines() if line.startswith("plan ")]
    return "plan\n" + "\n".join(f"  {line.removeprefix('plan').strip()}" for line in lines)


def _advice(answer: Answer, verbose: bool) -> str:
    predicted = answer.predicted.prediction
    lines = predicted.advice
    if verbose or answer.verdict == "no":
        try:
            lines = predicted.advise()
        except (MemScaleError, ValueError):  # sizes that cannot be derived from the batch
            lines = predicted.advice
    return "what would help\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


# ---- several ---------------------------------------------------------------------------------------


def fit_table(subject: Subject, answers: Sequence[Answer], verbose: bool) -> str:
    """Devices by sizes: peaks, and whether they fit.

    Args:
        subject: what was asked about.
        answers: every combination, sizes in the outer loop.
        verbose: print the plan and what would help for each, too.
    """
    text = [_head(subject, None), *_fitting_blocks(subject, answers), _LEGEND]
    if verbose:
        text += [part for answer in answers for part in _details(subject, answer)]
    return "\n\n".join(text)


def _fitting_blocks(subject: Subject, answers: Sequence[Answer]) -> list[str]:
    """The table, in blocks of as many columns as the terminal has room for."""
    most = terminal.width()
    for columns in range(_COLUMNS, 0, -1):
        blocks = _blocks(subject, answers, columns)
        if most is None or all(len(line) <= most for block in blocks for line in block.splitlines()):
            break
    return blocks


def _blocks(subject: Subject, answers: Sequence[Answer], columns: int) -> list[str]:
    devices = list(dict.fromkeys(answer.hardware.name for answer in answers))
    sizes = list(dict.fromkeys((answer.batch, answer.length) for answer in answers))
    by_place = {(answer.hardware.name, answer.batch, answer.length): answer for answer in answers}
    blocks = []
    for begin in range(0, len(sizes), columns):
        shown = sizes[begin : begin + columns]
        rows = [["device", "budget", *(_size_name(subject, size) for size in shown)]]
        for device in devices:
            row = [by_place[device, batch, length] for batch, length in shown]
            budget = format_bytes(row[0].predicted.plan.budget_bytes)
            rows.append([short_name(device), budget, *map(_cell, row)])
        blocks.append(table(rows, right=(1,), indent="", fixed=range(2, 2 + len(shown))))
    return blocks


_LEGEND: Final = (
    "ok: fits as it is; plan × t: fits with a plan, at t times the step time; "
    "no: does not fit, peak of the smallest plan"
)


def _size_name(subject: Subject, size: tuple[int | None, int | None]) -> str:
    batch, length = size
    if batch is None and length is None:
        return "peak"
    if length is None:
        return f"batch {batch}"
    return f"{length} {subject.measure}" if batch is None else f"{batch} × {length}"


def _cell(answer: Answer) -> str:
    plan = answer.predicted.plan
    peak = format_bytes(plan.predicted.device_used_peak_bytes)
    mark = {"plain": "ok", "plan": f"plan × {plan.slowdown:.2f}", "no": "no"}[answer.verdict]
    return f"{peak} {mark}"


def _details(subject: Subject, answer: Answer) -> Iterator[str]:
    lines = [f"{short_name(answer.hardware.name)}, {_step(subject, answer)}", _verdict(answer)]
    lines += [part for part in (_plan(answer, False), _advice(answer, False)) if part]
    yield "\n".join(lines)
