# SPDX-License-Identifier: Apache-2.0
"""Variants of a step: combinations of step techniques, and what each technique brings.

    without      the model as it is, or with what the user asked for (autocast)
    with all     every technique that the configuration has, wherever it can attach
    without one  each technique left out in turn, if there are several and all of them come near the budget
    less         those that can be used in part, with as much resident as fits; see `step_amounts`

Each way is traced and decided on its own. The best one fits, and is the fastest that does; if none fits, it
is the smallest. Where the plain step fits without slowing down, nothing else is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from memscale.core.amounts import NOTHING, Resident, amounts_of
from memscale.plans.plan import Plan, StepChoice
from memscale.techniques.base import Part, PartialAttachment, PathAttachment
from memscale.techniques.precision.bf16_weights import NAME as BF16_WEIGHTS
from memscale.techniques.step_table import STEP_TECHNIQUES, StepTechnique
from memscale.techniques.tiles.attention_tiles import NAME as ATTENTION_TILES
from memscale.techniques.tiles.row_tiles import NAME as ROW_TILES

if TYPE_CHECKING:
    from torch import nn

    from memscale.config.config import EffectiveConfig
    from memscale.techniques.base import StepAttachment, Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.trace.step import Trace

Place = tuple[str, str]
"""Name of a step technique, and path of the module that it is attached to."""

Way = tuple[StepTechnique, ...]
"""The techniques attached, in their order; () is the step as it is."""


_NEAR: Final = 4
"""A plan within a quarter of the budget above it is near."""

_TILES: Final = ("loss_tile", ROW_TILES, ATTENTION_TILES)
"""They change how a model's own code computes, so that its code may find that it does not go with them."""


