# SPDX-License-Identifier: Apache-2.0
"""The budget holds, as measured by PyTorch's own profiler, and a lower budget never costs more memory."""

from __future__ import annotations

import functools
import itertools

import pytest

import memscale
from amounts import some
from zoo.models import MAIN, Case
from zoo.training import Loop, Run, assert_same, peak_bytes, train

LOOP = Loop(steps=3)
SHARES = some((90, 75, 50), (90, 75, 60, 50))
NOISE = 1.005
"""Room for measuring noise when two measured peaks are compared."""


@functools.cache
def measured(case: Case) -> tuple[int, dict[int, tuple[memscale.Plan, int]]]:
    """The plain peak, and plan and measured peak at each share of it, the model included."""
    kept: list[Run] = []

    def peak(config: memscale.Config | None) -> int:
        return peak_bytes(lambda: kept.append(train(case, LOOP, config, record=False)))

    plain = peak(None)
    planned = {}
    for share in SHARES:
        measured_peak = peak(memscale.Config(memory_budget=plain * share // 100, enable_logging=False))
        planned[share] = (kept[-1].plan, measured_peak)
        assert_same(kept[0], kept[-1])
    return plain, planned


@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
class TestBudget:
    @pytest.mark.long
    def test_measured_peak_is_within_a_budget_that_fits(self, case: Case) -> None:
        plain, planned = measured(case)
        assert planned[90][0].fits and planned[90][0].active
        for share, (plan, peak) in planned.items():
            if plan.fits:
                assert peak <= plain * share // 100, f"at {share} %: {peak} > {plain * share // 100}"

    def test_measured_peak_is_within_the_error_band(self, case: Case) -> None:
        for share, (plan, peak) in measured(case)[1].items():
            low, high = plan.predicted.error_band_bytes
            assert low <= peak <= high, f"at {share} %: {peak} is not within {low} and {high}"

    def test_a_lower_budget_never_raises_the_peak(self, case: Case) -> None:
        planned = list(measured(case)[1].values())
        for (before, peak_before), (after, peak_after) in itertools.pairwise(planned):
            assert after.predicted.allocated_peak_bytes <= before.predicted.allocated_peak_bytes
            assert peak_after <= peak_before * NOISE

    def test_fits_means_that_the_prediction_fits(self, case: Case) -> None:
        for plan, _ in measured(case)[1].values():
            assert plan.fits == plan.predicted.fits
            assert plan.fits <= (plan.predicted.device_used_peak_bytes <= plan.budget_bytes)
            assert plan.smallest_peak_bytes <= plan.predicted.device_used_peak_bytes
            assert plan.fits or plan.advice
