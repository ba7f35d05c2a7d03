# SPDX-License-Identifier: Apache-2.0
"""A step, operation by operation, for charts and traces: what runs, in which modules, with how much memory.

    events    A A A | OP A A F | OP A F F | AGAIN A | OP …        from the core, in order
    rows              0          1          2         3           one per operation that runs
                      └ bytes of each category at the highest moment until the next row

A `Prediction` keeps one number per operation. What is here is derived anew from the memory graph when
somebody wants to see it, and is not kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from memscale import _core
from memscale.plans.kept_ops import KeptOps
from memscale.plans.timeline import PHASES

if TYPE_CHECKING:
    from memscale.plans.plan import Plan
    from memscale.plans.timeline import Timeline

__all__ = ["Slice", "StepView", "core_plan"]

_ALLOCATION, _FREE, _OPERATION, _AGAIN = range(4)
_BACKWARD: Final = PHASES.index("backward")


def core_plan(plan: Plan, graph: _core.Graph) -> _core.Plan:
    """A plan as the core takes it.

    Args:
        plan: made for this graph.
        graph: a finished memory graph.

    Raises:
        ValueError: the plan names a module, or keeps an operation, that the graph does not have.
    """
    numbers = {module[0]: number for number, module in enumerate(graph.modules())}
    kept_ops = KeptOps.of(graph) if any(choice.kept for choice in plan.choices) else None
    rows: list[tuple[object, ...]] = []
    for choice in plan.choices:
        if choice.module not in numbers:
            raise ValueError(f"the plan names {choice.module!r}, which is not in this graph")
        module = numbers[choice.module]
        action = choice.techniques[0] if choice.techniques else "keep"
        words = (module, action, choice.rule, choice.calls, choice.bytes, choice.ns)
        kept = () if kept_ops is None else kept_ops.offsets(module, choice.kept)
        moves = (choice.boundary, choice.moved_bytes, choice.moved_count, choice.transfer_ns, choice.moved)
        others = (choice.other_peak_bytes, choice.other_ns)
        rows.append((*words, *others, choice.joined, kept, *moves, choice.ahead_bytes))
    names = ("window_out_bytes", "window_in_bytes", "staging_bytes")
    return _core.Plan.build(sorted(rows, key=itemgetter(0)), {name: getattr(plan, name) for name in names})


@dataclass(frozen=True)
class Slice:
    """Something that takes a stretch of the step: a phase, a call of a module, an operation.

    Attributes:
        name: what it is.
        begin: first row; `end` is the row after the last.
        depth: number of slices around it.
        recompute: it is of a recompute.
        kind: class of the module, or "".
    """

    name: str
    begin: int
    end: int
    depth: int
    recompute: bool
    kind: str = ""


@dataclass(frozen=True)
class StepView:
    """One step under one plan. All sequences but `times_ns` have one entry per operation that runs.

    Attributes:
        operations: index in the graph.
        recompute: 1 where it is of a recompute.
        phase: index into `PHASES`.
        times_ns: when it starts, by the cost model; one more entry, the end of the step.
        by_category: bytes by category, indexed as `_core.CATEGORY_NAMES`, at the highest moment while it ran,
            as they were asked for.
        live_bytes: bytes that the allocator had given out at the highest moment while it ran: the sum of the
            categories, and what was rounded up.
        graph: the memory graph.
    """

    operations: tuple[int, ...]
    recompute: tuple[int, ...]
    phase: tuple[int, ...]
    times_ns: tuple[int, ...]
    by_category: tuple[tuple[int, ...], ...]
    live_bytes: tuple[int, ...]
    graph: _core.Graph

    @classmethod
    def of(
        cls,
        graph: _core.Graph,
        plan: _core.Plan | None,
        rates: Mapping[str, int],
        sim: Mapping[str, Any] | None = None,
    ) -> StepView:
        """Derives the view of a step.

        Args:
            graph: a finished memory graph.
            plan: None for the plain step.
            rates: the cost model's, as `_core.op_times_ns` takes them.
            sim: the allocator, as `_core.replay` takes it; None: live bytes alone.
        """
        rows = list(_rows(_core.step_events(graph, plan)))
        live = array("Q")
        live.frombytes(_core.replay(graph, plan, sim=None if sim is None else dict(sim))["live"])
        took = array("q")
        took.frombytes(_core.op_times_ns(graph, dict(rates)))
        phases = [operation[2] for operation in graph.ops()]
        again = tuple(row[1] for row in rows)
        operations = tuple(row[0] for row in rows)
        times, now, before = [], 0, 0
        for operation, repeated in zip(operations, again, strict=True):
            now += rates.get("recompute_ns", 0) if repeated and not before else 0
            times.append(now)
            now += took[operation]
            before = repeated
        return cls(
            operations=operations,
            recompute=again,
            phase=tuple(
                _BACKWARD if repeated else phases[operation]
                for operation, repeated in zip(operations, again, strict=True)
            ),
            times_ns=(*times, now),
            by_category=tuple(row[2] for row in rows),
            live_bytes=tuple(live),
            graph=graph,
        )

    # ---- memory ----------------------------------------------------------------------------------

    @cached_property
    def peak_row(self) -> int:
        """The first row at which allocated bytes are highest; 0 for a step without operations."""
        live = self.live_bytes
        return live.index(max(live)) if live else 0

    @property
    def categories(self) -> list[str]:
        """Names of the categories that hold anything at any time, in the core's order."""
        columns = zip(*self.by_category, strict=True)
        return [name for name, sizes in zip(_core.CATEGORY_NAMES, columns, strict=False) if any(sizes)]

    def series(self, category: str) -> tuple[int, ...]:
        """Bytes of one category, one entry per row."""
        index = _core.CATEGORY_NAMES.index(category)
        return tuple(row[index] for row in self.by_category)

    def made_by(self, row: int) -> str:
        """The operator of a row and the innermost module around it."""
        chain = self._chain_of_row[row]
        module = self.graph.modules()[chain[-1][1]][0] if chain else ""
        return f"{self.names[row]} in {module}" if module else self.names[row]

    @cached_property
    def _chain_of_row(self) -> list[tuple[tuple[str, int, int], ...]]:
        return self._chains()

    def agrees_with(self, timeline: Timeline) -> bool:
        """Whether a prediction's timeline shows the same step."""
        return self.live_bytes == timeline.live_bytes

    # ---- what runs -------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of the operator of each row."""
        operations = self.graph.ops()
        return tuple(operations[number][0] for number in self.operations)

    def phases(self) -> list[Slice]:
        """The phases, in order."""
        return [Slice(PHASES[phase], begin, end, 0, False) for phase, begin, end in _runs(self.phase)]

    def recomputes(self) -> list[Slice]:
        """Stretches in which something runs for the second time."""
        chains = self._chain_of_row
        return [
            Slice(self._module_name(chains[begin]), begin, end, 0, True)
            for again, begin, end in _runs(self.recompute)
            if again
        ]

    def modules(self) -> list[Slice]:
        """Calls of modules, outer before inner, in order of their begin.

        In forward these are the calls themselves. In backward a stretch of operations that work for the same
        module stands for one.
        """
        modules = self.graph.modules()
        found: list[Slice] = []
        open_slices: list[tuple[tuple[str, int, int], int]] = []
        empty: tuple[tuple[str, int, int], ...] = ()
        for row, chain in enumerate([*self._chain_of_row, empty]):
            shared = 0
            while shared < min(len(chain), len(open_slices)) and open_slices[shared][0] == chain[shared]:
                shared += 1
            while len(open_slices) > shared:
                (_, module, again), begin = open_slices.pop()
                path, kind = modules[module][:2]
                found.append(Slice(path or "(model)", begin, row, len(open_slices), bool(again), kind))
            open_slices.extend((link, row) for link in chain[shared:])
        return sorted(found, key=lambda item: (item.begin, item.depth))

    def _chains(self) -> list[tuple[tuple[str, int, int], ...]]:
        """For each row what runs around it, from the outside in.

        Each link is (identity, module, 1 if it runs for the second time).
        """
        operations, calls, modules = self.graph.ops(), self.graph.calls(), self.graph.modules()
        noted = {item: module for item, module, _ in self.graph.op_notes() if module >= 0}
        known: dict[tuple[int, int, int], tuple[tuple[str, int, int], ...]] = {}
        chains = []
        for number, again in zip(self.operations, self.recompute, strict=True):
            call, module = operations[number][1], noted.get(number, -1)
            key = (call, -1 if call >= 0 else module, again)
            if key not in known:
                known[key] = tuple(reversed(list(_links(call, module, again, calls, modules))))
            chains.append(known[key])
        return chains

    def _module_name(self, chain: tuple[tuple[str, int, int], ...]) -> str:
        """The outermost recomputed module that is not the model."""
        modules = self.graph.modules()
        for _, module, _ in chain:
            if modules[module][0]:
                return modules[module][0]
        return "(model)"


