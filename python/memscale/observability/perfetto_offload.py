# SPDX-License-Identifier: Apache-2.0
"""What an offload engine did, as one process of a trace.

    pinned, pageable, file bytes    counters: tensors in each tier
    program waits                   for copies out and back; the rest of the time it did not stand still
    copies out, copies back         one slice per tensor, with its tier and bytes

Slices of a track must not overlap, and copies do: what is under way beside others gets a track of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from memscale.observability.offload_timeline import bounds, held_series, rows

if TYPE_CHECKING:
    from memscale.offload.figures import OffloadEvent, OffloadFigures

__all__ = ["offload_events"]

_TRACKS: Final = (
    ("program waits", {"wait_settle": "waits for a copy out", "wait_arrive": "waits for a copy back"}),
    ("copies out", {"out": "copy out"}),
    ("copies back", {"in": "copy back"}),
)
"""Track → kinds of events on it, and what a slice of that kind is called."""

Event = dict[str, Any]


def offload_events(process: int, figures: OffloadFigures) -> list[Event]:
    """The process of an engine.

    Args:
        process: its number in the trace.
        figures: with events.
    """
    first, _ = bounds(figures.events)
    found = list(_counters(process, figures, first))
    threads: list[tuple[str, int]] = []
    for track, words in _TRACKS:
        own = [event for event in figures.events if event.kind in words]
        for number, row in enumerate(rows(own), start=1):
            threads.append((track if number == 1 else f"{track} {number}", len(threads) + 1))
            found += _slices(process, threads[-1][1], row, words, first)
    found.sort(key=lambda event: event["ts"])
    return [*_names(process, threads, first), *found]


def _names(process: int, threads: Sequence[tuple[str, int]], first: int) -> Iterator[Event]:
    since = f"0 is {first / 1e9:.3f} s after the engine was opened"
    for name, arguments in (
        ("process_name", {"name": "offload, measured"}),
        ("process_labels", {"labels": since}),
        ("process_sort_index", {"sort_index": process}),
    ):
        yield _about(process, 0, name, arguments)
    for track, thread in threads:
        yield _about(process, thread, "thread_name", {"name": track})
        yield _about(process, thread, "thread_sort_index", {"sort_index": thread})


def _about(process: int, thread: int, name: str, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": arguments}


def _counters(process: int, figures: OffloadFigures, first: int) -> Iterator[Event]:
    for tier, points in held_series(figures).items():
        for at, held in points:
            yield {
                "ph": "C", "pid": process, "tid": 0, "name": f"{tier} bytes", "ts": (at - first) / 1000,
                "args": {"bytes": held},
            }  # fmt: skip


def _slices(
    process: int, thread: int, row: Sequence[OffloadEvent], words: dict[str, str], first: int
) -> Iterator[Event]:
    for event in row:
        yield {
            "ph": "X", "pid": process, "tid": thread, "name": words[event.kind], "cat": "offload",
            "ts": (event.begin_ns - first) / 1000, "dur": (event.end_ns - event.begin_ns) / 1000,
            "args": {"tier": event.tier, "bytes": event.bytes, "ticket": f"{event.ticket:x}"},
        }  # fmt: skip
