# SPDX-License-Identifier: Apache-2.0
"""Runs the suites that the command line asks for, and prints the tables."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from memscale.benchmarks import suite, sweep, table
from memscale.benchmarks.goals import goals
from memscale.benchmarks.job import Job
from memscale.benchmarks.peers import PEERS, Peer
from memscale.benchmarks.picture import draw
from memscale.benchmarks.progress import Progress
from memscale.benchmarks.registry import WAYS, BenchmarkModel, chosen
from memscale.benchmarks.rows import Row, Rows, make_row
from memscale.benchmarks.runner import run_job
from memscale.benchmarks.suite import Settings, Skipped, Task
from memscale.errors import MemScaleError

__all__ = ["run"]

Measure = Callable[[Job, Path], dict[str, Any]]

_MOST_SECONDS: Final = 900.0
"""Of one measurement, where there is no other limit."""

_STEPS, _WARM_UP = 20, 3
_QUICK_MODELS, _QUICK_STEPS, _QUICK_POINTS = 1, 5, 2


def run(options: argparse.Namespace, measure: Measure | None = None) -> bool:
    """Measures, writes rows, prints tables. Returns whether it was interrupted.

    Args:
        options: of the command line.
        measure: gives the figures of one job, whose output goes to a file; None: in a process of its own.

    Raises:
        MemScaleError: transformers is missing, or the rows' file belongs to something else.
        ValueError: an option makes no sense here.
    """
    _check_transformers()
    _check(options)  # before files of a run before are touched
    models = chosen(options.models.split(",") if options.models else None)
    if options.quick and options.models is None:
        models = models[:_QUICK_MODELS]
    rows = Rows(
        options.csv or options.out / "benchmarks.csv", options.out / "benchmarks.json", options.resume
    )
    with tempfile.TemporaryDirectory(prefix="memscale-bench-", dir=options.directory) as folder:
        settings = _settings(options, rows.rows, folder)
        tasks, total = _tasks(options, settings, models)
        interrupted, left_out = _measured(
            options, tasks, total, Measuring(rows, options.out / "logs", measure or run_job)
        )
    if options.frontier:
        missing = draw(rows.of(settings.scale, settings.device), options.png or options.out / "frontier.png")
        if missing:
            print(missing, file=sys.stderr)
    rows.save(left_out=left_out, interrupted=interrupted, scale=settings.scale, device=settings.device)
    if options.json:
        print(rows.text())
    else:
        shown = rows.of(settings.scale, settings.device)
        print(table.report(shown, settings.scale, left_out))
        for line in goals(shown, settings.scale):
            print(line)
    return interrupted


@dataclasses.dataclass
class Measuring:
    """Makes rows of tasks.

    Attributes:
        rows: those that there are.
        logs: folder of what the jobs print.
        measure: gives the figures of a job.
    """

    rows: Rows
    logs: Path
    measure: Measure = run_job

    def row(self, task: Task, deadline_s: float) -> Row:
        """The row of one task."""
        if isinstance(task, Skipped):
            found = {"status": "skipped", "reason": task.reason}
            return make_row(task.job, found, self.rows.rows, **_about(task.peer))
        job = dataclasses.replace(task, deadline_s=deadline_s)
        self.logs.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+-]+", "-", f"{len(self.rows.rows):03} {job.suite} {job.label}")
        found = self.measure(job, self.logs / f"{name}.log")
        peer = next((peer for peer in PEERS if peer.name == job.way), None)
        return make_row(job, found, self.rows.rows, **_about(peer))


def _check_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MemScaleError("the benchmark models need transformers: pip install transformers")


def _check(options: argparse.Namespace) -> None:
    """Refuses what makes no sense here."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA card")
    if options.steps is not None and options.steps < 2:
        raise ValueError("--steps: at least 2")
    for name in _ways(options):
        if name not in WAYS:
            raise ValueError(f"there is no way {name!r}; allowed: {', '.join(WAYS)}")


def _ways(options: argparse.Namespace) -> tuple[str, ...]:
    return WAYS if options.ways is None else tuple(filter(None, options.ways.split(",")))


def _settings(options: argparse.Namespace, rows: list[Row], folder: str) -> Settings:
    """What all jobs share."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scale = options.scale or ("tiny" if options.quick else "full" if device == "cuda" else "reduced")
    steps = (_QUICK_STEPS if options.quick else _STEPS) if options.steps is None else options.steps
    return Settings(scale, device, steps, min(_WARM_UP, steps - 1), folder, rows)


def _tasks(
    options: argparse.Namespace, settings: Settings, models: Sequence[BenchmarkModel]
) -> tuple[Iterator[Task], int]:
    """All tasks in order, and about how many they are."""
    names = _ways(options)
    parts, total = [suite.registry(settings, models, names)], len(models) * len(names)
    if options.peers:
        parts.append(suite.peers(settings, models))
        here = sum(not peer.why_not(settings.device) for peer in PEERS)
        total += len(PEERS) - here + 2 * here * len(models)
    if options.frontier:
        parts.append(suite.frontier(settings, models))
        total += len(suite.FRONTIER) * len(models)
    if options.sweep:
        count = (
            (_QUICK_POINTS if options.quick else sweep.POINTS) if options.points is None else options.points
        )
        points = sweep.points(models, settings.scale, count)
        parts.append(suite.sweep(settings, points))
        total += 2 * len(points)
    return itertools.chain(*parts), total


def _measured(
    options: argparse.Namespace, tasks: Iterator[Task], total: int, measuring: Measuring
) -> tuple[bool, list[str]]:
    """Runs the tasks. Returns whether it was interrupted, and what was not measured."""
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    left_out: list[str] = []
    rows = measuring.rows
    unfinished: Job | None = None
    with Progress(total) as progress:
        try:
            for task in tasks:
                job = task.job if isinstance(task, Skipped) else task
                if rows.has(job):
                    continue
                left = end - time.monotonic()
                if left <= 0 and not isinstance(task, Skipped):
                    left_out.append(job.label)
                    continue
                unfinished = job
                progress.start(job.label)
                row = measuring.row(task, min(_MOST_SECONDS, left))
                if row["status"] == "timeout" and left < _MOST_SECONDS:  # the run's time, not the job's
                    left_out.append(job.label)
                    continue
                rows.add(row)
                unfinished = None
                progress.end(job.label, _words(row))
        except KeyboardInterrupt:
            rest = [task for task in tasks if isinstance(task, Job) and not rows.has(task)]
            return True, left_out + [job.label for job in (unfinished, *rest) if job is not None]
    return False, left_out


def _about(peer: Peer | None) -> dict[str, str]:
    return {} if peer is None else {"documentation": peer.documentation, "peer_version": peer.version}


def _words(row: Row) -> str:
    """What came of a measurement."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    return f"{row['allocated_bytes'] / 1e6:,.1f} MB, {row['step_ms']:.1f} ms per step"
