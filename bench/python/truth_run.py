# SPDX-License-Identifier: Apache-2.0
"""One workload of `truth.py`, in a process of its own: measured plain and under each mode; the peer's answer.

    python truth_run.py NAME

prints one JSON object per line: a `Row`'s fields, or `{"failed": ...}`.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass
from typing import Any

import architectures
import torch
from common import calibrate, measure_peak, print_rows
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from truth_workloads import WORKLOADS, Workload

import memscale

MODES = (("conservative", 80), ("balanced", 65), ("aggressive", 50))
"""Mode and budget, in percent of the plain peak. The lowest is below what most of the models can reach."""

_STEPS = 2
_AMPLE = 1 << 44


@dataclass
class Row:
    """Prediction and truth of one workload under one mode.

    Attributes:
        workload: name.
        split: "tuned" or "held out".
        mode: "plain" or a mode of the configuration.
        budget_bytes: of the mode; 0 for plain.
        measured_bytes: highest number of live tensor bytes in building and training.
        predicted_bytes: the plan's prediction for the same.
        low_bytes: lower end of the error band.
        high_bytes: upper end.
        output_bytes: storages of the model's output, which the prediction takes to outlive backward.
        keeps: the training loop does hold them so long.
        method: "static" or "empirical".
        checkpointed: modules.
        fits: what the plan said of the budget.
        peer_bytes: torch's MemTracker on fake tensors; 0 for plans, -1 where it fails.
        peer_error: why.
    """

    workload: str
    split: str
    mode: str
    budget_bytes: int
    measured_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    output_bytes: int
    keeps: bool
    method: str
    checkpointed: int
    fits: bool
    peer_bytes: int = 0
    peer_error: str = ""


def step(work: Workload, model: nn.Module, batch: architectures.Batch, held: list[Any]) -> None:
    """Forward and backward. `held` is what the loop's variables hold: the last output, forward to forward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "autocast"):
        if work.keeps:
            held[:] = [architectures.call(model, batch)]
            loss = work.loss(held[0])
        else:
            loss = work.loss(architectures.call(model, batch))
    loss.backward()


def train(work: Workload, config: memscale.Config | None = None) -> list[Any]:
    """Builds and trains. With a configuration, returns what was planned for the steps, each once."""
    torch.manual_seed(0)
    model, batch = work.build(), work.batch()
    optimizer = work.optimizer(work.trainable(model))
    seen: list[Any] = []

    def loop(executor: Any) -> None:
        held: list[Any] = []
        for _ in range(_STEPS):
            for _ in range(work.accumulate):
                step(work, model, batch, held)
                if executor is not None and executor.planned not in seen:
                    seen.append(executor.planned)
            optimizer.step()
            optimizer.zero_grad()

    if config is None:
        loop(None)
    else:
        with memscale.optimize(model, optimizer, config) as executor:
            loop(executor)
    return seen


def settings(budget: int, mode: str | None = None) -> memscale.Config:
    """A configuration that says nothing, with a budget in bytes."""
    chosen = {} if mode is None else {"mode": mode}
    return memscale.Config(memory_budget=budget, enable_logging=False, **chosen)


def rows(name: str) -> list[Row]:
    """Measures one workload."""
    work = WORKLOADS[name]
    calibrate()
    measured = measure_peak(lambda: train(work))
    peer, why = peer_peak(work)
    ample = train(work, settings(_AMPLE))
    made = [_row(name, work, "plain", 0, measured, ample)]
    made[0].peer_bytes, made[0].peer_error = peer, why
    for mode, share in MODES:
        budget, seen = measured * share // 100, []
        config = settings(budget, mode)
        truth = measure_peak(lambda: seen.extend(train(work, config)))  # noqa: B023 - runs here and now
        made.append(_row(name, work, mode, budget, truth, seen))
        gc.collect()
    return made


def highest(seen: list[Any]) -> Any:
    """What was planned for the step with the highest peak.

    The plans of a run's steps differ: gradients are present in some, an output is still held.
    """
    return max(seen, key=lambda planned: planned.plan.predicted.allocated_peak_bytes)


def _row(name: str, work: Workload, mode: str, budget: int, measured: int, seen: list[Any]) -> Row:
    top = highest(seen)
    predicted = top.plan.predicted
    low, high = predicted.error_band_bytes
    return Row(
        name,
        "tuned" if work.tuned else "held out",
        mode,
        budget,
        measured,
        predicted.allocated_peak_bytes,
        low,
        high,
        top.trace.output_bytes,
        work.keeps,
        top.plan.profile,
        len(top.plan.active),
        top.plan.fits,
    )


def peer_peak(work: Workload) -> tuple[int, str]:
    """What torch's MemTracker says of the same loop on fake tensors, and why not, where it cannot."""
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.manual_seed(0)
            model, batch = work.build(), work.batch()
            optimizer = work.optimizer(work.trainable(model))
            tracker = MemTracker()
            tracker.track_external(
                model, optimizer, *[x for x in tree_leaves(batch) if isinstance(x, Tensor)]
            )
            with tracker:
                held: list[Any] = []
                for index in range(2):
                    for _ in range(work.accumulate):
                        step(work, model, batch, held)
                    optimizer.step()
                    optimizer.zero_grad()
                    if index == 0:
                        tracker.reset_mod_stats()
            return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], ""
    except Exception as error:
        return -1, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def main() -> None:
    """Prints the rows of the workload that is named."""
    print_rows(lambda: [asdict(row) for row in rows(sys.argv[1])])


if __name__ == "__main__":
    main()
