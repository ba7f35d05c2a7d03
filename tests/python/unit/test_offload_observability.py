# SPDX-License-Identifier: Apache-2.0
"""Figures, charts and tracks of an offload engine: what they show is what the engine counted."""

from __future__ import annotations

import dataclasses
import gc
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_perfetto import assert_nested, assert_valid
from torch import nn

from memscale.observability.offload_timeline import bounds, held_series, latest_steps, rows
from memscale.observability.perfetto_offload import offload_events
from memscale.observability.report_offload import offload_chart, tier_rows
from memscale.offload import notices
from memscale.offload.engine import Offload, OffloadSettings, why_not
from memscale.offload.figures import OffloadEvent, OffloadFigures, TierFigures

MIB = 1 << 20
EMPTY = OffloadFigures(
    (TierFigures("pinned", 64 * MIB, 8 * MIB, 0, 4 * MIB, 9 * MIB, 9 * MIB, 12),
     TierFigures("file", 512 * MIB, 256 * MIB, 0, 6 * MIB, 30 * MIB, 30 * MIB, 20, "the disk is full")),
    30, 1, 1, 2_500_000, 14_000_000, 3, 0, 0, 0, 0, 0, 0,
)  # fmt: skip

needs_engine = pytest.mark.skipif(
    why_not(torch.device("cpu")) != "", reason="this PyTorch has no DLPack exchange API"
)


def block(
    ticket: int, leaves: int, returns: int | None, tier: str = "file", size: int = MIB
) -> list[OffloadEvent]:
    """Events of a block whose copies take 10 ns each."""
    found = [OffloadEvent("out", tier, size, leaves, leaves + 10, ticket)]
    if returns is not None:
        found.append(OffloadEvent("in", tier, size, returns, returns + 10, ticket))
    return found


def figures(events: list[OffloadEvent], held: int = 0) -> OffloadFigures:
    ordered = sorted(events, key=lambda event: event.end_ns)  # as the engine writes them
    return dataclasses.replace(EMPTY, events=tuple(ordered), held_count=held)


def inside(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


# ---- an engine -------------------------------------------------------------------------------------


def trained(directory: Path, steps: int = 3, faults: dict[str, int] | None = None) -> Offload:
    """An engine that has moved what a small network saves; all of it is back and gone."""
    settings = OffloadSettings(
        torch.device("cpu"), file_bytes=64 * MIB, directory=str(directory), least_bytes=1024, trace_count=4096
    )
    door = Offload(settings, faults)
    network = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(128, 64)
    for _ in range(steps):
        with door.hooks():
            loss = network(x).sum()
        loss.backward()
        del loss
    gc.collect()
    return door


@needs_engine
def test_figures_are_the_engines_counters(tmp_path: Path) -> None:
    door = trained(tmp_path)
    found, counters = OffloadFigures.of(door), door.counters()
    assert found is not None
    (tier,) = found.tiers
    assert (tier.tier, tier.limit_bytes, tier.held_bytes, tier.note) == ("file", 64 * MIB, 0, "")
    for name in ("taken_bytes", "held_peak_bytes", "out_bytes", "in_bytes", "put_count"):
        assert getattr(tier, name) == counters[f"{name}_file"] > 0, name
    for name in ("prefetched_count", "late_count", "missed_count", "step_count", "refused_count"):
        assert getattr(found, name) == counters[name], name
    assert (found.out_wait_ns, found.in_wait_ns) == (counters["settle_wait_ns"], counters["arrive_wait_ns"])
    assert OffloadFigures.from_json(found.to_json()) == found
    assert OffloadFigures.of(door, events=False) == dataclasses.replace(found, events=())


@needs_engine
def test_events_add_up_to_the_counters(tmp_path: Path) -> None:
    found = OffloadFigures.of(trained(tmp_path))
    assert found is not None
    size = {kind: sum(event.bytes for event in found.events if event.kind == kind) for kind in ("out", "in")}
    (tier,) = found.tiers
    assert (size["out"], size["in"]) == (tier.out_bytes, tier.in_bytes)
    for kind, counted in (("wait_settle", found.out_wait_ns), ("wait_arrive", found.in_wait_ns)):
        waits = [event.end_ns - event.begin_ns for event in found.events if event.kind == kind]
        assert counted <= sum(waits) <= counted + 10**6 * len(waits)
    (points,) = held_series(found).values()
    assert max(held for _, held in points) == tier.held_peak_bytes
    assert points[-1][1] == 0


@needs_engine
def test_what_is_still_offloaded_stays_in_the_curve(tmp_path: Path) -> None:
    door = trained(tmp_path, steps=1)
    tensor = torch.randn(512, 64)
    saved = door.engine.pack(tensor)
    door.engine.settle()
    found = OffloadFigures.of(door)
    assert found is not None and found.held_count == 1
    (points,) = held_series(found).values()
    assert points[-1][1] == found.tiers[0].held_bytes == tensor.nbytes
    del saved


@needs_engine
def test_an_engine_that_was_not_opened_has_no_figures() -> None:
    assert OffloadFigures.of(None) is None
    assert OffloadFigures.of(Offload(OffloadSettings(torch.device("cpu"), host_bytes=MIB))) is None


# ---- text and data ---------------------------------------------------------------------------------


def test_explain_says_all_that_matters() -> None:
    text = dataclasses.replace(EMPTY, refused_count=2, moved_count=1).explain()
    for part in (
        "pinned", "9.00 MiB", "512.00 MiB", "30 of 32 tensors were back when they were needed",
        "1 on their way, 1 not fetched ahead", "2.5 ms for copies out, 14.0 ms for copies back",
        "2 tensors stayed on the device: no tier had room", "1 tensor went to host memory: the file failed",
        "file: the disk is full",
    ):  # fmt: skip
        assert part in text, part
    assert "trouble" not in EMPTY.explain()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": 2}', '{"version": 1}', '{"version": 1, "tiers": [7]}']
)
def test_json_that_is_not_figures_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no offload figures"):
        OffloadFigures.from_json(text)


