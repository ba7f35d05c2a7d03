# SPDX-License-Identifier: Apache-2.0
"""One micro-batch with a plan: what was predicted of it, and what real steps took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memscale.config.config import Config
from memscale.plans.plan import Prediction


@dataclass(frozen=True)
class Confirmed:
    """What real steps of a candidate took.

    Attributes:
        peak_bytes: highest number of bytes, counted as the budget is; 0 where the steps ran out of memory.
        step_ns: median time of a global step, from medians of its parts.
        steps: optimizer steps that were run.
        alloc_retries: times that CUDA's allocator had to give memory back before it found some.
        out_of_memory: the steps ran out of memory, or into the guard.
        loss: how the loop gets its loss from the model's output, see `TuningResult`.
    """

    peak_bytes: int
    step_ns: int
    steps: int
    alloc_retries: int = 0
    out_of_memory: bool = False
    loss: str = ""

    def merged(self, earlier: Confirmed | None) -> Confirmed:
        """With what was measured before: the higher peak, and the shorter time, the less disturbed one."""
        if earlier is None or self.out_of_memory:
            return self
        return replace(
            self,
            peak_bytes=max(self.peak_bytes, earlier.peak_bytes),
            step_ns=min(self.step_ns, earlier.step_ns),
            steps=self.steps + earlier.steps,
            alloc_retries=self.alloc_retries + earlier.alloc_retries,
        )


@dataclass(frozen=True)
class Candidate:
    """One micro-batch with the fastest plan that fits the budget.

    Attributes:
        micro_batch: samples of a forward.
        accumulation: forwards of a step in this process.
        fits: by prediction, the reserve included.
        peak_bytes: predicted device-used bytes.
        highest_bytes: upper end of the interval that the peak is expected in.
        smallest_peak_bytes: smallest peak that any plan reaches.
        step_ns: predicted time of a global step: all micro-batches and one step of the optimizer.
        techniques: of the plan; empty: nothing is needed.
        confirmed: what real steps took; None: none were run.
        prediction: of one micro-batch; the plan is inside.
        config: to wrap the model with, so that it gets this plan.
    """

    micro_batch: int
    accumulation: int
    fits: bool
    peak_bytes: int
    highest_bytes: int
    smallest_peak_bytes: int
    step_ns: int
    techniques: tuple[str, ...] = ()
    confirmed: Confirmed | None = None
    prediction: Prediction | None = field(default=None, repr=False, compare=False)
    config: Config | None = field(default=None, repr=False, compare=False)

    @property
    def best_ns(self) -> int:
        """Time of a global step: measured where it was, else predicted."""
        return self.step_ns if self.confirmed is None else self.confirmed.step_ns

    def samples_per_s(self) -> float:
        """Throughput of this process."""
        return self.micro_batch * self.accumulation / max(self.best_ns, 1) * 1e9
