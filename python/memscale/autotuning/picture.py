# SPDX-License-Identifier: Apache-2.0
"""Draws throughput and peak of a search against the micro-batch. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from memscale.autotuning.candidate import Candidate
from memscale.errors import MemScaleError
from memscale.units import format_bytes


def draw(
    path: str | PathLike[str],
    title: str,
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    budget_bytes: int,
) -> None:
    """Draws a search into a file, whose ending says in what format.

    Raises:
        MemScaleError: matplotlib is not installed.
        ValueError: a format that matplotlib does not know.
        OSError: the file cannot be written.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        words = "a picture needs matplotlib, which is not installed: pip install matplotlib"
        raise MemScaleError(words) from error
    figure = figures.Figure(figsize=(7, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    run = [one for one in candidates if one.confirmed is not None and not one.confirmed.out_of_memory]
    predicted = [replace(one, confirmed=None) for one in candidates if one.fits]
    above.plot(*_points(predicted, Candidate.samples_per_s), "o--", color="C0", label="predicted")
    above.plot(*_points(run, Candidate.samples_per_s), "s", color="C1", label="measured")
    if chosen is not None:
        above.axvline(chosen.micro_batch, color="C2", linewidth=1, label="chosen")
    above.set(ylabel="samples/s", xscale="log")
    above.legend(fontsize=8)
    below.plot(*_points(candidates, lambda one: one.peak_bytes / 2**20), "o--", color="C0")
    below.plot(*_points(run, _measured_mib), "s", color="C1")
    below.axhline(budget_bytes / 2**20, color="black", linewidth=1)
    below.set(xlabel="micro-batch", ylabel=f"peak, MiB\n(line: {format_bytes(budget_bytes)})")
    sizes = [one.micro_batch for one in candidates]
    below.set_xticks(sizes, [str(size) for size in sizes])
    below.minorticks_off()
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.savefig(path, dpi=130)


def _points(candidates: Sequence[Candidate], height: Any) -> tuple[list[int], list[float]]:
    return [one.micro_batch for one in candidates], [height(one) for one in candidates]


def _measured_mib(candidate: Candidate) -> float:
    return 0.0 if candidate.confirmed is None else candidate.confirmed.peak_bytes / 2**20
