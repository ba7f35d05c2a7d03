# SPDX-License-Identifier: Apache-2.0
"""The suites: lists of jobs, the most important first.

A suite is a generator. It looks at the rows that its earlier jobs have given: a budget is a share of a plain
peak, and what MemScale does at a peer's peak can be asked only after the peer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from memscale.benchmarks.job import Job
from memscale.benchmarks.peers import PEERS, Peer
from memscale.benchmarks.registry import WAYS, BenchmarkModel
from memscale.benchmarks.rows import Row, reference_of, result_of
from memscale.benchmarks.sweep import Point
from memscale.benchmarks.ways import at_peer

__all__ = ["Settings", "Skipped", "Task", "frontier", "peers", "registry", "sweep"]

WRAP_SHARE: Final = 0.50
RESIDENT_SHARE: Final = 0.30
"""Budgets, of the plain FP32 peak. On a card the resident one is the figure of the registry."""

SWEEP_SHARE: Final = 0.15
"""Of the peak of a point's plain run."""

FRONTIER: Final = (80, 60, 45, 35, 25, 18, 12)
"""Budgets, in percent of the plain FP32 peak."""

_FEW_STEPS = 10
"""Of what is compared by memory and time only."""


@dataclass(frozen=True)
class Settings:
    """What all jobs of a run share.

    Attributes:
        scale: of the shapes.
        device: "cpu" or "cuda".
        steps: training steps of the registry's jobs.
        warm_up: of these.
        directory: for files that stand for host memory.
        rows: what has been measured so far.
        tried: keys of plain runs that this run has asked for.
    """

    scale: str
    device: str
    steps: int
    warm_up: int
    directory: str
    rows: list[Row]
    tried: set[tuple[str, ...]] = field(default_factory=set)

    def job(self, suite: str, model: BenchmarkModel, way: str, **more: Any) -> Job:
        """A job of a model as it is in the registry."""
        values: dict[str, Any] = {
            "shape": model.shape(self.scale),
            "precision": "fp32",
            "steps": self.steps,
        }
        values.update(more)
        return Job(
            suite, model.name, self.scale, way=way, device=self.device, warm_up=self.warm_up,
            directory=self.directory, **values,
        )  # fmt: skip

    def few(self) -> int:
        """Steps of a job that loss parity is not asked of."""
        return min(self.steps, _FEW_STEPS)

    def plain(self, job: Job, precision: str = "fp32") -> int | None:
        """Allocated peak of the plain run of a job's work."""
        row = reference_of(self.rows, job, precision)
        return None if row is None else row["allocated_bytes"]

    def untried(self, job: Job) -> bool:
        """Whether this run has not asked for a plain run yet; from now on it has."""
        new = job.key not in self.tried
        self.tried.add(job.key)
        return new


@dataclass(frozen=True)
class Skipped:
    """A job that is not run, and why: it is a row all the same."""

    job: Job
    reason: str
    peer: Peer | None = None


Task = Job | Skipped


def registry(
    settings: Settings, models: Sequence[BenchmarkModel], ways: Sequence[str] = WAYS
) -> Iterator[Task]:
    """The ways that are always measured, model by model."""
    for model in models:
        for way in (name for name in WAYS if name in ways):
            precision = "bf16-amp" if way == "plain-bf16" else "fp32"
            job = settings.job("registry", model, way, precision=precision)
            if way in ("plain-fp32", "plain-bf16"):
                settings.untried(job)
                yield job
                continue
            plain = settings.job("registry", model, "plain-fp32")
            budget = _budget(settings, model, job)
            if budget is None and settings.untried(plain):
                yield plain
                budget = _budget(settings, model, job)
            yield _after(settings, plain, dataclasses.replace(job, budget_bytes=budget))


def _after(settings: Settings, first: Job, job: Job) -> Task:
    """A job whose budget comes from another one, which has been tried: without one it says nothing."""
    row = result_of(settings.rows, first)
    if job.budget_bytes is None and row is not None:
        return Skipped(job, f"no peak of {first.way} ({row['status']}) to take the budget from")
    return job  # without a budget: there was no time for the first, nor is there for this one


def _budget(settings: Settings, model: BenchmarkModel, job: Job) -> int | None:
    plain = settings.plain(job)
    if job.way == "smallest":
        return 0
    if job.way == "resident" and settings.scale == "full":
        return model.resident_bytes
    share = {"wrap": WRAP_SHARE, "resident": RESIDENT_SHARE}.get(job.way)
    return None if plain is None or share is None else int(share * plain)


def peers(settings: Settings, models: Sequence[BenchmarkModel]) -> Iterator[Task]:
    """Every peer, and after each that could run, MemScale with the peak of the peer as its budget."""
    for peer in PEERS:
        reason = peer.why_not(settings.device)
        if reason:
            job = dataclasses.replace(_peer_job(settings, models[0], peer), model="all")
            yield Skipped(job, reason, peer)
    for model in models:
        for way, precision in (("plain-fp32", "fp32"), ("plain-bf16", "bf16-amp")):
            job = settings.job("registry", model, way, precision=precision)
            if settings.plain(job, precision) is None and settings.untried(job):
                yield job
        for peer in PEERS:
            if peer.why_not(settings.device):
                continue
            job = _peer_job(settings, model, peer)
            yield job
            peak = _measured(settings, job)
            ours = settings.job("peers", model, at_peer(peer.name), budget_bytes=peak, steps=settings.few())
            yield _after(settings, job, ours)


def _peer_job(settings: Settings, model: BenchmarkModel, peer: Peer) -> Job:
    return settings.job("peers", model, peer.name, precision="bf16-amp", steps=settings.few())


def _measured(settings: Settings, job: Job) -> int | None:
    row = result_of(settings.rows, job)
    return row["allocated_bytes"] if row is not None and row["status"] == "ok" else None


def frontier(settings: Settings, models: Sequence[BenchmarkModel]) -> Iterator[Task]:
    """MemScale over budgets; the curve of the picture."""
    for model in models:
        plain_job = settings.job("registry", model, "plain-fp32")
        if settings.plain(plain_job) is None and settings.untried(plain_job):
            yield plain_job
        plain = settings.plain(plain_job)
        for percent in FRONTIER:
            way = f"budget {percent}%"
            budget = None if plain is None else plain * percent // 100
            ours = settings.job("frontier", model, way, budget_bytes=budget, steps=settings.few())
            yield _after(settings, plain_job, ours)


def sweep(settings: Settings, found: Sequence[Point]) -> Iterator[Task]:
    """Plain and MemScale at every point."""
    for point in found:
        way = "plain-fp32" if point.precision == "fp32" else "plain-bf16"
        shared: dict[str, Any] = {"shape": point.shape, "steps": settings.few()}
        plain = settings.job("sweep", point.model, way, precision=point.precision, **shared)
        yield plain
        peak = settings.plain(plain, point.precision)
        budget = None if peak is None else int(SWEEP_SHARE * peak)
        ours = settings.job(
            "sweep", point.model, "resident", precision=point.precision, budget_bytes=budget, **shared
        )
        yield _after(settings, plain, ours)
