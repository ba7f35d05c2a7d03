# SPDX-License-Identifier: Apache-2.0
"""A predicted step, and what an offload engine did, in the Trace Event Format of ui.perfetto.dev.

Every step is a process of its own, "plain" and "planned", with the same tracks:

    memory            counters: allocated bytes, reserved bytes where an allocator reserves, one per category
    phases            forward, backward, optimizer
    modules           calls, nested as they were; in backward what each module's operations took
    recomputes        what is recomputed
    peak              an instant at the highest moment

Times are those of the cost model, in microseconds from the begin of the step, bytes are predicted. The engine
is a process too (`perfetto_offload`): its times and bytes are measured, from its first event on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.observability.perfetto_offload import offload_events
from memscale.observability.step_view import Slice, StepView

if TYPE_CHECKING:
    from memscale.offload.figures import OffloadFigures

__all__ = ["TRACE_VERSION", "trace_events", "write_trace"]

TRACE_VERSION: Final = 1
"""Of what `otherData` says about the file."""

_PHASES, _MODULES, _RECOMPUTES = 1, 2, 3
_TRACKS: Final = {_PHASES: "phases", _MODULES: "modules", _RECOMPUTES: "recomputes"}

Event = dict[str, Any]


def write_trace(
    path: str | os.PathLike[str],
    views: Mapping[str, StepView] | None = None,
    *,
    reserved: Mapping[str, Sequence[int]] | None = None,
    about: Mapping[str, str] | None = None,
    offload: OffloadFigures | None = None,
) -> None:
    """Writes steps, what an offload engine did, or both, as one trace.

    Args:
        path: the file; replaced if it exists.
        views: steps by name, such as "plain" and "planned".
        reserved: bytes that the allocator holds, one per row of the step of that name.
        about: facts about the run, for the viewer's information page.
        offload: from `executor.offload_figures()`.

    Raises:
        ValueError: a series of reserved bytes is not as long as its step.
        OSError: the file cannot be written.

    Example:
        >>> write_trace("offload.json", offload=executor.offload_figures())
    """
    steps = views or {}
    measured = [] if offload is None else offload_events(len(steps) + 1, offload)
    document = {
        "traceEvents": trace_events(steps, reserved or {}) + measured,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "memscale", "version": str(TRACE_VERSION), **(about or {})},
    }
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def trace_events(views: Mapping[str, StepView], reserved: Mapping[str, Sequence[int]]) -> list[Event]:
    """The events of some steps; see `write_trace`."""
    events: list[Event] = []
    for process, (name, view) in enumerate(views.items(), start=1):
        series = reserved.get(name)
        if series is not None and len(series) != len(view.operations):
            raise ValueError(
                f"{len(series)} reserved sizes for {len(view.operations)} operations of {name!r}"
            )
        events += _names(process, name)
        events += _counters(process, view, series)
        events += _slices(process, _PHASES, view, view.phases())
        events += _slices(process, _MODULES, view, view.modules())
        events += _slices(process, _RECOMPUTES, view, view.recomputes())
        events += _peak(process, view)
    return events


def _names(process: int, name: str) -> Iterator[Event]:
    yield _about(process, 0, "process_name", {"name": f"{name} step, predicted"})
    yield _about(process, 0, "process_sort_index", {"sort_index": process})
    for thread, track in _TRACKS.items():
        yield _about(process, thread, "thread_name", {"name": track})
        yield _about(process, thread, "thread_sort_index", {"sort_index": thread})


def _about(process: int, thread: int, name: str, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": dict(arguments)}


def _micros(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _counters(process: int, view: StepView, reserved: Sequence[int] | None) -> Iterator[Event]:
    """One counter per series; a value is written where it changes, and at the end of the step."""
    tracks = {"allocated bytes": view.live_bytes}
    if reserved is not None:
        tracks["reserved bytes"] = tuple(reserved)
    tracks |= {f"{name.replace('_', ' ')} bytes": view.series(name) for name in view.categories}
    for name, values in tracks.items():
        before = None
        for at, value in zip(view.times_ns, (*values, *values[-1:]), strict=True) if values else ():
            if value != before or at == view.times_ns[-1]:
                yield {
                    "ph": "C", "pid": process, "tid": 0, "name": name, "ts": _micros(at),
                    "args": {"bytes": value},
                }  # fmt: skip
            before = value


def _slices(process: int, thread: int, view: StepView, slices: Sequence[Slice]) -> Iterator[Event]:
    for item in slices:
        begin, end = view.times_ns[item.begin], view.times_ns[item.end]
        highest = max(view.live_bytes[item.begin : item.end])
        arguments: dict[str, Any] = {"peak bytes": highest, "operations": item.end - item.begin}
        if item.kind:
            arguments["type"] = item.kind
        yield {
            "ph": "X", "pid": process, "tid": thread, "name": item.name,
            "cat": "recompute" if item.recompute else _TRACKS[thread],
            "ts": _micros(begin), "dur": _micros(end - begin), "args": arguments,
        }  # fmt: skip


def _peak(process: int, view: StepView) -> Iterator[Event]:
    if not view.operations:
        return
    row = view.peak_row
    arguments: dict[str, Any] = {"allocated bytes": view.live_bytes[row], "operation": view.names[row]}
    arguments |= {f"{name} bytes": view.series(name)[row] for name in view.categories}
    yield {
        "ph": "i", "s": "p", "pid": process, "tid": _MODULES, "name": "peak", "cat": "peak",
        "ts": _micros(view.times_ns[row]), "args": arguments,
    }  # fmt: skip
