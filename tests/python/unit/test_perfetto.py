# SPDX-License-Identifier: Apache-2.0
"""The trace for Perfetto: valid by the Trace Event Format, and it says what the prediction says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from memscale import _core
from memscale.cli.main import main
from memscale.observability.perfetto import trace_events, write_trace
from memscale.observability.step_view import StepView

RATES = {"flops_per_us": 10**5, "moved_bytes_per_us": 10**4, "launch_ns": 5000, "recompute_ns": 60_000}


def assert_valid(document: Any) -> list[dict[str, Any]]:
    """Checks a JSON object of the Trace Event Format, as far as its types of events are used here."""
    assert isinstance(document, dict)
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in document["otherData"].values())
    events = document["traceEvents"]
    assert isinstance(events, list) and events
    for event in events:
        assert event["ph"] in {"M", "C", "X", "i"}
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            (value,) = event["args"].values()
            kind = int if event["name"].endswith("sort_index") else str
            assert type(value) is kind
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(
                type(value) is int and value >= 0 for value in event["args"].values()
            )
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
    return events


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Slices of one thread lie inside each other or apart; a viewer draws anything else wrongly."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        stack: list[tuple[float, float]] = []
        for begin, end in slices:  # as written: outer before inner
            while stack and stack[-1][1] <= begin + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1][1] + 1e-6
            stack.append((begin, end))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A trace and the JSON of an estimate of the same planned step on a card."""
    folder = tmp_path_factory.mktemp("trace")
    step = ["cli_samples:sized", "--batch", "512", "--seq", "64", "--gpu", "24GiB", "--budget", "1100MiB"]
    assert main(["report", *step, "-o", str(folder / "r.html"), "--trace", str(folder / "t.json")]) == 0
    return json.loads((folder / "t.json").read_text()), folder


def test_the_trace_is_valid(written: tuple[Any, Any]) -> None:
    events = assert_valid(written[0])
    assert_nested(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"plain step, predicted", "planned step, predicted"}


def test_tracks(written: tuple[Any, Any]) -> None:
    events = written[0]["traceEvents"]
    for process in (1, 2):
        own = [event for event in events if event["pid"] == process]
        counters = {event["name"] for event in own if event["ph"] == "C"}
        assert {"allocated bytes", "reserved bytes", "parameter bytes", "activation bytes"} <= counters
        phases = [event["name"] for event in own if event["ph"] == "X" and event["tid"] == 1]
        assert phases == ["forward", "backward", "optimizer"]
        assert sum(event["ph"] == "i" for event in own) == 1
        modules = {event["name"] for event in own if event["ph"] == "X" and event["tid"] == 2}
        assert {"(model)", "blocks.0", "blocks.0.0", "head"} <= modules
    repeats = [event for event in events if event.get("cat") == "recompute" and event["tid"] == 3]
    assert repeats
    assert all(event["pid"] == 2 for event in repeats)


def test_counters_are_the_prediction(written: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    step = ["cli_samples:sized", "--batch", "512", "--seq", "64", "--gpu", "24GiB", "--budget", "1100MiB"]
    assert main(["estimate", *step, "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["verdict"] == "plan"
    for process, kind in ((1, "plain"), (2, "planned")):
        series = defaultdict(list)
        for event in written[0]["traceEvents"]:
            if event["ph"] == "C" and event["pid"] == process:
                series[event["name"]].append(event["args"]["bytes"])
            if event["ph"] == "i" and event["pid"] == process:
                peak = event["args"]["allocated bytes"]
        assert max(series["allocated bytes"]) == peak
        assert (
            abs(peak - case[kind]["allocated_peak_bytes"]) <= 4 << 20
        )  # of one step, and of the first three
        assert series["reserved bytes"][-1] == case[kind]["reserved_peak_bytes"]


def chain_view(plan: _core.Plan | None = None) -> StepView:
    from core_samples import chain

    return StepView.of(chain(3), plan, RATES)


def test_calls_nest_and_recomputes_are_named() -> None:
    from core_samples import chain

    plan = _core.decide(chain(3), 1, force=True)
    view = chain_view(plan)
    modules = view.modules()
    assert modules[0].name == "(model)"
    inner = [item for item in modules if item.depth == 1 and not item.recompute]
    assert [item.name for item in inner][:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(modules[0].begin <= item.begin and item.end <= modules[0].end for item in inner[:3])
    again = view.recomputes()
    assert [item.name for item in again] == [f"blocks.{i}" for i in (2, 1, 0) if f"blocks.{i}" in str(again)]
    assert again
    assert all(set(view.recompute[item.begin : item.end]) == {1} for item in again)


def test_the_same_step_gives_the_same_events(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for path in (first, second):
        write_trace(path, {"plain": chain_view()}, about={"model": 'a "name" </script>'})
    assert first.read_bytes() == second.read_bytes()
    assert_valid(json.loads(first.read_text()))


def test_an_empty_step_and_a_wrong_series() -> None:
    graph = _core.Graph()
    graph.finish()
    assert all(event["ph"] == "M" for event in trace_events({"plain": StepView.of(graph, None, RATES)}, {}))
    with pytest.raises(ValueError, match="reserved"):
        trace_events({"plain": chain_view()}, {"plain": [1]})
