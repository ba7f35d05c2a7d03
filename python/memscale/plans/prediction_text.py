# SPDX-License-Identifier: Apache-2.0
"""A prediction as text: one screen that says whether it fits, when it peaks, and what fills the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memscale.plans.text import summary_lines
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.data import Holder, PredictionData

_ROWS: Final = 12


def explain(prediction: PredictionData, full: bool) -> str:
    """The text.

    Args:
        prediction: what to explain.
        full: with every module, and the advice that takes more traces.
    """
    parts = ["\n".join(_head(prediction)), _categories(prediction), _groups(prediction)]
    if full:
        parts.append(_modules(prediction))
    advice = prediction.advise() if full else prediction.advice
    if advice:
        parts.append("\n".join(f"advice     {line}" for line in advice))
    return "\n\n".join(parts)


def _head(prediction: PredictionData) -> list[str]:
    low, high = (format_bytes(size) for size in prediction.error_band_bytes)
    parts = [f"allocated {format_bytes(prediction.allocated_peak_bytes)}"]
    if prediction.reserved_peak_bytes != prediction.allocated_peak_bytes:
        parts.append(f"reserved {format_bytes(prediction.reserved_peak_bytes)}")
    if prediction.context_bytes:
        parts.append(f"context {format_bytes(prediction.context_bytes)}")
    what = "step" if prediction.training else "forward without gradients"
    lines = [
        f"verdict    {_verdict(prediction)}",
        f"device     {prediction.device}, {format_bytes(prediction.device_bytes)}",
        f"peak       {', '.join(parts)}; expected between {low} and {high}",
        f"when       {_moment(prediction)}",
        f"phases     {', '.join(f'{name} {format_bytes(size)}' for name, size in _phases(prediction))}",
        f"time       {prediction.step_time_ns / 1e6:.1f} ms a {what}, by the cost model",
    ]
    if prediction.plan is not None and prediction.training:
        lines += [line for line in summary_lines(prediction.plan) if line.startswith(("plan ", "plain "))]
    if prediction.method != "static":
        lines.append(f"profile    {prediction.method}")
    return [*lines, *(f"note       {note}" for note in prediction.notes)]


def _verdict(prediction: PredictionData) -> str:
    used, budget = prediction.device_used_peak_bytes, prediction.budget_bytes
    what = f"{format_bytes(used)} of {format_bytes(budget)}"
    source = f" ({prediction.budget_source})" if prediction.budget_source else ""
    if prediction.fits:
        return f"fits: {what}{source}"
    over = f"{format_bytes(used - budget)} too much" if used > budget else "the safety reserve is missing"
    return f"DOES NOT FIT: {what}{source}, {over}"


def _moment(prediction: PredictionData) -> str:
    peak = prediction.peak
    if not peak.operation:
        return "before the first operation"
    again = ", recompute" if peak.recompute else ""
    module = f" of {peak.module}" if peak.module else ""
    source = f" at {peak.source}" if peak.source else ""
    return f"{peak.phase}{again}: {peak.operation}{module}{source}"


def _phases(prediction: PredictionData) -> list[tuple[str, int]]:
    return list(prediction.timeline.phase_peaks().items())


def _share(size: int, prediction: PredictionData) -> str:
    return f"{100 * size / max(prediction.device_used_peak_bytes, 1):.1f} %"


def _categories(prediction: PredictionData) -> str:
    from memscale.log import table

    largest_first = sorted(prediction.by_category.items(), key=lambda item: -item[1])
    rows = [(name, format_bytes(size), _share(size, prediction)) for name, size in largest_first]
    return table(rows, ("at the peak", "bytes", "share"))


def _groups(prediction: PredictionData) -> str:
    from memscale.log import table

    rows = [
        (
            format_bytes(group.bytes),
            f"{group.count} ×",
            group.category,
            group.module or "(model)",
            _made_by(group),
            group.what(),
        )
        for group in prediction.groups[:_ROWS]
    ]
    return table(rows, ("bytes", "count", "what", "module", "made by", "tensor"))


def _made_by(group: Holder) -> str:
    words = [group.operation, group.source, "(recompute)" if group.recompute else ""]
    return " ".join(word for word in words if word)


def _modules(prediction: PredictionData) -> str:
    from memscale.log import table

    rows = [
        (path or "(model)", format_bytes(prediction.by_module.get(path, 0)), format_bytes(size))
        for path, size in prediction.by_module_rolled_up.items()
    ]
    return table(rows, ("module", "own bytes", "with all below"))
