# SPDX-License-Identifier: Apache-2.0
"""What selective checkpoints bring: plans of whole blocks against plans that may keep results inside a block.

On stacks of attention and MLP blocks. Budgets lie evenly between the smallest peak that whole blocks reach
and the plain one. For each, both kinds of plan are made and measured; their steps run in turn (`contest.py`):

    time ratio    seconds per step with selective checkpoints over those without; below 1: they win
    overhead      what a plan costs on top of the plain step, in percent of the plain step

With more to choose from, a plan must be as fast or faster by its own prediction, losses must be the same, and
peaks within the budget where the plan says so; otherwise the exit status is 1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from architectures import Entry
from by_hand_models import CONTESTANTS
from common import Table, calibrate, median, parser
from contest import Duel, Measured, Run, duel, measure, under

from memscale import _core
from memscale.plans.budget import budget_for

QUICK = ("llama",)
MODELS = ("gpt2", "llama", "bert", "vit")

COLUMNS = (
    "model",
    "budget_bytes",
    "between_pct",
    "whole_peak_bytes",
    "selective_peak_bytes",
    "whole_ms",
    "selective_ms",
    "plain_ms",
    "time_ratio",
    "whole_overhead_pct",
    "selective_overhead_pct",
    "predicted_ratio",
    "whole_checkpoints",
    "checkpoints",
    "selective",
    "kept",
    "rounds",
)


@contextmanager
def whole_blocks_only() -> Iterator[None]:
    """Plans that are made inside checkpoint whole modules only.

    `decide` of the core has an option for that which the package never sets; this sets it.
    """
    decide = _core.decide
    _core.decide = functools.partial(decide, allow_selective=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        _core.decide = decide


@dataclass(frozen=True)
class Point:
    """Both plans under one budget."""

    budget: int
    whole: Measured
    free: Measured
    times: Duel

    @property
    def predicted_ratio(self) -> float:
        """Step time by the plans' own reckoning."""
        return float(self.free.plan.predicted.step_time_ns / self.whole.plan.predicted.step_time_ns)

    @property
    def errors(self) -> list[str]:
        """What must never be."""
        found = []
        for name, side in (("whole", self.whole), ("selective", self.free)):
            if side.plan.fits and side.peak_bytes > self.budget:
                found.append(f"{name} takes {side.peak_bytes:,} bytes")
        if self.whole.plan.fits and not self.free.plan.fits:
            found.append("only whole blocks fit")
        if self.whole.plan.fits and self.predicted_ratio > 1:
            found.append(f"more choice gives a slower plan: {self.predicted_ratio:.4f}")
        if self.whole.losses != self.free.losses:
            found.append("the losses differ")
        return found


def budgets(entry: Entry, points: int) -> list[int]:
    """From the smallest that whole blocks can meet, up to but not including what the plain step needs."""
    smallest = measure(entry, under(1), whole_blocks_only).plan
    low, high = budget_for(smallest.smallest_peak_bytes), budget_for(smallest.plain.device_used_peak_bytes)
    return [low + (high - low) * index // points for index in range(points)]


def at(entry: Entry, budget: int, rounds: int) -> Point:
    """Both plans under one budget, measured."""
    whole, free = measure(entry, under(budget), whole_blocks_only), measure(entry, under(budget))
    times = duel(Run(entry, under(budget), whole_blocks_only), Run(entry, under(budget)), rounds)
    return Point(budget, whole, free, times)


def _kept(plan: Any) -> int:
    return sum(len(getattr(choice, "kept", ())) for choice in plan.active)


def _selective(plan: Any) -> int:
    return sum("selective" in choice.techniques for choice in plan.active)


def compare(name: str, points: int, rounds: int, table: Table) -> list[Point]:
    """All budgets for one model."""
    entry = CONTESTANTS[name].entry
    bare = Run(entry)
    bare.warm()
    for _ in range(rounds):
        bare.step()
    plain = median(bare.seconds)
    del bare
    made = []
    for index, budget in enumerate(budgets(entry, points)):
        point = at(entry, budget, rounds)
        made.append(point)
        table.add(
            name,
            budget,
            100 * index / points,
            point.whole.peak_bytes,
            point.free.peak_bytes,
            1e3 * point.times.first,
            1e3 * point.times.second,
            1e3 * plain,
            point.times.ratio,
            100 * (point.times.first / plain - 1),
            100 * (point.times.second / plain - 1),
            point.predicted_ratio,
            len(point.whole.plan.active),
            len(point.free.plan.active) - _selective(point.free.plan),
            _selective(point.free.plan),
            _kept(point.free.plan),
            rounds,
        )
        for error in point.errors:
            print(f"# {name} at {budget:,}: ERROR: {error}", flush=True)
    return made


def main() -> None:
    """Compares on the chosen models."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(CONTESTANTS)} ({', '.join(MODELS)})")
    options.add_argument("--points", type=int, default=6, help="budgets per model (6)")
    options.add_argument("--rounds", type=int, default=9, help="steps of each that count (9)")
    options.add_argument("--quick", action="store_true", help="one model, three budgets, three rounds")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.points, arguments.rounds = 3, 3
    calibrate()
    table = Table("selective", COLUMNS, arguments.dry)
    points: list[Point] = []
    for name in arguments.models or (QUICK if arguments.quick else MODELS):
        print(f"# {name}", file=sys.stderr, flush=True)
        made = compare(name, arguments.points, arguments.rounds, table)
        ratios = [point.times.ratio for point in made]
        print(
            f"# {name}: time ratio median {median(ratios):.3f}, best {min(ratios):.3f}, "
            f"worst {max(ratios):.3f}"
        )
        points += made
    wins = sum(point.times.ratio < 1 for point in points)
    print(f"{len(points)} budgets, selective checkpoints are faster at {wins}")
    if any(point.errors for point in points):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