# ---- warnings --------------------------------------------------------------------------------------


class Engine:
    """Notes and counters as an engine has them."""

    def __init__(self, notes: tuple[str, ...] = (), **counters: int) -> None:
        self.notes = lambda: notes
        self.counters = lambda: counters


class Model:
    """Stands for an executor."""


def test_each_warning_comes_once_for_a_model_whatever_engine_it_has(caplog: pytest.LogCaptureFixture) -> None:
    def said_by(model: Any, engine: Any) -> list[str]:
        caplog.clear()
        notices.warn(model, engine)
        return [record.getMessage() for record in caplog.records]

    model, refused = Model(), "host: mmap of 8 bytes: no: room"
    line = "offload: the pageable tier is not used as asked: mmap of 8 bytes: no: room"
    assert said_by(model, Engine()) == []
    assert said_by(model, Engine((refused,))) == [line]
    assert said_by(model, Engine((refused,), moved_count=2)) == [
        "offload: 2 tensors went to host memory: the file failed"
    ]
    assert said_by(model, Engine(("host: mmap of 9 bytes: again",), moved_count=3)) == []
    assert said_by(Model(), Engine((refused,))) == [line]


# ---- the timeline ----------------------------------------------------------------------------------


def test_the_curve_of_two_tiers() -> None:
    found = figures([*block(1, 100, 300, "pinned", 5), *block(2, 120, 200, "file", 7)])
    assert held_series(found) == {"pinned": [(100, 5), (310, 0)], "file": [(120, 7), (210, 0)]}


def test_a_block_from_before_the_oldest_event_was_there_from_the_begin() -> None:
    returns = OffloadEvent("in", "file", 3, 500, 510, 9)
    found = figures([*block(1, 100, 300, size=5), returns])
    assert held_series(found)["file"] == [(100, 8), (310, 3), (510, 0)]


def test_a_block_that_never_came_back_ends_when_nothing_is_held() -> None:
    events = [*block(1, 100, None, size=5), *block(2, 200, 300, size=7)]
    assert held_series(figures(events))["file"] == [(100, 5), (110, 0), (200, 7), (310, 0)]
    assert held_series(figures(events, held=1))["file"][-1] == (310, 5)


def test_latest_steps_begin_where_nothing_is_held() -> None:
    events = [event for step in range(5) for event in block(step, 1000 * step, 1000 * step + 500)]
    assert latest_steps(figures(events), 2) == (3000, 4510)
    assert latest_steps(figures(events), 9) == (0, 4510) == bounds(events)
    assert latest_steps(figures([]), 3) == (0, 0)


def spans() -> st.SearchStrategy[list[OffloadEvent]]:
    """Events as a ring has them: some blocks lack their way out, some have not come back."""
    one = st.tuples(
        st.integers(0, 500), st.integers(0, 50), st.integers(0, 300), st.integers(0, 50),
        st.integers(1, 9), st.sampled_from(("pinned", "pageable", "file")), st.integers(1, 3),
    )  # fmt: skip

    def build(blocks: list[tuple[int, int, int, int, int, str, int]]) -> list[OffloadEvent]:
        found = []
        for ticket, (begin, out, offloaded, back, size, tier, parts) in enumerate(blocks):
            end = begin + out
            if parts & 1:
                found.append(OffloadEvent("out", tier, size, begin, end, ticket))
            if parts & 2:
                found.append(OffloadEvent("in", tier, size, end + offloaded, end + offloaded + back, ticket))
        return found

    return st.lists(one, max_size=30).map(build)


