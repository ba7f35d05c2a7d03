# SPDX-License-Identifier: Apache-2.0
"""The caching allocator over the first steps of a run: its segments at the peak, and what lies in them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memscale import _core
from memscale.observability.report_charts import Block
from memscale.observability.step_view import StepView
from memscale.units import format_bytes

__all__ = ["AllocatorView", "allocator_view"]

_ALLOCATION, _FREE, _OPERATION = 0, 1, 2
_FROM_THE_START: Final = 2**32 - 1
_TAKES: Final = frozenset({"segment_alloc", "segment_map"})
_OPTIONS: Final = frozenset({"kind", "alloc_conf", "capacity_bytes"})
"""Options of a replay that the simulator can be given the same of."""


@dataclass(frozen=True)
class AllocatorView:
    """What the allocator did in one step.

    Attributes:
        segments: at the moment of the highest allocated bytes, the blocks of each; all in order of address.
        reserved_bytes: most that it held while each operation of the last step ran.
        reserved_peak_bytes: most that it held at any time.
    """

    segments: Sequence[Sequence[Block]]
    reserved_bytes: Sequence[int]
    reserved_peak_bytes: int


def allocator_view(
    graph: _core.Graph, plan: _core.Plan | None, view: StepView, sim: Mapping[str, Any]
) -> AllocatorView | None:
    """Plays the first steps of a run into the allocator, as a replay does.

    Args:
        graph: one step.
        plan: its plan; None: the plain step.
        view: the step under that plan.
        sim: the allocator, as `_core.replay` takes it.

    Returns:
        None for an allocator without segments, or with options that only a replay takes.
    """
    if sim.get("kind") != "cuda" or not set(sim) <= _OPTIONS or not view.operations:
        return None
    events = _Events(graph, plan)
    simulator = _core.Simulator(
        "cuda", sim.get("alloc_conf", ""), sim.get("capacity_bytes"), record_segments=True
    )
    run = _Run(events, simulator)
    for step in range(_core.REPLAY_STEPS - 1):
        run.play(step, None)
    found = run.play(_core.REPLAY_STEPS - 1, _core.replay(graph, plan, sim=dict(sim))["peak_event"])
    names = _Names(view, events)
    reserved = _reserved(run, simulator.segment_events())
    return AllocatorView(
        segments=[[names.block(block) for block in segment["blocks"]] for segment in found],
        reserved_bytes=reserved[-len(view.operations) :],
        reserved_peak_bytes=simulator.stats()["reserved_bytes.all.peak"],
    )


class _Events:
    """Columns of `_core.step_events`."""

    def __init__(self, graph: _core.Graph, plan: _core.Plan | None) -> None:
        raw = _core.step_events(graph, plan)
        self.kinds, self.categories = raw["kind"], raw["category"]
        self.ids, self.makers, self.appears = array("I"), array("I"), array("I")
        self.sizes = array("Q")
        self.ids.frombytes(raw["id"])
        self.makers.frombytes(raw["instance_op"])
        self.appears.frombytes(raw["instance_appears"])
        self.sizes.frombytes(raw["size"])
        self.again = raw["instance_recomputed"]
        self.op_count = graph.op_count

    def is_resident(self, number: int) -> bool:
        return self.makers[number] == self.op_count


class _Run:
    """Steps of a run, one after the other; the rules are those of msc_trace_replay.

    Attributes:
        kinds: of the events that were played, over all steps.
        calls: calls of the simulator before each of them.
    """

    def __init__(self, events: _Events, simulator: _core.Simulator) -> None:
        self.kinds = bytearray()
        self.calls = array("Q")
        self._events = events
        self._simulator = simulator
        self._alive: set[int] = set()
        self._count = 0
        self._late: dict[int, list[tuple[int, int, int]]] = {}  # operation → (instance, bytes, category)

    def play(self, step: int, peak: int | None) -> Sequence[Mapping[str, Any]]:
        """One step. Returns the segments right after event `peak`, and then leaves what the step made."""
        events, found = self._events, []
        pending: list[tuple[int, int, int]] = []
        columns = zip(events.kinds, events.ids, events.sizes, events.categories, strict=True)
        for index, (kind, number, size, category) in enumerate(columns):
            if kind != _ALLOCATION:
                for resident in pending:
                    self._make(*resident[:2])
                pending = []
            self.kinds.append(kind)
            self.calls.append(self._count)
            if kind == _ALLOCATION:
                self._allocate(step, number, size, category)
            elif kind == _FREE:
                self._end(number)
            elif kind == _OPERATION and step == 0:
                states, pending = self._appearing(number)
                for state in states:
                    self._make(*state[:2])
            if index == peak:
                found = list(self._simulator.segments())
        for resident in pending:
            self._make(*resident[:2])
        if peak is None:
            for number in sorted(self._alive):
                if not events.is_resident(number):
                    self._end(number)
        return found

    def _allocate(self, step: int, number: int, size: int, category: int) -> None:
        late = self._events.appears[number]
        if step == 0 and self._events.is_resident(number) and late != _FROM_THE_START:
            self._late.setdefault(late, []).append((number, size, category))
        elif number not in self._alive:
            self._make(number, size)

    def _appearing(self, op: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """What appears with an operation: before its results, and after them."""
        late = self._late.pop(op, [])
        state = [one for one in late if one[2] == _core.CATEGORY_OPTIMIZER_STATE]
        return state, [one for one in late if one not in state]

    def _make(self, number: int, size: int) -> None:
        self._simulator.alloc(number, size)
        self._alive.add(number)
        self._count += 1

    def _end(self, number: int) -> None:
        self._simulator.free(number)
        self._alive.discard(number)
        self._count += 1


def _reserved(run: _Run, events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Highest reserved bytes while each operation ran, over all steps."""
    changes = sorted(
        (event["call"], event["size"] * (1 if event["action"] in _TAKES else -1)) for event in events
    )
    held, at = 0, 0
    rows: list[int] = []
    ends = [*run.calls[1:], 1 << 63]
    for kind, end in zip(run.kinds, ends, strict=True):
        if kind not in (_ALLOCATION, _FREE):
            rows.append(held)
        while at < len(changes) and changes[at][0] < end:
            held += changes[at][1]
            at += 1
            if rows:
                rows[-1] = max(rows[-1], held)
    return rows


class _Names:
    """Says what an instance holds."""

    def __init__(self, view: StepView, events: _Events) -> None:
        self._view = view
        self._events = events
        columns = zip(events.kinds, events.ids, events.categories, strict=True)
        rows = zip(view.operations, view.recompute, strict=True)
        self._rows = {key: row for row, key in enumerate(rows)}
        self._category = {number: category for kind, number, category in columns if kind == _ALLOCATION}

    def _row(self, number: int) -> int:
        return self._rows[self._events.makers[number], self._events.again[number]]

    def block(self, block: Mapping[str, Any]) -> Block:
        """A block of a segment, named and coloured."""
        size, number = int(block["size"]), int(block["id"])
        if number < 0:
            return Block(size, "", f"free, {format_bytes(size)}")
        category = _core.CATEGORY_NAMES[self._category[number]]
        words = f"{category.replace('_', ' ')}, {format_bytes(size)}"
        lasting = category in ("parameter", "buffer", "optimizer_state", "input", "workspace")
        made = "" if lasting else f", {self._view.made_by(self._row(number))}"
        return Block(size, f"c-{category}", words + made)
