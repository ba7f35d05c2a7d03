# SPDX-License-Identifier: Apache-2.0
"""A snapshot of what a model's offload engine has done, as plain data.

    Offload ──► OffloadFigures.of ──► explain(), to_json()
                                  ├─► report.write_report(…, offload=figures)
                                  ├─► perfetto.write_trace(…, offload=figures)
                                  └─► metrics

Tiers have the names of `AsyncOffloadConfig.tiers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memscale import log
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.offload.engine import Offload

__all__ = ["FIGURES_VERSION", "TIER_NAMES", "OffloadEvent", "OffloadFigures", "TierFigures", "troubles"]

FIGURES_VERSION: Final = 1

_ENGINE_NAMES: Final = {"pinned": "pinned", "pageable": "host", "file": "file"}
"""Tier → its name in the engine, fastest first."""

TIER_NAMES: Final = {name: tier for tier, name in _ENGINE_NAMES.items()}
"""The engine's name → tier."""

_TROUBLES: Final = {
    "refused": "stayed on the device: no tier had room",
    "moved": "went to host memory: the file failed",
    "failed": "stayed on the device: the copy failed",
    "lost": "could not be read back",
}
"""What did not go as planned, and what became of the tensors."""


class OffloadEvent(NamedTuple):
    """Something that took time.

    Attributes:
        kind: "out" and "in", copies from the device and back; "wait_settle" and "wait_arrive", the program
            waited for one.
        tier: where the bytes lie.
        bytes: of the whole tensor.
        begin_ns: since the engine was opened.
        end_ns: likewise.
        ticket: names the copy of one tensor; never used twice.
    """

    kind: str
    tier: str
    bytes: int
    begin_ns: int
    end_ns: int
    ticket: int


@dataclass(frozen=True)
class TierFigures:
    """One tier that the engine may use, or has used.

    Attributes:
        tier: "pinned", "pageable" or "file".
        limit_bytes: most that it may take from the machine.
        taken_bytes: what it has taken: mapped or pinned memory, reserved disk space.
        held_bytes: tensors in it now.
        held_peak_bytes: most at one moment.
        out_bytes: that arrived in it.
        in_bytes: that came back from it.
        put_count: tensors that were sent to it.
        note: why it is not used as asked; "" if there is nothing to say.
    """

    tier: str
    limit_bytes: int
    taken_bytes: int
    held_bytes: int
    held_peak_bytes: int
    out_bytes: int
    in_bytes: int
    put_count: int
    note: str = ""


