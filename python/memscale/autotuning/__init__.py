# SPDX-License-Identifier: Apache-2.0
"""Batch sizes from predictions: `AutoTuner` for a loop, `BudgetBatchSampler` for samples of many lengths."""

from __future__ import annotations

from memscale.autotuning.batch_sampler import BudgetBatchSampler
from memscale.autotuning.candidate import Candidate, Confirmed
from memscale.autotuning.result import TuningResult
from memscale.autotuning.tuner import AutoTuner

__all__ = ["AutoTuner", "BudgetBatchSampler", "Candidate", "Confirmed", "TuningResult"]
