# SPDX-License-Identifier: Apache-2.0
"""One model of `evaluation.py`, in a process of its own: forwards without gradients, measured and predicted.

    python evaluation_run.py NAME

prints one JSON object per line: a `Row`'s fields, or `{"failed": ...}`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import architectures
import torch
from common import print_rows
from torch import nn
from truth_run import step
from truth_workloads import WORKLOADS, Workload

import memscale
from memscale.benchmarks.memory import cpu_peaks

_AMPLE = 1 << 44
_STEPS = 2


@dataclass
class Row:
    """Prediction and truth of one forward.

    Attributes:
        workload: name.
        when: "alone", or "in training": beside the optimizer's state and the last step's gradients.
        measured_bytes: highest number of live tensor bytes during the forward.
        predicted_bytes: the same, predicted.
        predict_s: time that took, the second time: kernels are measured the first time.
        forward_s: time of the forward.
        method: "static" or "empirical".
    """

    workload: str
    when: str
    measured_bytes: int
    predicted_bytes: int
    predict_s: float
    forward_s: float
    method: str


def forward(work: Workload, model: nn.Module, batch: architectures.Batch) -> None:
    """One forward of an evaluation loop."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "autocast"):
        architectures.call(model, batch)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    made = run()
    return made, time.perf_counter() - began


def row(name: str, trains: bool) -> Row:
    """Measures one forward of a model, and predicts it."""
    work = WORKLOADS[name]
    made: dict[str, Any] = {}

    def run(mark: Callable[[], None]) -> None:
        torch.manual_seed(0)
        model, batch = work.build(), work.batch()
        optimizer = work.optimizer(work.trainable(model)) if trains else None
        for _ in range(_STEPS if optimizer else 0):
            optimizer.zero_grad()
            step(work, model, batch, [])
            optimizer.step()
        model.eval()
        forward(work, model, batch)
        mark()
        forward(work, model, batch)
        made.update(model=model, batch=batch, optimizer=optimizer)

    measured = cpu_peaks(run).allocated_bytes
    model, batch = made["model"], made["batch"]

    def predict() -> memscale.plans.plan.Prediction:
        with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "autocast"):
            return memscale.predict(
                model, made["optimizer"], sample_input=batch, training=False, memory_budget=_AMPLE
            )

    predict()
    prediction, seconds = _timed(predict)
    _, forward_s = _timed(lambda: forward(work, model, batch))
    when, predicted = "in training" if trains else "alone", prediction.allocated_peak_bytes
    return Row(name, when, measured, predicted, seconds, forward_s, prediction.method)


def main() -> None:
    """Prints the rows of the model that is named."""
    print_rows(lambda: [asdict(row(sys.argv[1], trains)) for trains in (False, True)])


if __name__ == "__main__":
    main()