@given(spans(), st.booleans())
def test_no_curve_goes_below_nothing(events: list[OffloadEvent], held: bool) -> None:
    found = figures(events, held=int(held))
    for points in held_series(found).values():
        assert [at for at, _ in points] == sorted({at for at, _ in points})
        assert all(size >= 0 for _, size in points)
        assert held or points[-1][1] == 0
    assert set(held_series(found)) == {event.tier for event in events}


@given(spans())
def test_no_row_has_overlaps_and_none_is_needless(events: list[OffloadEvent]) -> None:
    found = rows(events)
    assert sorted(event for row in found for event in row) == sorted(events)
    for row in found:
        assert all(one.end_ns <= other.begin_ns for one, other in pairwise(row))
    for number, row in enumerate(found[1:], start=1):  # its first event had no room above
        first = row[0]
        for above in found[:number]:
            assert any(e.begin_ns <= first.begin_ns < e.end_ns for e in above)


# ---- tracks and charts -----------------------------------------------------------------------------


@given(spans(), st.booleans())
def test_tracks_are_valid(events: list[OffloadEvent], held: bool) -> None:
    found = offload_events(3, figures(events, held=int(held)))
    assert_valid({"displayTimeUnit": "ms", "otherData": {}, "traceEvents": found})
    assert_nested(found)
    assert {event["pid"] for event in found} == {3}
    timed = [event for event in found if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["ts"] >= 0 for event in timed)
    assert all(event["dur"] >= 0 for event in inside(found, "X"))
    assert len(inside(found, "X")) == len(events)
    last: dict[str, int] = {}
    for event in inside(found, "C"):
        assert event["args"]["bytes"] >= 0
        last[event["name"]] = event["args"]["bytes"]
    assert held or not any(last.values())
    named = {event["tid"] for event in inside(found, "M") if event["name"] == "thread_name"}
    assert {event["tid"] for event in inside(found, "X")} == named


def test_times_of_tracks_begin_with_the_first_event() -> None:
    found = offload_events(1, figures(block(1, 5_000_000_000, 5_000_002_000)))
    assert [(event["name"], event["ts"]) for event in inside(found, "X")] == [
        ("copy out", 0),
        ("copy back", 2),
    ]
    (labels,) = [event["args"]["labels"] for event in found if event["name"] == "process_labels"]
    assert labels == "0 is 5.000 s after the engine was opened"


def test_copies_at_the_same_time_are_on_tracks_of_their_own() -> None:
    found = offload_events(1, figures([*block(1, 0, 100), *block(2, 5, 105)]))
    names = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert names == ["copies out", "copies out 2", "copies back", "copies back 2"]


@given(spans(), st.booleans())
def test_the_chart_is_well_formed_and_within_its_frame(events: list[OffloadEvent], held: bool) -> None:
    chart = offload_chart(figures(events, held=int(held)))
    assert (chart == "") == (not events)
    if not events:
        return
    root = ElementTree.fromstring(chart)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rect in root.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.5 and 0 <= y <= y + h <= height
    for text in root.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height


def test_the_chart_says_the_peak_and_what_was_copied() -> None:
    events = [*block(1, 0, 9_000_000, "pinned", 4 * MIB), *block(2, 1_000_000, 8_000_000, "file", 6 * MIB)]
    events.append(OffloadEvent("wait_arrive", "file", 6 * MIB, 8_000_000, 8_000_010, 2))
    root = ElementTree.fromstring(offload_chart(figures(events)))
    words = {text.text for text in root.iter("text")}
    assert {"at most 10.0 MiB", "pinned", "file", "copies out", "copies back", "waits"} <= words
    tips = [tip.text for tip in root.iter("title")]
    assert "copies out, file: 1, 6.00 MiB, 0.00 ms" in tips and "pinned" in tips


def test_many_events_make_a_small_chart() -> None:
    step = [event for i in range(4000) for event in block(i, 100 * i, 10**6 - 100 * i)]
    assert len(offload_chart(figures(step))) < 200_000


def test_rows_of_the_table() -> None:
    rows = tier_rows(EMPTY)
    assert [row["tier"] for row in rows] == ["pinned", "file"]
    assert rows[1]["cells"] == ["30.00 MiB", "30.00 MiB", "0 B", "6.00 MiB", "256.00 MiB", "512.00 MiB"]
