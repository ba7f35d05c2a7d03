# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that divide the global batch, each with the fastest plan that fits, by prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memscale.autotuning.candidate import Candidate
from memscale.autotuning.samples import Samples
from memscale.config.config import Config
from memscale.core.eight_bit_state import counted_in_8bit, may_have_our_state
from memscale.core.predictor import predict_step
from memscale.errors import ProfileError
from memscale.hardware.detect import Hardware
from memscale.plans.plan import PHASES, Prediction
from memscale.techniques.step_facts import StepFacts

_MOST_FITTING = 12
"""Sizes that fit and are looked at, from the largest down: a small one loses to its own fixed costs."""


def one_line(error: Exception) -> str:
    """An error's kind and first line."""
    line = str(error).strip().partition("\n")[0][:160]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def divisors(number: int) -> list[int]:
    """All divisors, rising.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    low = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*low, *(number // value for value in low)})


def batch_norms(model: nn.Module) -> list[str]:
    """Paths of the batch normalisations that will compute with a micro-batch's statistics.

    Those of `SyncBatchNorm` are over processes, but still of one micro-batch.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not model.training)
    ]


@dataclass(frozen=True)
class Candidates:
    """Predicts candidates of one search. Each size is traced once for a budget.

    Attributes:
        model: wrapped or not; left as it was.
        optimizer: trains it; None: AdamW is assumed.
        samples: the worst batches.
        samples_per_step: the share of the global batch that this process has.
        hardware: what it runs on.
        say: called with what is being done.
        refused: micro-batch → why the model, or the function that makes batches, does not take it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    samples: Samples
    samples_per_step: int
    hardware: Hardware
    say: Callable[[str], None] = lambda _: None
    refused: dict[int, str] = field(default_factory=dict)
    _known: dict[tuple[int, object], Candidate] = field(default_factory=dict)

    def of(self, micro_batch: int, config: Config) -> Candidate:
        """The candidate with this micro-batch under the budget of a configuration.

        Raises:
            ProfileError: the model has no data and cannot be traced without.
            Exception: the model rejects the sample, or the caller's function cannot make it.
        """
        key = micro_batch, config.memory_budget
        if key not in self._known:
            self.say(f"predicting micro-batch {micro_batch}")
            found = [self.predicted(sample, micro_batch, config) for sample in self.samples.of(micro_batch)]
            self._known[key] = self._candidate(micro_batch, found, config)
        return self._known[key]

    def predicted(self, sample: object, micro_batch: int, config: Config) -> Prediction:
        """One training step, with the gradients of earlier micro-batches where there are any."""
        step = StepFacts(
            optimizer=self.optimizer,
            grads_present=micro_batch < self.samples_per_step,
            training=None if self.model.training else True,
        )
        taken = self.optimizer if may_have_our_state(self.hardware) else None
        around = functools.partial(counted_in_8bit, config, taken)
        return predict_step(self.model, config, sample, step, self.hardware, around)

    def all(self, sizes: list[int], config: Config) -> list[Candidate]:
        """Candidates with rising micro-batches: those that fit from the largest down, and some that do not.

        Peaks rise with the batch, so the largest that fits is found by bisection. If what was predicted says
        otherwise, every size is predicted. Sizes that the model does not take are left out, and are in
        `refused`, but for the largest: its error is the caller's.

        Args:
            sizes: allowed ones, rising.
            config: has the budget.

        Raises:
            Exception: as `of`, for the largest.
        """
        try:
            return self._all(sizes, config)
        except _RefusedError as refused:
            if refused.size == sizes[-1]:
                raise refused.error from None
            self.refused[refused.size] = one_line(refused.error)
            return self.all([size for size in sizes if size != refused.size], config)

    def _all(self, sizes: list[int], config: Config) -> list[Candidate]:
        low, high = -1, len(sizes)  # below fits, above does not
        looked: dict[int, Candidate] = {}
        while high - low > 1:
            middle = (low + high) // 2 if looked else high - 1  # most often the largest fits, or nothing near
            looked[middle] = self._tried(sizes[middle], config)
            low, high = (middle, high) if looked[middle].fits else (low, middle)
        for index in range(max(0, low + 1 - _MOST_FITTING), low + 1):
            looked[index] = self._tried(sizes[index], config)
        if not all(looked[index].fits for index in looked if index <= low):
            looked = {index: self._tried(size, config) for index, size in enumerate(sizes)}
        return [looked[index] for index in sorted(looked)]

    def _tried(self, micro_batch: int, config: Config) -> Candidate:
        try:
            return self.of(micro_batch, config)
        except ProfileError:
            raise
        except Exception as error:
            raise _RefusedError(micro_batch, error) from error

    def _candidate(self, micro_batch: int, found: list[Prediction], config: Config) -> Candidate:
        """What holds for all the worst batches: the highest peaks, the longest time."""
        worst = max(found, key=lambda one: (not one.fits, one.device_used_peak_bytes))
        accumulation = self.samples_per_step // micro_batch
        return Candidate(
            micro_batch=micro_batch,
            accumulation=accumulation,
            fits=worst.fits,
            peak_bytes=worst.device_used_peak_bytes,
            highest_bytes=max(one.error_band_bytes[1] for one in found),
            smallest_peak_bytes=max(one.smallest_peak_bytes for one in found),
            step_ns=max(_step_ns(one, accumulation) for one in found),
            techniques=_techniques(worst),
            prediction=worst,
            config=config,
        )


class _RefusedError(Exception):
    """A size that the model does not take."""

    def __init__(self, size: int, error: Exception) -> None:
        super().__init__(str(error))
        self.size, self.error = size, error


def _step_ns(prediction: Prediction, accumulation: int) -> int:
    """Time of a global step: every micro-batch, and one step of the optimizer."""
    line = prediction.timeline
    update = PHASES.index("optimizer")
    begins = [when for when, phase in zip(line.time_ns, line.phase, strict=True) if phase == update]
    update_ns = max(prediction.step_time_ns - min(begins), 0) if begins else 0
    return accumulation * (prediction.step_time_ns - update_ns) + update_ns


def _techniques(prediction: Prediction) -> tuple[str, ...]:
    plan = prediction.plan
    assert plan is not None
    names = [step.technique for step in plan.steps]
    names += sorted({name for choice in plan.active for name in choice.techniques})
    return tuple(dict.fromkeys(names))
