# SPDX-License-Identifier: Apache-2.0
"""The choices of a plan as the rows of a table that a person can read, for text, reports and programs alike.

    choices   h.0 selective   h.0.attn covered   h.1 selective   h.1.attn covered   norm no-saving
    units     h.0             (inside h.0)       h.1             (inside h.1)       norm
    rows      2 × h.0-1: selective, 1 inside each                                   norm: keep

A *unit* is what is decided as one: a module, or siblings that are checkpointed as one region. Units that
differ in nothing but the number of their layer and a little in bytes and time share a row. Modules inside one
that is checkpointed follow it and have no row. Those that were never candidates share a row per reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memscale.plans.kept_ops import operation_of
from memscale.plans.words import (
    bytes_range,
    few,
    kept_words,
    ms_range,
    pattern,
    range_parts,
    ranges,
    signed_ms_range,
)

if TYPE_CHECKING:
    from memscale.plans.data import Choice, PlanData

__all__ = ["AS_ONE", "PlanRow", "plan_rows", "regions"]

_CANDIDATE_RULES: Final = frozenset({"not-needed", "costlier", "split", "covered"})
"""Why something is kept that could have been checkpointed; every other reason bars it."""

AS_ONE: Final = " as one"
"""Follows the technique of a region of several modules."""

_ALIKE: Final = 0.1  # bytes and times that differ by less than this share count as the same
_ALIKE_NS: Final = 50_000
_MOST_LOOKED_AT: Final = 16  # groups of one kind: many different layers must not take a square of time


@dataclass(frozen=True)
class PlanRow:
    """One row: units that are treated alike.

    Attributes:
        modules: their paths, such as "h.0-11"; of many that differ, a few.
        count: how many units.
        type: class name; several where a region has different children.
        technique: "keep", "checkpoint", "selective", "offload"; "checkpoint as one" for a region of several
            modules.
        bytes: what each of them frees at the plain step's peak, or would: least and most.
        ns: time that each adds to the step, or would: least and most.
        rule: key of the rule.
        reason: the rule in words.
        notes: sentences: what is kept, what lies inside, what if it were the other way round.
        choices: all choices of these units, in module order.
    """

    modules: str
    count: int
    type: str
    technique: str
    bytes: tuple[int, int]
    ns: tuple[int, int]
    rule: str
    reason: str
    notes: tuple[str, ...]
    choices: tuple[Choice, ...]

    @property
    def applied(self) -> bool:
        """Whether a technique is applied."""
        return self.technique != "keep"

    @property
    def barred(self) -> bool:
        """Whether these modules were never candidates."""
        return not self.applied and self.rule not in _CANDIDATE_RULES


@dataclass(frozen=True)
class _Unit:
    """A choice, or the choices of one region: each has the numbers of the whole region."""

    choices: tuple[Choice, ...]

    @property
    def first(self) -> Choice:
        return self.choices[0]

    @property
    def bytes(self) -> int:
        return self.first.bytes

    @property
    def ns(self) -> int:
        return self.first.ns

    @property
    def is_region(self) -> bool:
        return len(self.choices) > 1

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for units that may share a row."""
        first = self.first
        operations = tuple(sorted(Counter(map(operation_of, first.kept)).items()))
        shape = tuple((pattern(choice.module), choice.type) for choice in self.choices)
        return shape, first.techniques, first.boundary, first.rule, first.calls, operations

    def is_like(self, other: _Unit) -> bool:
        """Whether bytes and times are about the same."""
        near = abs(self.bytes - other.bytes) <= _ALIKE * max(self.bytes, other.bytes)
        apart = abs(self.ns - other.ns)
        return near and apart <= max(_ALIKE * max(self.ns, other.ns), _ALIKE_NS)


def plan_rows(plan: PlanData, verbose: bool = False) -> list[PlanRow]:
    """The rows: what is applied, then what was not although it could have been, then what could not be.

    Args:
        plan: any plan.
        verbose: one row per module, in module order.
    """
    if verbose:
        return [_row(plan, [_Unit((choice,))], {}) for choice in plan.choices]
    units = list(map(_Unit, regions(plan.choices)))
    inside = _inside(plan.choices)
    applied = [unit for unit in units if unit.first.techniques]
    followers = {path for paths in inside.values() for path in paths}
    rest = [unit for unit in units if not unit.first.techniques and unit.first.module not in followers]
    candidates = [unit for unit in rest if unit.first.rule in _CANDIDATE_RULES]
    barred = [unit for unit in rest if unit.first.rule not in _CANDIDATE_RULES]
    rows = [_row(plan, group, inside) for group in [*_grouped(applied), *_grouped(candidates)]]
    return [*rows, *_barred_rows(barred)]


# ---- units and groups --------------------------------------------------------------------------------


def regions(choices: Iterable[Choice]) -> list[tuple[Choice, ...]]:
    """Joined choices with the one that their region begins with, and every other choice alone.

    Args:
        choices: in module order; kept ones may stand inside a region.
    """
    found: list[list[Choice]] = []
    last: list[Choice] | None = None
    for choice in choices:
        if choice.joined and last is not None:
            last.append(choice)
            continue
        found.append([choice])
        if choice.techniques:
            last = found[-1]
    return [tuple(region) for region in found]


def technique_words(choice: Choice) -> str:
    """The techniques of a choice, "" for none."""
    return " + ".join(choice.techniques) + (", boundary offloaded" if choice.boundary else "")


