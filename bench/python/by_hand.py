# SPDX-License-Identifier: Apache-2.0
"""MemScale beside checkpointing by hand, at the same peak: who is faster?

Each model of `by_hand_models.py` is checkpointed in the ways of `hand.py`. For each, the peak is measured and
MemScale gets it as its budget. Then both train, steps in turn (`contest.py`). On the CPU:

    peak ratio    measured peak of MemScale's run over that of the run by hand; met: at most 1
    time ratio    seconds per step, the same way round; below 1: MemScale is faster

MemScale keeps a reserve of 0.5 % of a budget for what no trace sees. `--no-reserve` adds it to the budget, so
that the plan may take the very peak of the run by hand. A pair counts as met where the measured peak is not
above the other, whether or not the plan, reserve included, says that it fits. A budget leaves a choice where
the smallest plan is at least 5 % below it: otherwise there is hardly more than one plan.

A way that changes the loss or that PyTorch refuses is left out, and that is said: joining T5's layers into
segments does, for they hand more to each other than a result. A run of MemScale that changes the loss, or
takes more than a budget that its plan says is met, is an error: exit status 1.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from by_hand_models import CONTESTANTS, Contestant
from common import Table, calibrate, median, parser
from contest import Duel, Measured, Prepare, Run, duel, measure, under
from hand import TECHNIQUES
from torch import nn

from memscale.plans.budget import budget_for

QUICK = ("gpt2", "convnet", "mlp")

COLUMNS = (
    "model",
    "by_hand",
    "hand_peak_bytes",
    "budget_bytes",
    "memscale_peak_bytes",
    "peak_ratio",
    "predicted_bytes",
    "fits",
    "smallest_bytes",
    "plain_peak_bytes",
    "hand_ms",
    "memscale_ms",
    "time_ratio",
    "rounds",
    "plain_ms",
    "checkpointed",
    "selective",
)

MOST_SLOWER, LEAST_FASTER, CHOICE = 1.02, 0.95, 0.95


@dataclass(frozen=True)
class Pair:
    """One way by hand and MemScale with its peak as the budget."""

    model: str
    technique: str
    plain: Measured
    hand: Measured
    ours: Measured
    times: Duel

    @property
    def peak_ratio(self) -> float:
        """Of the measured peaks."""
        return self.ours.peak_bytes / self.hand.peak_bytes

    @property
    def fits(self) -> bool:
        """The plan says that the budget is met."""
        return bool(self.ours.plan.fits)

    @property
    def met(self) -> bool:
        """The measured peak is not above that of the run by hand."""
        return self.peak_ratio <= 1

    @property
    def has_choice(self) -> bool:
        """The smallest plan is well below the budget."""
        return bool(self.ours.plan.smallest_peak_bytes <= CHOICE * self.hand.peak_bytes)

    @property
    def error(self) -> str:
        """What must never be, or nothing."""
        if self.ours.losses != self.plain.losses:
            return f"the loss is {self.ours.losses} and not {self.plain.losses}"
        if self.fits and self.ours.peak_bytes > self.ours.plan.budget_bytes:
            return (
                f"the plan says that it fits {self.ours.plan.budget_bytes:,} bytes, "
                f"and takes {self.ours.peak_bytes:,}"
            )
        return ""


def by_hand(contestant: Contestant, technique: Callable[[Any], None]) -> Prepare:
    """A way by hand, for the blocks of a model."""

    def prepare(model: nn.Module) -> None:
        technique(contestant.stacks(model))

    return prepare


def compare(name: str, rounds: int, with_reserve: bool, table: Table) -> list[Pair]:
    """All ways by hand for one model."""
    contestant = CONTESTANTS[name]
    plain = measure(contestant.entry)
    bare = Run(contestant.entry)
    bare.warm()
    for _ in range(rounds):
        bare.step()
    plain_ms = 1e3 * median(bare.seconds)
    del bare
    pairs = []
    for technique, apply in TECHNIQUES.items():
        prepare = by_hand(contestant, apply)
        try:
            hand = measure(contestant.entry, prepare)
        except RuntimeError as error:
            print(f"# {name}, {technique}: left out: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        if hand.losses != plain.losses:
            print(f"# {name}, {technique}: left out: it changes the loss", flush=True)
            continue
        budget = hand.peak_bytes if with_reserve else budget_for(hand.peak_bytes)
        ours = measure(contestant.entry, under(budget))
        times = fight(contestant, prepare, under(budget), rounds)
        pair = Pair(name, technique, plain, hand, ours, times)
        pairs.append(pair)
        table.add(*_cells(pair, rounds, plain_ms))
        if pair.error:
            print(f"# {name}, {technique}: ERROR: {pair.error}", flush=True)
    return pairs


def fight(contestant: Contestant, first: Prepare, second: Prepare, rounds: int) -> Duel:
    """Both variants at once, and nothing left of them."""
    result = duel(Run(contestant.entry, first), Run(contestant.entry, second), rounds)
    gc.collect()
    return result


def _cells(pair: Pair, rounds: int, plain_ms: float) -> list[Any]:
    plan = pair.ours.plan
    selective = sum("selective" in choice.techniques for choice in plan.active)
    return [
        pair.model,
        pair.technique,
        pair.hand.peak_bytes,
        plan.budget_bytes,
        pair.ours.peak_bytes,
        pair.peak_ratio,
        plan.predicted.allocated_peak_bytes,
        pair.fits,
        plan.smallest_peak_bytes,
        pair.plain.peak_bytes,
        1e3 * pair.times.first,
        1e3 * pair.times.second,
        pair.times.ratio,
        rounds,
        plain_ms,
        len(plan.active) - selective,
        selective,
    ]


def summarise(pairs: Sequence[Pair], title: str) -> None:
    """Worst and median of some pairs."""
    if not pairs:
        return
    ratios = sorted(pair.times.ratio for pair in pairs)
    worst = max(pairs, key=lambda pair: pair.times.ratio)
    faster = 100 * sum(ratio <= LEAST_FASTER for ratio in ratios) / len(ratios)
    slower = sum(ratio > MOST_SLOWER for ratio in ratios)
    print(
        f"{title}: {len(pairs)} pairs, time ratio median {median(ratios):.3f}, best {ratios[0]:.3f}, "
        f"worst {ratios[-1]:.3f} ({worst.model}, {worst.technique}); {faster:.0f} % at least 5 % faster, "
        f"{slower} more than 2 % slower; peak ratio median {median([pair.peak_ratio for pair in pairs]):.3f}"
    )


def report(pairs: Sequence[Pair]) -> None:
    """The figures of a whole run."""
    met = [pair for pair in pairs if pair.met]
    summarise(met, "all")
    summarise([pair for pair in met if pair.has_choice], "with a choice")
    for technique in TECHNIQUES:
        summarise([pair for pair in met if pair.technique == technique], technique)
    for pair in pairs:
        if not pair.met:
            print(
                f"not met: {pair.model}, {pair.technique}: by hand {pair.hand.peak_bytes:,} bytes, "
                f"the smallest plan {pair.ours.plan.smallest_peak_bytes:,}; "
                f"peak ratio {pair.peak_ratio:.5f}, time ratio {pair.times.ratio:.3f}"
            )


def main() -> None:
    """Compares on the chosen models."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(CONTESTANTS)} (all)")
    options.add_argument("--rounds", type=int, default=9, help="steps of each that count (9)")
    options.add_argument("--no-reserve", action="store_true", help="add the reserve to MemScale's budget")
    options.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}, three rounds")
    arguments = options.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    names = arguments.models or (QUICK if arguments.quick else list(CONTESTANTS))
    calibrate()
    table = Table("by_hand", COLUMNS, arguments.dry)
    pairs: list[Pair] = []
    began = time.monotonic()
    for index, name in enumerate(names, 1):
        print(f"# {index}/{len(names)} {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        pairs += compare(name, rounds, not arguments.no_reserve, table)
    report(pairs)
    if any(pair.error for pair in pairs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