def _links(
    call: int, module: int, again: int, calls: list[tuple[int, int, int, int]], modules: list[Any]
) -> Iterator[tuple[str, int, int]]:
    """What is around an operation, from the inside out: its calls, or its module and those above."""
    if call >= 0:
        while call >= 0:
            yield (f"call {call}", calls[call][0], again)
            call = calls[call][1]
        return
    while module >= 0:
        yield (f"module {module}", module, again)
        module = modules[module][2]


def _rows(events: Mapping[str, Any]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(operation, recompute, bytes by category at the highest moment) of each operation that runs."""
    ids, sizes = array("I"), array("Q")
    ids.frombytes(events["id"])
    sizes.frombytes(events["size"])
    live = [0] * len(_core.CATEGORY_NAMES)
    total = highest = 0
    at_highest: tuple[int, ...] = tuple(live)
    running: tuple[int, int] | None = None
    for kind, category, number, size in zip(events["kind"], events["category"], ids, sizes, strict=True):
        if kind == _ALLOCATION:
            live[category] += size
            total += size
            if total > highest:
                highest, at_highest = total, tuple(live)
        elif kind == _FREE:
            live[category] -= size
            total -= size
        elif kind in (_OPERATION, _AGAIN):
            if running is not None:
                yield (*running, at_highest)
            running = (number, int(kind == _AGAIN))
            highest, at_highest = total, tuple(live)
    if running is not None:
        yield (*running, at_highest)


def _runs(values: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Stretches of equal values: (value, begin, end)."""
    begin = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[begin]:
            yield values[begin], begin, index
            begin = index