def _inside(choices: Sequence[Choice]) -> dict[str, list[str]]:
    """Path of an applied choice → paths of the kept modules below it."""
    inside: dict[str, list[str]] = {choice.module: [] for choice in choices if choice.techniques}
    for choice in choices:
        if choice.techniques:
            continue
        path = choice.module
        while path and path not in inside:
            path = path.rpartition(".")[0]
        if path in inside and path != choice.module:
            inside[path].append(choice.module)
    return inside


def _grouped(units: Iterable[_Unit]) -> list[list[_Unit]]:
    """Units that are alike, in the order of the first of each group."""
    by_key: dict[tuple[Any, ...], list[list[_Unit]]] = {}
    groups: list[list[_Unit]] = []
    for unit in units:
        alike = by_key.setdefault(unit.key, [])
        home = next((group for group in alike[-_MOST_LOOKED_AT:] if group[0].is_like(unit)), None)
        if home is None:
            home = []
            alike.append(home)
            groups.append(home)
        home.append(unit)
    return groups


# ---- rows ------------------------------------------------------------------------------------------


def _row(plan: PlanData, group: Sequence[_Unit], inside: dict[str, list[str]]) -> PlanRow:
    first = group[0].first
    choices = tuple(choice for unit in group for choice in unit.choices)
    technique = technique_words(first) or "keep"
    if group[0].is_region:
        modules = ", ".join(few([ranges(choice.module for choice in unit.choices) for unit in group]))
        technique += AS_ONE
    else:
        modules = ", ".join(few(range_parts(choice.module for choice in choices)))
        technique += " with the one before" if first.joined else ""
    return PlanRow(
        modules=modules,
        count=len(group),
        type=", ".join(few(list(dict.fromkeys(choice.type for choice in group[0].choices)))),
        technique=technique,
        bytes=_least_and_most([unit.bytes for unit in group]),
        ns=_least_and_most([unit.ns for unit in group]),
        rule=first.rule,
        reason=first.reason,
        notes=tuple(_notes(plan, group, inside)),
        choices=choices,
    )


def _barred_rows(units: Iterable[_Unit]) -> list[PlanRow]:
    by_rule: dict[str, list[Choice]] = {}
    for unit in units:
        by_rule.setdefault(unit.first.rule, []).extend(unit.choices)
    return [
        PlanRow(
            modules=", ".join(few(range_parts(choice.module for choice in choices))),
            count=len(choices),
            type=", ".join(few(list(dict.fromkeys(choice.type for choice in choices)))),
            technique="keep",
            bytes=(0, 0),
            ns=(0, 0),
            rule=rule,
            reason=choices[0].reason,
            notes=(),
            choices=tuple(choices),
        )
        for rule, choices in by_rule.items()
    ]


def _notes(plan: PlanData, group: Sequence[_Unit], inside: dict[str, list[str]]) -> Iterator[str]:
    first = group[0].first
    if "selective" in first.techniques:
        yield f"keeps {kept_words(first.kept)}"
    if first.offloads:
        yield _moved_words(group)
    below = [sum(len(inside.get(choice.module, ())) for choice in unit.choices) for unit in group]
    if any(below):
        yield _inside_words(below)
    others = [choice for unit in group for choice in unit.choices if choice.other_peak_bytes]
    if others:
        yield _other_words(plan, others)


def _moved_words(group: Sequence[_Unit]) -> str:
    """What each unit has off the device, and what of the copies shows in the step."""
    firsts = [unit.first for unit in group]
    low, high = _least_and_most([first.moved_count for first in firsts])
    count = f"{low} tensor{'' if high == 1 else 's'}" if low == high else f"{low} to {high} tensors"
    size = bytes_range(_least_and_most([first.moved_bytes for first in firsts]))
    what = "what it holds for its recompute" if firsts[0].boundary else "what it saves"
    time = ms_range(_least_and_most([first.transfer_ns for first in firsts]))
    return f"offloads {what}: {count}, {size}; {time} of the copies does not hide"


def _inside_words(counts: Sequence[int]) -> str:
    """How many modules lie inside each unit."""
    low, high = _least_and_most(counts)
    number = f"{low}" if low == high else f"{low} to {high}"
    where = "inside each" if len(counts) > 1 else "inside"
    return f"{number} {f'module {where} follows' if high == 1 else f'modules {where} follow'}"


def _other_words(plan: PlanData, choices: Sequence[Choice]) -> str:
    """What if each of these choices were the other way round, alone."""
    applied = bool(choices[0].techniques)
    peaks = _least_and_most([choice.other_peak_bytes for choice in choices])
    now = plan.predicted.allocated_peak_bytes
    times = _least_and_most([choice.other_ns - plan.predicted.step_time_ns for choice in choices])
    low, high = peaks[0] - now, peaks[1] - now
    if applied:
        change = f"higher by {bytes_range((max(low, 0), high))}" if high > 0 else "no higher"
    else:
        change = f"lower by {bytes_range((max(-high, 0), -low))}" if low < 0 else "no lower"
    name = "kept instead" if applied else "checkpointed too"
    if choices[0].rule == "split":
        name = "checkpointed as a whole"
    what = "peak" if plan.predicted.device_used_peak_bytes == now else "allocated peak"
    return f"{name}: {what} {bytes_range(peaks)} ({change}), step {signed_ms_range(times)}"


def _least_and_most(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)
