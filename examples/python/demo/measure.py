# SPDX-License-Identifier: Apache-2.0
"""The demo's measurements, without any limit: predicts, measures peaks, compares bit by bit, times.

    measure.py predict SIZE SHARE FILE     plan for SHARE of the plain peak, on paper
    measure.py compare SIZE BUDGET FILE    measured peaks, equality over 5 steps, step times

Memory is measured with `torch.profiler`: every allocation and release of a tensor is one of its events, and
the model is built inside the profile, so the peak counts weights, gradients and optimizer state too.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import train_bytes
from torch.profiler import ProfilerActivity, profile

import memscale

PROFILED_STEPS = 2
COMPARED_STEPS = 5
CURVE_POINTS = 500
MIB = 1024 * 1024


class Training:
    """The same training as in `train_bytes.py`, one step at a time."""

    def __init__(self, size: str, budget: int | None = None) -> None:
        torch.manual_seed(0)
        self.size = size
        self.text, self.generator = train_bytes.corpus(), torch.Generator().manual_seed(1)
        self.model = train_bytes.build(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        if budget is not None:
            memscale.wrap(self.model, memscale.Config(memory_budget=budget, enable_logging=False))

    def backward(self) -> torch.Tensor:
        """Forward and backward; returns the loss."""
        loss = self.model(**train_bytes.batch(self.text, self.size, self.generator)).loss
        loss.backward()
        return loss.detach().clone()

    def step(self) -> None:
        """Optimizer step."""
        self.optimizer.step()

    def clear(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad()


def predict(size: str, share: float) -> dict[str, Any]:
    """Plans for a share of the plain peak, without running anything."""
    training = Training(size)
    sample = train_bytes.batch(training.text, size, training.generator)
    start = time.perf_counter()
    # A first look, with all the memory there is, tells what the plain step takes.
    plain = memscale.plan(training.model, training.optimizer, sample_input=sample).plain.allocated_peak_bytes
    budget = round(plain * share) // MIB * MIB
    plan = memscale.plan(
        training.model, training.optimizer, memscale.Config(memory_budget=budget), sample_input=sample
    )
    return {
        "budget_bytes": budget,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "planning_seconds": time.perf_counter() - start,
        "plan": plan.to_dict(),
    }


def measured(size: str, budget: int | None) -> dict[str, Any]:
    """Trains a few steps under the profiler; returns the peak and the curve of the last step."""
    gc.collect()
    plan_peak_bytes = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training = Training(size, budget)
        for _ in range(PROFILED_STEPS):
            started_ns = time.time_ns()
            training.backward()
            training.step()
            training.clear()
        ended_ns = time.time_ns()
        if budget is not None:
            plan_peak_bytes = memscale.executor_of(training.model).plan.predicted.allocated_peak_bytes
        del training
        gc.collect()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    curve = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        at_ns = event.start_ns()
        live += event.nbytes()
        peak = max(peak, live)
        if started_ns <= at_ns <= ended_ns:
            curve.append(((at_ns - started_ns) / 1e6, live))
    return {"peak_bytes": peak, "plan_peak_bytes": plan_peak_bytes, "curve": thinned(curve)}


def thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `CURVE_POINTS` points, each the highest of its stretch of time."""
    if not curve:
        return []
    span = curve[-1][0] / CURVE_POINTS or 1.0
    highest: dict[int, tuple[float, int]] = {}
    for point in curve:
        bin_index = int(point[0] / span)
        if bin_index not in highest or point[1] > highest[bin_index][1]:
            highest[bin_index] = point
    return list(highest.values())


def compared(size: str, budget: int) -> dict[str, Any]:
    """Trains plain and wrapped side by side from the same seeds, comparing everything after every step."""
    pair = [Training(size), Training(size, budget)]
    seconds: list[list[tuple[float, float]]] = [[], []]
    difference = None
    for step in range(COMPARED_STEPS):
        losses = []
        for training, times in zip(pair, seconds, strict=True):
            torch.manual_seed(100 + step)  # the same dropout masks
            start, start_processor = time.perf_counter(), time.process_time()
            losses.append(training.backward())
            training.step()
            times.append((time.perf_counter() - start, time.process_time() - start_processor))
        difference = difference or first_difference(pair, losses)
        for training in pair:
            training.clear()
        print(f"compared step {step + 1}", flush=True)
    # The first step is the one that plans; the others are what a training run consists of.
    medians = [[statistics.median(kind) for kind in zip(*times[1:], strict=True)] for times in seconds]
    (plain, plain_processor), (wrapped, wrapped_processor) = medians
    return {
        "first_difference": difference,
        "compared_steps": COMPARED_STEPS,
        "plain_step_seconds": plain,
        "wrapped_step_seconds": wrapped,
        "step_time_ratio": wrapped / plain,
        "processor_time_ratio": wrapped_processor / plain_processor,
    }


def first_difference(pair: list[Training], losses: list[torch.Tensor]) -> str | None:
    """The first of loss, gradients and weights that is not equal in every bit."""
    if not torch.equal(*losses):
        return f"loss: {losses[0].item()!r} and {losses[1].item()!r}"
    plain, wrapped = (dict(training.model.named_parameters()) for training in pair)
    for name, parameter in plain.items():
        gradients = parameter.grad, wrapped[name].grad
        if gradients[0] is None or gradients[1] is None or not torch.equal(*gradients):
            return f"gradient of {name}"
        if not torch.equal(parameter, wrapped[name]):
            return f"weight {name}"
    return None


def main() -> None:
    what, size, number, path = sys.argv[1:]
    if what == "predict":
        result = predict(size, float(number))
    else:
        plain = measured(size, None)
        print("measured plain", flush=True)
        wrapped = measured(size, int(number))
        print("measured wrapped", flush=True)
        result = {"plain": plain, "wrapped": wrapped, "steps": compared(size, int(number))}
    Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