@dataclass(frozen=True)
class Tried:
    """One way, traced and decided.

    Attributes:
        way: what was attached.
        places: where a technique did its work.
        idle: (technique, reason) of those that did nothing and say why.
        kinds: path → class name, of `places`.
        words: technique → what it does here, of those that say more than their row in the table.
        parts: what could be resident of optimizer-side techniques.
        resident: what is.
    """

    way: Way
    plan: Plan
    trace: Trace
    places: tuple[Place, ...] = ()
    idle: tuple[tuple[str, str], ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    resident: Resident = field(default_factory=lambda: NOTHING)

    @property
    def names(self) -> tuple[str, ...]:
        """Techniques that did something."""
        return tuple(technique.name for technique in self.way if self.does(technique.name))

    def does(self, name: str) -> bool:
        """Whether a technique did something."""
        return any(place[0] == name for place in self.places)


def techniques_of(config: EffectiveConfig) -> Way:
    """What a configuration has, in order."""
    return tuple(
        technique
        for technique in STEP_TECHNIQUES
        if technique.wanted(config) and (technique.exact or not config.exact)
    )


def for_way(around: Surroundings, way: Iterable[StepTechnique]) -> Surroundings:
    """The surroundings of the techniques of a way, which may ask for each other."""
    return replace(around, way=frozenset(technique.name for technique in way))


def found(model: nn.Module, around: Surroundings, way: Iterable[StepTechnique]) -> list[StepAttachment]:
    """Where the techniques of a way could attach in a bare model."""
    return [place for technique in way for place in technique.find(model, around)]


def suspects(names: Iterable[str], message: str) -> list[frozenset[str]]:
    """Which techniques a step may have to do without that cannot be traced with all of them.

    Args:
        names: of those that may be left out.
        message: of the error. One that refuses what the model does says its name.

    Returns:
        Groups to leave out, the likeliest first, and all of them at last.
    """
    names = list(names)
    tiles = [name for name in names if name in _TILES]
    groups = [
        [name for name in names if name in message],
        [name for name in names if name == BF16_WEIGHTS],
        *([name] for name in tiles),
        tiles,
        names,
    ]
    return list(dict.fromkeys(frozenset(group) for group in groups if group))


def placed(model: nn.Module, around: Surroundings, places: Sequence[Place]) -> list[StepAttachment]:
    """Attachments for the places that a plan names, on this model."""
    names = {name for name, _ in places}
    way = [technique for technique in STEP_TECHNIQUES if technique.name in names]
    around = for_way(around, way)
    return [item for item in found(model, around, way) if (item.name, item.path) in set(places)]


@contextmanager
def attached(attachments: Sequence[StepAttachment], step: StepFacts) -> Iterator[StepFacts]:
    """Has them attached inside the block, which gets the step as it is to be run with them.

    Optimizer-side techniques among them are described by the step, not attached.
    """
    done: list[StepAttachment] = []
    try:
        for item in attachments:
            if isinstance(item, PathAttachment):
                step = item.traced(step)
                continue
            item.beneath = step.watch if item.path == "" else None
            item.attach()
            done.append(item)
        forward = step.forward if step.forward is None or step.watch is None else step.watch.original
        yield replace(step, forward=forward)
    finally:
        for item in reversed(done):
            item.undo()


def tried(
    way: Way, attachments: Sequence[StepAttachment], decided: tuple[Plan, Trace], why_not: dict[str, str]
) -> Tried:
    """What came of a way.

    Args:
        way: the techniques.
        attachments: where they were attached in the trace.
        decided: plan and trace.
        why_not: technique → why there was no place for it.
    """
    plan, trace = decided
    places = tuple((item.name, item.path) for item in attachments if item.used)
    working = {name for name, _ in places}
    idle = dict(why_not)
    for item in attachments:
        if item.reason and item.name not in working:
            idle.setdefault(item.name, item.reason)
    kinds = {path: kind for path, kind in trace.modules if any(path == place for _, place in places)}
    words = {item.name: str(item.what) for item in attachments if hasattr(item, "what")}
    partial = [item for item in attachments if isinstance(item, PartialAttachment)]
    parts = tuple(part for item in partial for part in item.parts())
    resident = {item.name: item.resident for item in partial if item.resident}
    return Tried(way, plan, trace, places, tuple(idle.items()), kinds, words, parts, resident)


def better(first: Tried, second: Tried) -> Tried:
    """The one to take; the first where both are as good."""
    return second if _rank(second) < _rank(first) else first


def _rank(item: Tried) -> tuple[Any, ...]:
    predicted = item.plan.predicted
    if item.plan.fits:
        return (0, predicted.step_time_ns, predicted.device_used_peak_bytes, len(item.names))
    return (1, predicted.device_used_peak_bytes, predicted.step_time_ns, len(item.names))


def far_above(plan: Plan, budget_bytes: int) -> bool:
    """Whether a plan with several techniques is so far above a budget that with fewer of them none fits.

    One that is left out gives back what its engine has in memory, and takes what it let leave. A card's
    context is in both, and is no plan's to change.
    """
    context = plan.predicted.context_bytes
    staging = plan.staging_bytes + plan.path_staging_bytes
    needed = plan.predicted.device_used_peak_bytes - context - staging
    available = max(0, budget_bytes - context)
    return not plan.fits and needed > available + available // _NEAR


def combined(best: Tried, ways: Sequence[Tried], plain: Plan) -> Plan:
    """The plan of the best way, with what is known from the others.

    Args:
        best: one of `ways`.
        ways: all that were tried; the first is the step as it is.
        plain: has the prediction of the step without MemScale.
    """
    smallest = min(item.plan.smallest_peak_bytes for item in ways)
    steps = tuple(_choice(best, technique, ways) for technique in best.way if best.does(technique.name))
    idle = (pair for item in ways for pair in item.idle if not best.does(pair[0]))
    notes = {f"{name}: {reason}": None for name, reason in idle}
    return replace(
        best.plan,
        steps=steps,
        digest=_digest(best),
        predicted=replace(best.plan.predicted, smallest_peak_bytes=smallest),
        plain=replace(plain.plain, smallest_peak_bytes=smallest),
        smallest_peak_bytes=smallest,
        time_bound_ppm=_bound_ppm(best.plan, [item.plan for item in ways]),
        notes=(*best.plan.notes, *(note for note in notes if note not in best.plan.notes)),
    )


def _digest(best: Tried) -> str:
    """That of the core's plan, and where step techniques are attached."""
    if not best.places:
        return best.plan.digest
    resident = [f"{name} spares {part}" for name, parts in best.resident.items() for part in sorted(parts)]
    text = "\n".join([best.plan.digest, *(f"{name} {path}" for name, path in best.places), *resident])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _choice(best: Tried, technique: StepTechnique, ways: Sequence[Tried]) -> StepChoice:
    """What a technique brings: against the best of the ways without it."""
    without = [item for item in ways if not item.does(technique.name)]
    other = without[0]
    for item in without[1:]:
        other = better(other, item)
    mine, theirs = best.plan.predicted, other.plan.predicted
    modules = tuple(path for name, path in best.places if name == technique.name)
    return StepChoice(
        technique=technique.name,
        modules=modules,
        types=tuple(sorted({best.kinds[path] for path in modules})),
        exact=technique.exact,
        reason=best.words.get(technique.name, technique.what),
        bytes=theirs.device_used_peak_bytes - mine.device_used_peak_bytes,
        ns=mine.step_time_ns - theirs.step_time_ns,
        other_fits=other.plan.fits,
        amounts=amounts_of(technique.name, best.parts, best.resident),
    )


def _bound_ppm(plan: Plan, plans: Sequence[Plan]) -> int:
    """How much slower than the best possible, over all ways that were tried, a plan may be."""
    if not plan.fits:
        return plan.time_bound_ppm
    lowest = min(
        item.predicted.step_time_ns * 1_000_000 // (1_000_000 + item.time_bound_ppm)
        for item in plans
        if item.fits
    )
    return max(0, plan.predicted.step_time_ns * 1_000_000 // max(lowest, 1) - 1_000_000)