@dataclass(frozen=True)
class OffloadFigures:
    """The engine since it was opened.

    Attributes:
        tiers: those with a limit or with a history, fastest first.
        prefetched_count: tensors that were back when they were needed.
        late_count: that were on their way back.
        missed_count: that nobody had fetched ahead.
        out_wait_ns: time that the program waited for copies out.
        in_wait_ns: for copies back.
        step_count: training steps before the present one.
        reorder_count: of them, those whose order was not that of the step before.
        refused_count: tensors that stayed because no tier had room.
        moved_count: tensors that went to host memory because the file failed.
        failed_count: tensors that stayed because their copy failed.
        lost_count: tensors that could not be read back.
        held_count: tensors that are offloaded now.
        events: the latest ones, oldest first; empty if the engine keeps none, or if they were not asked for.
    """

    tiers: tuple[TierFigures, ...]
    prefetched_count: int
    late_count: int
    missed_count: int
    out_wait_ns: int
    in_wait_ns: int
    step_count: int
    reorder_count: int
    refused_count: int
    moved_count: int
    failed_count: int
    lost_count: int
    held_count: int
    events: tuple[OffloadEvent, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, offload: Offload | None, events: bool = True) -> OffloadFigures | None:
        """Reads an engine, without waiting for anything.

        Args:
            offload: as techniques hold it.
            events: with the events, which are copied after the counters.

        Returns:
            None if there is no engine, or none was opened in this process.
        """
        counters = {} if offload is None else offload.counters()
        if offload is None or not counters:
            return None
        notes = dict(note.split(": ", 1) for note in offload.notes())
        limits = offload.settings.options()
        tiers = [
            _tier(tier, counters, int(limits[f"{name}_bytes"]), notes.get(name, ""))
            for tier, name in _ENGINE_NAMES.items()
        ]
        same = [item.name for item in fields(cls) if item.name in counters]
        found = offload.trace() if events else []
        return cls(
            tiers=tuple(tier for tier in tiers if tier.limit_bytes or tier.put_count),
            out_wait_ns=counters["settle_wait_ns"],
            in_wait_ns=counters["arrive_wait_ns"],
            held_count=counters["block_count"],
            events=tuple(OffloadEvent(kind, TIER_NAMES[tier], *rest) for kind, tier, *rest in found),
            **{name: counters[name] for name in same},
        )

    # ---- text and data ---------------------------------------------------------------------------

    def explain(self) -> str:
        """The figures as text."""
        headers = ("tier", "out", "back", "held now", "at most", "taken", "limit")
        names = ("out_bytes", "in_bytes", "held_bytes", "held_peak_bytes", "taken_bytes", "limit_bytes")
        rows = [[tier.tier, *(format_bytes(getattr(tier, name)) for name in names)] for tier in self.tiers]
        return "\n".join(
            [log.table(rows, headers), "", *(f"{name:<10} {text}" for name, text in self.lines())]
        )

    def lines(self) -> list[tuple[str, str]]:
        """What is not of one tier, as (name, text)."""
        used = self.prefetched_count + self.late_count + self.missed_count
        found = [
            (
                "prefetch",
                f"{self.prefetched_count} of {used} tensors were back when they were needed, "
                f"{self.late_count} on their way, {self.missed_count} not fetched ahead",
            ),
            ("waits", f"{_ms(self.out_wait_ns)} for copies out, {_ms(self.in_wait_ns)} for copies back"),
            ("steps", f"{self.step_count} before this one, {self.reorder_count} in another order"),
        ]
        counts = {f"{kind}_count": getattr(self, f"{kind}_count") for kind in _TROUBLES}
        found += [("trouble", text) for text in troubles(counts).values()]
        return found + [("note", f"{tier.tier}: {tier.note}") for tier in self.tiers if tier.note]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, with a version."""
        return {"version": FIGURES_VERSION, **asdict(self)}

    def to_json(self, indent: int | None = None) -> str:
        """The figures as JSON. `from_json` reads them again."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> OffloadFigures:
        """Reads figures.

        Raises:
            ValueError: not JSON, another version, or not figures.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("version", None) != FIGURES_VERSION:
            raise ValueError(f"these are no offload figures of version {FIGURES_VERSION}")
        try:
            data["tiers"] = tuple(TierFigures(**tier) for tier in data["tiers"])
            data["events"] = tuple(OffloadEvent(*event) for event in data["events"])
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise ValueError(f"these are no offload figures: {error}") from error


def troubles(counters: Mapping[str, int]) -> dict[str, str]:
    """What did not go as planned, by kind, in words.

    Args:
        counters: the engine's.
    """
    found = {}
    for kind, became in _TROUBLES.items():
        count = counters.get(f"{kind}_count", 0)
        if count:
            found[kind] = f"{count} {'tensor' if count == 1 else 'tensors'} {became}"
    return found


def _tier(tier: str, counters: Mapping[str, int], limit_bytes: int, note: str) -> TierFigures:
    name = _ENGINE_NAMES[tier]
    same = [item.name for item in fields(TierFigures) if f"{item.name}_{name}" in counters]
    values = {item: counters[f"{item}_{name}"] for item in same}
    return TierFigures(tier=tier, limit_bytes=limit_bytes, note=note, **values)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
