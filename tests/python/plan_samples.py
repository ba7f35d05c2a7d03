# SPDX-License-Identifier: Apache-2.0
"""Plans made by hand, for tests of what is said about plans."""

from __future__ import annotations

import dataclasses

from memscale import _core
from memscale.plans.plan import Choice, Plan, Prediction, Timeline

MIB = 1 << 20
STEP_NS = 100_000_000
PEAK = 600 * MIB


def prediction(peak: int, step_ns: int) -> Prediction:
    return Prediction(
        allocated_peak_bytes=peak,
        reserved_peak_bytes=peak,
        device_used_peak_bytes=peak,
        context_bytes=0,
        by_category={"activation": peak},
        timeline=Timeline((), (), (), ()),
        step_time_ns=step_ns,
        error_band_bytes=(peak, peak),
        fits=True,
        budget_bytes=700 * MIB,
    )


def plan_of(*choices: Choice, fits: bool = True, bound: int = 21_000) -> Plan:
    return Plan(
        choices=choices,
        fits=fits,
        budget_bytes=700 * MIB,
        budget_source="memory_budget='700MiB'",
        predicted=prediction(PEAK, STEP_NS),
        plain=prediction(1400 * MIB, 90_000_000),
        smallest_peak_bytes=400 * MIB,
        time_bound_ppm=bound,
        digest="0123456789abcdef",
        profile="static",
        mode="balanced",
        walk=lambda: ((1400 * MIB, 90_000_000), (PEAK, STEP_NS), (400 * MIB, 120_000_000)),
    )


def choice(module: str, technique: str = "", rule: str = "", **more: object) -> Choice:
    rule = rule or ("chosen" if technique else "not-needed")
    made = Choice(
        module=module,
        type="Block",
        techniques=(technique,) if technique else (),
        rule=rule,
        reason=_core.rule_text(rule),
        calls=1,
        bytes=100 * MIB,
        ns=3_000_000,
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]
