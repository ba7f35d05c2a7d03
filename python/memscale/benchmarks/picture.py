# SPDX-License-Identifier: Apache-2.0
"""Memory against step time: ours as a curve over budgets, the others as points. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memscale.benchmarks.registry import BENCHMARK_MODELS
from memscale.benchmarks.rows import Row, taken_bytes
from memscale.benchmarks.ways import is_ours

__all__ = ["draw", "frontier_of"]


def frontier_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other row beats in both memory and time, by falling memory."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["step_ms"], taken_bytes(row))):
        if not best or taken_bytes(row) < taken_bytes(best[-1]):
            best.append(row)
    return best


def draw(rows: Sequence[Row], path: Path) -> str:
    """Draws all models that have rows into a PNG file. Returns what is missing, or ""."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    pyplot = importlib.import_module("matplotlib.pyplot")

    good = [row for row in rows if row["status"] == "ok" and row["suite"] != "sweep"]
    models = [model for model in BENCHMARK_MODELS if any(row["model"] == model.name for row in good)]
    if not models:
        return "no picture: nothing was measured"
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 4.4), squeeze=False)
    for model, axis in zip(models, axes[0], strict=True):
        _panel(axis, [row for row in good if row["model"] == model.name], model.title)
    first = good[0]
    figure.suptitle(f"{first['machine']}, {first['scale']} sizes, PyTorch {first['torch']}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return ""


def _panel(axis: Any, rows: Sequence[Row], title: str) -> None:
    mine = [row for row in rows if is_ours(row["way"])]
    others = [row for row in rows if row not in mine]
    curve = frontier_of(mine)
    axis.plot(
        [row["step_ms"] for row in curve], [taken_bytes(row) / 1e6 for row in curve],
        "o-", color="tab:green", label="MemScale, over budgets", zorder=3,
    )  # fmt: skip
    for row in others:
        plain = row["way"].startswith("plain")
        place = row["step_ms"], taken_bytes(row) / 1e6
        axis.plot(*place, "s" if plain else "x", color="black" if plain else "tab:red")
        axis.annotate(row["way"], place, fontsize=7, xytext=(3, 3), textcoords="offset points")
    axis.set_title(title)
    axis.set_xlabel("step time, ms (median)")
    axis.set_ylabel("peak, MB")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, 1.2 * max(row["step_ms"] for row in rows))  # room for the names
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
