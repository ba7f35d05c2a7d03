# SPDX-License-Identifier: Apache-2.0
"""How much of a technique is taken: what there is room for stays, and more room never leaves less."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memscale.core import variants
from memscale.core.amounts import Resident, all_resident, amounts_of
from memscale.core.step_amounts import Refiner, greedy
from memscale.core.variants import Tried
from memscale.plans.plan import Plan
from memscale.techniques.base import Part

STATE, GRADIENT = "state_offload", "gradient_offload"


def parts_of(seed: int, count: int = 12) -> tuple[Part, ...]:
    """Of two techniques over one link."""
    chosen = random.Random(seed)
    sizes = [chosen.choice((1, 3, 4, 10, 33, 70)) << 20 for _ in range(count)]
    return tuple(
        Part(STATE if number % 3 else GRADIENT, f"layer.{number}", size, 5 * size // 2, number % 2)
        for number, size in enumerate(sizes)
    )


def bytes_of(parts: tuple[Part, ...], resident: Resident) -> int:
    return sum(part.bytes for part in parts if part.name in resident.get(part.technique, ()))


@pytest.mark.parametrize("seed", range(20))
def test_more_room_never_spares_less(seed: int) -> None:
    parts = parts_of(seed)
    total = sum(part.bytes for part in parts)
    found = []
    for room in range(0, total + 1, 1 << 20):
        resident = greedy(parts, room)
        found.append(bytes_of(parts, resident))
        leaving = [part.bytes for part in parts if part.name not in resident.get(part.technique, ())]
        assert found[-1] <= room and all(size > room - found[-1] for size in leaving)
    assert found == sorted(found) and found[0] == 0 and found[-1] == total


def test_what_saves_most_time_stays_first() -> None:
    slow = Part("weights", "block", 10, 10_000)
    parts = (Part(STATE, "small", 5, 50), Part(STATE, "large", 10, 100), Part(STATE, "free", 1, 0), slow)
    assert greedy(parts, 10) == {"weights": {"block"}}
    assert greedy(parts, 20) == {"weights": {"block"}, STATE: {"large"}}
    assert greedy(parts, 5, {STATE: frozenset({"large"})}) == {STATE: {"large", "small"}}
    assert greedy(parts, -1) == {}


def test_amounts_by_group() -> None:
    parts = (
        Part(STATE, "a", 5, 50),
        Part(STATE, "b", 7, 70, 1),
        Part(STATE, "c", 9, 90),
        Part(GRADIENT, "a", 2, 4),
    )
    resident = {STATE: frozenset({"c", "b"})}
    first, second = amounts_of(STATE, parts, resident)
    assert (first.group, first.rule, first.leaving, first.leaving_bytes, first.ns) == (0, "in_part", 1, 5, 50)
    assert (first.staying, first.staying_bytes) == (1, 9)
    assert (second.group, second.rule, second.leaving, second.staying_bytes) == (1, "stays", 0, 7)
    assert [amount.rule for amount in amounts_of(GRADIENT, parts, resident)] == ["leaves"]
    assert all_resident(parts, resident) == set()
    assert all_resident(parts, {**resident, GRADIENT: frozenset("a")}) == {GRADIENT}


# ---- the search, on ways that are made up ------------------------------------------------------------


def way(parts: tuple[Part, ...], peak: int, ns: int, budget: int, smallest: int, resident: Resident) -> Tried:
    predicted = SimpleNamespace(device_used_peak_bytes=peak, step_time_ns=ns)
    plan = SimpleNamespace(predicted=predicted, fits=peak <= budget, smallest_peak_bytes=smallest)
    return Tried((), cast(Plan, plan), cast(Any, None), parts=parts, resident=resident)


class Made:
    """Ways whose peak and time are what resident parts make them.

    Args:
        budget: most bytes.
        share: of a part's bytes that the peak has, in percent.
        checkpoint_ns: time of checkpoints that take 100 bytes off; None: there are none.
    """

    def __init__(self, budget: int, share: int = 100, checkpoint_ns: int | None = None) -> None:
        self.parts = tuple(Part(STATE, str(number), 10 + number, 10 * (10 + number)) for number in range(20))
        self.budget, self.share, self.checkpoint_ns = budget, share, checkpoint_ns
        self.traces = 0

    def again(self, _: Tried, resident: Resident) -> Tried:
        self.traces += 1
        return self.way(resident)

    def way(self, resident: Resident) -> Tried:
        stays = bytes_of(self.parts, resident) * self.share // 100
        ns = sum(part.ns for part in self.parts if part.name not in resident.get(STATE, ()))
        peak, smallest = 1000 + stays, 1000 + stays
        if self.checkpoint_ns is not None:
            smallest = peak - 100
            if peak > self.budget:
                peak, ns = smallest, ns + self.checkpoint_ns
        return way(self.parts, peak, ns, self.budget, smallest, resident)

    def best(self) -> Tried:
        first = self.way({})
        refiner = Refiner(self.budget, self.again, variants.better)
        found = refiner.refined([first], first)
        return found[-1] if found else first


@pytest.mark.parametrize("share", [50, 100, 130])
def test_it_fills_the_budget(share: int) -> None:
    """Also where parts take less, or more, than they say."""
    peaks = []
    for budget in range(1000, 1600, 40):
        made = Made(budget, share)
        plan = made.best().plan
        assert plan.fits and made.traces <= 4
        peaks.append(plan.predicted.device_used_peak_bytes)
        if share == 100 and budget < 1350:
            assert budget - plan.predicted.device_used_peak_bytes < 10
    assert peaks == sorted(peaks) and peaks[-1] > 1150


def test_checkpoints_make_room_where_they_are_cheaper() -> None:
    kept = Made(1100).best().plan.predicted.step_time_ns
    cheap, dear = Made(1100, checkpoint_ns=100), Made(1100, checkpoint_ns=100_000)
    assert cheap.best().plan.predicted.step_time_ns < kept == dear.best().plan.predicted.step_time_ns


def test_a_way_that_cannot_win_is_not_traced() -> None:
    made = Made(1200)
    slow, fast = made.way({}), made.way({})
    fast = replace(fast, plan=cast(Plan, SimpleNamespace(**vars(fast.plan))), parts=())
    cast(Any, fast.plan).predicted = SimpleNamespace(device_used_peak_bytes=900, step_time_ns=10)
    assert Refiner(1200, made.again, variants.better).refined([slow, fast], fast) == []
    assert made.traces == 0
