# SPDX-License-Identifier: Apache-2.0
"""How much of an optimizer-side technique a plan uses, by parameter group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from memscale.plans.data import Amount
from memscale.techniques.base import Part

Resident = Mapping[str, frozenset[str]]
"""Technique → names of the parts that it leaves as they are."""


NOTHING: Final[Resident] = {}


_REASONS: Final = {
    "leaves": "the budget demands all of it",
    "in_part": "what there was room for stays",
    "stays": "there was room for all of it",
}


def all_resident(parts: Iterable[Part], resident: Resident) -> frozenset[str]:
    """Techniques whose parts are all resident, so that nothing of them is left."""
    names: dict[str, set[str]] = {}
    for part in parts:
        names.setdefault(part.technique, set()).add(part.name)
    return frozenset(name for name, every in names.items() if every <= resident.get(name, frozenset()))


def amounts_of(technique: str, parts: Iterable[Part], resident: Resident) -> tuple[Amount, ...]:
    """What leaves and what stays, by parameter group."""
    groups: dict[int, list[Part]] = {}
    for part in parts:
        if part.technique == technique:
            groups.setdefault(part.group, []).append(part)
    return tuple(_amount(group, mine, resident.get(technique, frozenset())) for group, mine in groups.items())


def _amount(group: int, parts: Sequence[Part], resident: frozenset[str]) -> Amount:
    staying = [part for part in parts if part.name in resident]
    leaving = [part for part in parts if part.name not in resident]
    rule = "leaves" if not staying else "in_part" if leaving else "stays"
    return Amount(
        group=group,
        rule=rule,
        reason=_REASONS[rule],
        leaving=len(leaving),
        leaving_bytes=sum(part.bytes for part in leaving),
        staying=len(staying),
        staying_bytes=sum(part.bytes for part in staying),
        ns=sum(part.ns for part in leaving),
    )
