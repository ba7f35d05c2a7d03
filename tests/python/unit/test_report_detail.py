# SPDX-License-Identifier: Apache-2.0
"""What a report shows from the memory graph: categories over time, what the plan saves, the allocator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cli_samples import Net, Runner
from memscale.cli.predicting import Predicted, predict_case, resolve
from memscale.cli.workload import Case
from memscale.config.config import Config
from memscale.observability import report_charts, report_timelines
from memscale.observability.report import write_report
from memscale.observability.report_charts import Block, Step
from memscale.observability.report_detail import Detail, category_steps
from memscale.observability.report_svg import Unit, ticks
from memscale.observability.segments import allocator_view
from memscale.observability.step_view import core_plan
from memscale.plans.plan import Plan

MIB = 1 << 20


def predicted(device: str, budget: str) -> Predicted:
    model = Net()
    case = Case(model, torch.randint(0, 100, (512, 64)), (torch.optim.AdamW(model.parameters()),), 512, 64)
    (found,) = predict_case(case, resolve([device]), Config(memory_budget=budget, enable_logging=False))
    return found


@pytest.fixture(scope="module")
def on_card() -> Predicted:
    return predicted("24GiB", "1100MiB")


@pytest.fixture(scope="module")
def on_host() -> Predicted:
    return predicted("cpu", "450MiB")


def test_views_agree_with_the_prediction(on_card: Predicted, on_host: Predicted) -> None:
    for found in (on_card, on_host):
        views = found.detail().views
        assert found.plan.active
        assert views["plain"].agrees_with(found.plan.plain.timeline)
        assert views["planned"].agrees_with(found.plan.predicted.timeline)
        for name, step in (("plain", found.plan.plain), ("planned", found.plan.predicted)):
            view = views[name]
            assert all(live >= sum(row) for live, row in zip(view.live_bytes, view.by_category, strict=True))
            assert view.times_ns[:-1] == step.timeline.time_ns
            assert view.phase == step.timeline.phase


def test_categories_at_the_peak_are_those_of_the_prediction(on_host: Predicted) -> None:
    view = on_host.detail().views["planned"]
    assert view.live_bytes[view.peak_row] == on_host.plan.predicted.allocated_peak_bytes
    at_peak = {name: view.series(name)[view.peak_row] for name in view.categories}
    expected = on_host.plan.predicted.by_category
    assert {name: size for name, size in at_peak.items() if size} == expected


def test_savings_add_up(on_card: Predicted, on_host: Predicted) -> None:
    for found in (on_card, on_host):
        steps = found.detail().saved
        assert steps[0] == Step("plain peak", found.plan.plain.device_used_peak_bytes, "plain", total=True)
        assert steps[-1].bytes == found.plan.predicted.device_used_peak_bytes
        assert steps[0].bytes + sum(step.bytes for step in steps[1:-1]) == steps[-1].bytes
        assert any("checkpoint" in step.name for step in steps)
        changes = category_steps(found.plan.plain, found.plan.predicted)
        assert changes[0].bytes + sum(step.bytes for step in changes[1:-1]) == changes[-1].bytes


def test_the_allocator_is_the_one_that_was_predicted(on_card: Predicted, on_host: Predicted) -> None:
    plan = on_card.plan
    trace, sim = on_card.planned_trace, on_card.engine.sim
    chosen = core_plan(plan, trace.graph)
    step = on_card.detail().views["planned"]
    view = allocator_view(trace.graph, chosen, step, sim)
    assert view is not None
    assert view.reserved_peak_bytes == max(view.reserved_bytes) == plan.predicted.reserved_peak_bytes
    in_use = sum(block.bytes for blocks in view.segments for block in blocks if block.colour)
    assert in_use == plan.predicted.allocated_peak_bytes
    assert {block.colour for blocks in view.segments for block in blocks} >= {
        "c-parameter",
        "c-activation",
        "",
    }
    assert any(" in blocks." in block.tip for blocks in view.segments for block in blocks)
    assert len(view.reserved_bytes) == len(step.operations)
    assert allocator_view(trace.graph, chosen, step, on_host.engine.sim) is None
    assert allocator_view(trace.graph, chosen, step, {**sim, "expandable_segments": True}) is None


def test_the_page_has_every_section(on_card: Predicted, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    detail = on_card.detail([("model", "<b>net</b>")])
    write_report(on_card.prediction, path, title="a step", detail=detail)
    page = path.read_text()
    for text in (
        "What each part of the plan saves",
        "The allocator at the peak",
        "Largest holders at the planned peak",
        "By module",
        "&lt;b&gt;net&lt;/b&gt;",
        "reserved",
        "@media print",
        "prefers-color-scheme: dark",
    ):
        assert text in page
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in page.split(":root {")[1:3])
    assert used <= light & dark
    assert len(page) < 600_000


def test_a_host_has_no_segments_section(on_host: Predicted, tmp_path: Path) -> None:
    write_report(on_host.prediction, tmp_path / "r.html", detail=on_host.detail())
    page = (tmp_path / "r.html").read_text()
    assert "The allocator at the peak" not in page
    assert "What each part of the plan saves" in page


def test_names_from_outside_are_escaped_in_every_chart(on_card: Predicted) -> None:
    bad = "<script>alert('x')</script>"
    drawn = [
        report_charts.segments([[Block(MIB, "c-input", bad), Block(MIB, "", bad)]], bad),
        report_charts.waterfall([Step(bad, MIB, "plain", total=True), Step(bad, -5, "good")], bad),
        report_timelines.measured({bad: [(0.0, 1), (1.0, MIB)]}, MIB),
        report_timelines.stacks({bad: on_card.detail().views["plain"]}, {}, MIB),
    ]
    for chart in drawn:
        assert "<script" not in chart
        assert "&lt;script&gt;" in chart


def test_a_prediction_inside_another_has_no_report(on_card: Predicted, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no plan"):
        write_report(on_card.plan.plain, tmp_path / "r.html")


def test_a_prediction_saves_its_report(on_card: Predicted, tmp_path: Path) -> None:
    on_card.prediction.save_report(tmp_path / "r.html", title="my step")
    page = (tmp_path / "r.html").read_text()
    assert "<h1>my step</h1>" in page
    assert "By module" in page


def test_a_plan_from_another_graph_is_refused(on_card: Predicted, on_host: Predicted) -> None:
    from core_samples import chain

    with pytest.raises(ValueError, match="not in this graph"):
        core_plan(on_card.plan, chain())


def test_a_report_from_json_alone_is_shorter_and_whole(on_card: Predicted, tmp_path: Path) -> None:
    plan = Plan.from_json(on_card.plan.to_json())
    write_report(plan, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Memory over the step" in page
    assert "The allocator at the peak" not in page
    assert "Largest holders" in page


def test_small_segments_are_merged_and_nothing_is_lost() -> None:
    blocks = [Block(512, "c-input", "one")] * 5000 + [Block(100 * MIB, "c-gradient", "big")]
    chart = report_charts.segments([blocks, [Block(2 * MIB, "", "free")]], "map")
    assert chart.count("<rect") < 400
    assert "one and others" in chart
    assert "big" in chart


def test_units_and_ticks() -> None:
    assert Unit([3 << 30]).text(3 << 30) == "3.0 GiB"
    assert Unit([3 << 30]).text(5 << 20) == "5.00 MiB"
    assert Unit([3 << 30]).text(-(1 << 30)) == "−1.0 GiB"
    assert Unit([]).text(0) == "0 B"
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0) == [0]
    assert ticks(108, least=99) == [100, 102, 104, 106, 108]
    assert report_charts.time_axis([100.0, 120.0]) == (95.0, 125.0)
    assert report_charts.time_axis([100.0, 250.0]) == (0.0, 270.0)
    assert report_charts.time_axis([100.0]) == (0.0, 108.0)
    assert len(ticks(7.3e-7)) <= 8


def test_the_command_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner(capsys)
    monkeypatch.chdir(tmp_path)
    said = run("report", "cli_samples:sized", "--device", "cpu", "--trace", "t.json")
    assert said.code == 0
    assert "FITS" in said.out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "t.json").stat().st_size > 10_000
    assert run("report", "cli_samples:sized", "--device", "cpu", "--budget", "1MiB").code == 3
    run("report", "cli_samples:sized", "--device", "cpu", "-o", "no/such/folder.html").refused("cannot write")
    Path("old.html").write_text("old")
    for bad in (".", "no/such.json"):
        said = run("report", "cli_samples:sized", "--device", "cpu", "-o", "old.html", "--trace", bad)
        said.refused("cannot write", bad)
        assert Path("old.html").read_text() == "old"
    said = run("report", "cli_samples:sized", "--device", "cpu", "-o", "new.html", "--json")
    assert (said.document["format"], said.document["report"]) == ("memscale-report", "new.html")
    assert said.document["cases"][0]["verdict"] == "plain"
    assert Path("new.html").exists()


def test_detail_is_optional_in_all_its_parts(on_card: Predicted, tmp_path: Path) -> None:
    write_report(on_card.prediction, tmp_path / "r.html", detail=Detail())
    assert "Memory over the step" in (tmp_path / "r.html").read_text()


def test_a_region_stays_whole_when_parts_are_added_one_by_one() -> None:
    from memscale.observability.report_detail import parts_of
    from plan_samples import choice

    conv = choice("f.0", "checkpoint", type="Conv")
    relu = choice("f.1", "checkpoint", type="ReLU", joined=True)
    alone = choice("f.2", "checkpoint", type="ReLU")
    assert parts_of([conv, relu, alone]) == [
        ("checkpoint as one 2 modules", [conv, relu]),
        ("checkpoint 1 × ReLU", [alone]),
    ]
