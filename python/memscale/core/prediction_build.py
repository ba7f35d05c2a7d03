# SPDX-License-Identifier: Apache-2.0
"""Builds a prediction from a traced step and its replay."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from memscale import _core
from memscale.plans.data import CONTEXT, FRAGMENTATION
from memscale.plans.error_band import error_band
from memscale.plans.kept_ops import KeptOps
from memscale.plans.plan import Holder, Peak, Prediction
from memscale.plans.timeline import PHASES, timeline_of

if TYPE_CHECKING:
    from memscale.hardware.detect import Budget, Hardware
    from memscale.trace.step import Trace

MOST_HOLDERS: Final = 50
MOST_GROUPS: Final = 40

_FORM = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?: (?P<name>.*))?")
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
_NONE: Final = -1

Live = tuple[int, int, int, int, int, bool]
"""Size, buffer, operation, module, category and whether recomputed; ids are -1 for none."""


@dataclass
class NamedGraph:
    """A finished graph with its names at hand, read once for all predictions that are made from it."""

    trace: Trace

    @cached_property
    def ops(self) -> list[tuple[Any, ...]]:
        """(name, call, phase, …) per operation."""
        return self.trace.graph.ops()

    @cached_property
    def phases(self) -> list[int]:
        """Phase of each operation."""
        return [op[2] for op in self.ops]

    @cached_property
    def op_notes(self) -> dict[int, tuple[int, str]]:
        """Operation → module and source line."""
        return {op: (module, source) for op, module, source in self.trace.graph.op_notes()}

    @cached_property
    def buffer_notes(self) -> dict[int, str]:
        """Buffer → what it holds."""
        return {buffer: what for buffer, _, what in self.trace.graph.buffer_notes()}

    @cached_property
    def calls(self) -> list[tuple[int, int, int, int]]:
        """(module, parent, begin, end) per call."""
        return self.trace.graph.calls()

    @cached_property
    def kept_ops(self) -> KeptOps:
        """Names of the operations that a plan keeps."""
        return KeptOps(self.ops, self.calls)

    @cached_property
    def call_modules(self) -> list[int]:
        """Module of each call."""
        return [call[0] for call in self.calls]

    def path(self, module: int) -> str:
        """Path of a module; "" for none."""
        return "" if module == _NONE else self.trace.modules[module][0]

    def op_name(self, op: int) -> str:
        """Name of an operation; "" before the first."""
        return str(self.ops[op][0]) if 0 <= op < len(self.ops) else ""

    def source(self, op: int) -> str:
        """Line that runs an operation; "" if unknown."""
        return self.op_notes.get(op, (_NONE, ""))[1]

    def module_of_op(self, op: int) -> str:
        """Path of the module that an operation works for."""
        if not 0 <= op < len(self.ops):
            return ""
        noted = self.op_notes.get(op, (_NONE, ""))[0]
        if noted != _NONE:
            return self.path(noted)
        call = self.ops[op][1]
        return "" if call == _NONE else self.path(self.call_modules[call])

    def holder(self, live: Live) -> Holder:
        """What is alive, in words."""
        size, buffer, op, module, category, recomputed = live
        found = _FORM.fullmatch(self.buffer_notes.get(buffer, ""))
        shape = None if found is None else tuple(int(part) for part in found["shape"].split(", ") if part)
        return Holder(
            bytes=size,
            category=_core.CATEGORY_NAMES[category],
            module=self.path(module),
            operation=self.op_name(op),
            source=self.source(op),
            shape=shape,
            dtype="" if found is None else found["dtype"],
            name="" if found is None else found["name"] or "",
            recompute=recomputed,
        )


@dataclass(frozen=True)
class Predictor:
    """Makes predictions for one machine and one budget.

    Attributes:
        hardware: the device.
        budget: what the prediction is held against.
        rates: of the hardware, as the core takes them.
        sim: the allocator, as the core takes it.
        reserve_bytes: part of the budget that is left free for what a trace cannot see.
    """

    hardware: Hardware
    budget: Budget
    rates: dict[str, int]
    sim: dict[str, Any]
    reserve_bytes: int

    def predict(self, named: NamedGraph, plan: _core.Plan | None, step_ns: int) -> Prediction:
        """The step of a graph under a plan.

        Args:
            named: the traced step.
            plan: None for the plain step.
            step_ns: its duration by the cost model.
        """
        graph = named.trace.graph
        replay = _core.replay(graph, plan, sim=self.sim)
        allocated, reserved = replay["stats"]["allocated_peak_bytes"], replay["peak_bytes"]
        times: array[int] = array("q")
        times.frombytes(_core.op_times_ns(graph, self.rates))
        context = self.hardware.context_bytes
        used = reserved + context
        live: list[Live] = replay["peak_live"]
        largest = sorted(live, key=lambda item: -item[0])
        return Prediction(
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            device_used_peak_bytes=used,
            context_bytes=context,
            by_category=self._by_category(replay, reserved),
            timeline=timeline_of(replay, named.phases, times, self.hardware.cost.recompute_ns),
            step_time_ns=step_ns,
            error_band_bytes=error_band(used, self.hardware.context_bytes, *_loop_slack(named.trace)),
            fits=used + self.reserve_bytes <= self.budget.bytes,
            budget_bytes=self.budget.bytes,
            by_module=_by_module(named, live),
            peak=_peak(named, replay),
            holders=tuple(named.holder(item) for item in largest[:MOST_HOLDERS]),
            groups=grouped(map(named.holder, live)),
            notes=tuple(named.trace.notes),
            device=self.hardware.name,
            device_bytes=self.hardware.total_bytes,
            budget_source=self.budget.source,
            method=named.trace.method,
            training=named.trace.gradients,
        )

    def peaks(self, trace: Trace, plan: _core.Plan | None) -> tuple[int, int]:
        """Allocated and reserved peak of a run under a plan (None: the plain step), bytes."""
        replay = _core.replay(trace.graph, plan, sim=self.sim)
        return replay["stats"]["allocated_peak_bytes"], replay["peak_bytes"]

    def _by_category(self, replay: Mapping[str, Any], reserved: int) -> dict[str, int]:
        live: dict[str, int] = replay["category_peak_bytes"]
        extra = {CONTEXT: self.hardware.context_bytes, FRAGMENTATION: reserved - sum(live.values())}
        return {name: size for name, size in {**live, **extra}.items() if size}


def _loop_slack(trace: Trace) -> tuple[int, int]:
    """Bytes by which a loop may take less, or more, than a trace assumes; see `plans/error_band.py`."""
    if trace.gradients:
        return trace.idle_state_bytes + trace.output_bytes, 0
    return trace.idle_state_bytes, trace.output_bytes


def _by_module(named: NamedGraph, live: Iterable[Live]) -> dict[str, int]:
    sizes: dict[int, int] = {}
    for size, _, _, module, _, _ in live:
        sizes[module] = sizes.get(module, 0) + size
    by_path: dict[str, int] = {}
    for module, size in sizes.items():
        path = named.path(module)
        by_path[path] = by_path.get(path, 0) + size
    return dict(sorted(by_path.items(), key=lambda item: (-item[1], item[0])))


def _peak(named: NamedGraph, replay: Mapping[str, Any]) -> Peak:
    op, again = replay["peak_op"], replay["peak_in_recompute"]
    known = 0 <= op < len(named.ops)
    return Peak(
        operation=named.op_name(op),
        phase=PHASES[named.phases[op]] if known and not again else ("backward" if again else "forward"),
        module=named.module_of_op(op),
        source=named.source(op),
        recompute=again,
        index=op,
    )


def grouped(holders: Iterable[Holder], most: int = MOST_GROUPS) -> tuple[Holder, ...]:
    """Holders that differ in nothing but the number of a layer, put together; the largest groups first.

    Args:
        holders: single ones.
        most: groups beyond so many are left out, the smallest.
    """
    groups: dict[tuple[Any, ...], list[Holder]] = {}
    for holder in holders:
        key = (
            holder.category,
            _LAYER.sub("*", holder.module),
            _LAYER.sub("*", holder.name),
            holder.operation,
            holder.source,
            holder.shape,
            holder.dtype,
            holder.recompute,
        )
        groups.setdefault(key, []).append(holder)
    merged = [_merged(alike) for alike in groups.values()]
    return tuple(sorted(merged, key=lambda group: -group.bytes)[:most])


def _merged(alike: list[Holder]) -> Holder:
    first = alike[0]
    if len(alike) == 1:
        return first
    same_place = all(item.module == first.module and item.name == first.name for item in alike)
    return Holder(
        bytes=sum(item.bytes for item in alike),
        category=first.category,
        module=first.module if same_place else _LAYER.sub("*", first.module),
        operation=first.operation,
        source=first.source,
        shape=first.shape,
        dtype=first.dtype,
        name=first.name if same_place else _LAYER.sub("*", first.name),
        recompute=first.recompute,
        count=len(alike),
    )
