# SPDX-License-Identifier: Apache-2.0
"""Measures one job, in a process of its own: `python -m memscale.benchmarks.child RESULT PARENT < JOB`.

    time    gradients of one step (not taken), then all training steps, the warm-up not counted
    peak    the same training again, shorter, under the profiler: on a CPU only. On a card the peak is that of
            the timed steps

What is known is written to RESULT after each part, so that a crash in the second leaves the first.

Several benchmarks may share a card: MEMSCALE_BENCH_LOCK names a file that one of them holds while it trains.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memscale.benchmarks import memory, ways
from memscale.benchmarks.job import Job
from memscale.benchmarks.loops import Loop, Run, batches, fresh_model
from memscale.benchmarks.peers import PEERS, prepare_peer

__all__ = ["main", "measure"]

_PEAK_STEPS = 2
"""Profiled steps after the warm-up."""

_LOCK = "MEMSCALE_BENCH_LOCK"

_OUT_OF_MEMORY = (MemoryError, torch.cuda.OutOfMemoryError)  # its name in PyTorch 2.4 too


def measure(job: Job, report: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """All that a job gives; `report` gets what is known so far."""
    found: dict[str, Any] = {}
    if job.device == "cuda":
        if torch.cuda.get_device_capability() >= (9, 0):  # what cuBLAS takes there anyway, said aloud
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        peaks = memory.cuda_peaks(lambda mark: found.update(_timed(job, mark)))
        found.update(allocated_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes)
        if _LOCK not in os.environ:  # else others may be on the card
            free, total = torch.cuda.mem_get_info()
            found.update(outside_bytes=total - free - torch.cuda.memory_reserved())
    else:
        found.update(_timed(job, memory.restart_resident_peak))
        report(found)
        gc.collect()
        peaks = memory.cpu_peaks(lambda mark: found.update(_short(job, mark)))
        found.update(allocated_bytes=peaks.allocated_bytes)
    found.update(start_bytes=peaks.start_bytes, status="ok")
    report(found)
    return found


def begin(job: Job) -> tuple[Run, float]:
    """A run that is about to train, and how long it took to prepare it."""
    model, data = fresh_model(job), batches(job.shape, job.device)
    began = time.perf_counter()
    loop: Loop
    if job.way in {peer.name for peer in PEERS}:
        loop = prepare_peer(job, model)
    else:
        loop = ways.prepare(job, model, data[0])
    return Run(job, loop, data), time.perf_counter() - began


def _timed(job: Job, mark: Callable[[], object]) -> dict[str, Any]:
    """Times, losses and gradients of a run."""
    base = memory.resident_bytes()
    run, prepare_s = begin(job)
    found: dict[str, Any] = {"gradients": _gradients(run)}
    with _alone():
        run.train(job.warm_up)
        mark()
        run.train(job.steps - job.warm_up)
    counted = run.seconds[job.warm_up :]
    low, _, high = statistics.quantiles(counted, n=4) if len(counted) > 1 else (counted[0],) * 3
    return found | {
        "prepare_s": prepare_s,
        "step_ms": 1e3 * statistics.median(counted),
        "step_low_ms": 1e3 * low,
        "step_high_ms": 1e3 * high,
        "losses": [loss.item() for loss in run.losses],
        "resident_bytes": memory.resident_bytes(),
        "resident_base_bytes": base,
        "engine_bytes": memory.engine_bytes(),
        **_plan_of(run),
    }


@contextmanager
def _alone() -> Iterator[None]:
    """Holds the lock that is named, if one is."""
    path = os.environ.get(_LOCK)
    if path is None:
        yield
        return
    import fcntl

    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _short(job: Job, mark: Callable[[], None]) -> dict[str, Any]:
    """A run for the profiler. A plan that was made again while it trained is the one that counts."""
    run, _ = begin(job)
    run.train(job.warm_up)
    mark()
    run.train(_PEAK_STEPS)
    return _plan_of(run)


def _gradients(run: Run) -> str:
    """Of a first step. On a card with kernels whose sums do not depend on chance; "" where some do.

    Only warned of, fused attention adds up in any order all the same.
    """
    if run.job.device != "cuda":
        return run.gradient_digest()
    torch.use_deterministic_algorithms(True)
    try:
        return run.gradient_digest()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        run.loop.optimizer.zero_grad()
        return ""
    finally:
        torch.use_deterministic_algorithms(False)


def _plan_of(run: Run) -> dict[str, Any]:
    plan = run.loop.plan
    if plan is None:
        return {}
    techniques = {step.technique for step in plan.steps}
    techniques.update(name for choice in plan.active for name in choice.techniques)
    return {
        "predicted_bytes": plan.predicted.allocated_peak_bytes,
        "predicted_reserved_bytes": plan.predicted.reserved_peak_bytes,
        "smallest_bytes": plan.smallest_peak_bytes,
        "fits": plan.fits,
        "exact": all(step.exact for step in plan.steps),
        "techniques": sorted(techniques),
        "peak_categories": dict(plan.predicted.by_category),
    }


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: a killed benchmark must not train on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)  # the runner made a group for us: nobody else is in it

    if os.getpgid(0) == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Reads the job, measures it, writes the result."""
    _end_with(int(sys.argv[2]))
    job, target = Job.from_dict(json.load(sys.stdin)), Path(sys.argv[1])
    found: dict[str, Any] = {}

    def report(new: dict[str, Any]) -> None:
        found.update(new)
        beside = target.with_suffix(".new")
        beside.write_text(json.dumps(found))
        os.replace(beside, target)

    try:
        measure(job, report)
    except Exception as error:
        status = "oom" if isinstance(error, _OUT_OF_MEMORY) else "failed"
        lines = str(error).strip().splitlines() or [""]
        report({"status": status, "reason": f"{type(error).__name__}: {lines[0]}"[:300]})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
