# SPDX-License-Identifier: Apache-2.0
"""Draws the curves of `optimizer_convergence.py`: docs/guide/optimizer-curves.svg.

Of bench/results/optimizer_curves.csv: a picture for each task, with the mean over seeds of each way, and how
far the seeds lie apart. Needs matplotlib, which nothing else here does.

Usage: python bench/python/plot_curves.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
CURVES = ROOT / "bench" / "results" / "optimizer_curves.csv"
PICTURE = ROOT / "docs" / "guide" / "optimizer-curves.svg"

Points = dict[int, list[float]]
"""Step → losses, one per seed."""


def read() -> dict[str, dict[str, Points]]:
    """Task → way → points."""
    found: dict[str, dict[str, Points]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with CURVES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["task"]][row["way"]][int(row["step"])].append(float(row["loss"]))
    return found


def main() -> None:
    """Draws all tasks beside each other."""
    mpl.rcParams["svg.hashsalt"] = "memscale"  # the same picture from the same rows
    tasks = read()
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), layout="constrained")
    for place, (task, ways) in zip(axes, tasks.items(), strict=True):
        for way, points in ways.items():
            steps = sorted(points)
            place.plot(steps, [sum(points[step]) / len(points[step]) for step in steps], label=way, lw=1.2)
            lowest, highest = ([pick(points[step]) for step in steps] for pick in (min, max))
            place.fill_between(steps, lowest, highest, alpha=0.15, lw=0)
        place.set(title=task, xlabel="step", ylabel="loss")
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
