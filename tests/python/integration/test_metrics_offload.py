# SPDX-License-Identifier: Apache-2.0
"""What a wrapped model's offload has done, in every way it is told: figures, report, trace, log, metrics."""

from __future__ import annotations

import functools
import gc
import json
import logging
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.benchmarks.memory import engine_bytes
from memscale.observability import metrics, perfetto
from memscale.observability.report import write_report
from memscale.offload.engine import why_not
from memscale.offload.figures import OffloadFigures
from patched import use_engines_with

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

MIB = 1 << 20


class Network(nn.Module):
    """Four MLPs; each saves some MiB."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(*part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def batch() -> Tensor:
    return torch.randn(4, 512, 128)


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


@functools.cache
def half_budget() -> int:
    """Half of what the plain step takes."""
    return memscale.plan(Network(), sample_input=batch()).plain.device_used_peak_bytes // 2


def config(folder: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "memory_budget": half_budget(),
        "enable_checkpointing": False,
        "async_config": AsyncOffloadConfig(tiers=("file",), directory=str(folder)),
    }
    return Config(**{**given, **changes})


class Run:
    """A model that was trained for three steps under a plan that offloads, and is wrapped still."""

    def __init__(self, folder: Path) -> None:
        self.model, x = Network(), batch()
        memscale.wrap(self.model, config(folder), sample_input=x)
        self.executor = memscale.executor_of(self.model)
        for _ in range(3):
            step(self.model, x)
        figures = self.executor.offload_figures()
        assert figures is not None
        self.figures: OffloadFigures = figures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        use_engines_with(patch, {"trace_count": 4096})
        made = Run(tmp_path_factory.mktemp("run"))
    yield made
    memscale.detach(made.model)


def test_figures_of_a_wrapped_model(run: Run) -> None:
    plan, (tier,) = run.executor.plan, run.figures.tiers
    assert plan is not None and any(choice.offloads for choice in plan.choices)
    moved = sum(choice.moved_bytes for choice in plan.active)
    assert tier.out_bytes == tier.in_bytes == 3 * moved
    assert tier.held_peak_bytes == plan.away_peak_bytes
    assert tier.held_bytes == run.figures.held_count == 0
    assert tier.put_count == 3 * sum(choice.moved_count for choice in plan.active)
    counts = (run.figures.prefetched_count, run.figures.late_count, run.figures.missed_count)
    assert sum(counts) == tier.put_count


def test_without_offload_there_are_no_figures() -> None:
    with memscale.optimize(Network(), config=Config(enable_logging=False), sample_input=batch()) as executor:
        assert executor.offload_figures() is None


def test_an_engine_that_the_plan_does_not_need_goes(tmp_path: Path) -> None:
    """With buffers that the plan does not count; a graph that waits for its backward holds it."""
    model, small = Network(), torch.randn(1, 16, 128)
    before = engine_bytes()
    memscale.wrap(model, config(tmp_path, enable_logging=False), sample_input=batch())
    executor = memscale.executor_of(model)
    waiting = model(batch())
    assert engine_bytes() > before
    step(model, small)
    assert executor.plan is not None and not executor.plan.does_something
    assert executor.offload_figures() is None
    waiting.square().mean().backward()
    del waiting
    gc.collect()
    assert engine_bytes() == before
    step(model, batch())
    assert executor.offload_figures() is not None
    memscale.detach(model)


def test_after_detach_there_are_no_figures(tmp_path: Path) -> None:
    model = Network()
    memscale.wrap(model, config(tmp_path, enable_logging=False), sample_input=batch())
    executor = memscale.executor_of(model)
    step(model, batch())
    assert executor.offload_figures() is not None
    memscale.detach(model)
    assert executor.offload_figures() is None


def test_the_report_has_the_engine(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    path = tmp_path / "report.html"
    assert run.executor.plan is not None
    write_report(run.executor.plan, path, offload=run.figures)
    page = path.read_text(encoding="utf-8")
    section = page.partition("<h2>Offload</h2>")[2].partition("<h2>")[0]
    (chart,) = re.findall(r"<svg.*?</svg>", section, re.DOTALL)
    assert "copies back" in "".join(ElementTree.fromstring(chart).itertext())
    rows = ElementTree.fromstring(re.search(r"<table>.*?</table>", section, re.DOTALL)[0])  # type: ignore[index]
    cells = [cell.text for cell in rows.find("tbody").iter("td")][1:]  # type: ignore[union-attr]
    from memscale.units import format_bytes

    (tier,) = run.figures.tiers
    assert cells[:4] == [format_bytes(tier.out_bytes), format_bytes(tier.in_bytes), "0 B",
                         format_bytes(tier.held_peak_bytes)]  # fmt: skip
    used = set(re.findall(r"var\(--([\w-]+)\)", section))
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in page.split(":root {")[1:3])
    assert used and used <= light and used <= dark
    write_report(run.executor.plan, path)
    assert "<h2>Offload</h2>" not in path.read_text(encoding="utf-8")


def events_of(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert all(isinstance(value, str) for value in document["otherData"].values())
    found = document["traceEvents"]
    assert isinstance(found, list)
    return found


def test_the_trace_has_the_engine(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    perfetto.write_trace(path, offload=run.figures)
    found = events_of(path)
    slices = [event for event in found if event["ph"] == "X"]
    (tier,) = run.figures.tiers
    for name, size in (("copy out", tier.out_bytes), ("copy back", tier.in_bytes)):
        assert sum(event["args"]["bytes"] for event in slices if event["name"] == name) == size
    counters = [event for event in found if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"file bytes"}
    assert max(event["args"]["bytes"] for event in counters) == tier.held_peak_bytes
    assert counters[-1]["args"]["bytes"] == 0


def test_the_engine_stands_beside_the_steps(run: Run, tmp_path: Path) -> None:
    from core_samples import chain
    from memscale.observability.step_view import StepView

    rates = {"flops_per_us": 10**5, "moved_bytes_per_us": 10**4, "launch_ns": 5000, "recompute_ns": 60_000}
    path = tmp_path / "trace.json"
    perfetto.write_trace(path, {"plain": StepView.of(chain(3), None, rates)}, offload=run.figures)
    names = {
        event["pid"]: event["args"]["name"] for event in events_of(path) if event["name"] == "process_name"
    }
    assert names == {1: "plain step, predicted", 2: "offload, measured"}


def test_metrics_are_the_figures(run: Run) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(metrics.render(run.model))
        for sample in family.samples
    }
    model, (tier,), plan = ("model", "Network"), run.figures.tiers, run.executor.plan
    assert plan is not None
    file = ("tier", "file")
    expected = {
        ("memscale_offload_bytes_total", ("direction", "out"), model, file): tier.out_bytes,
        ("memscale_offload_bytes_total", ("direction", "in"), model, file): tier.in_bytes,
        ("memscale_offload_held_bytes", model, file): 0,
        ("memscale_offload_held_peak_bytes", model, file): tier.held_peak_bytes,
        ("memscale_offload_taken_bytes", model, file): tier.taken_bytes,
        ("memscale_offload_limit_bytes", model, file): tier.limit_bytes,
        ("memscale_offload_tensors_total", model, file): tier.put_count,
        ("memscale_offload_prefetch_total", model, ("result", "hit")): run.figures.prefetched_count,
        ("memscale_offload_prefetch_total", model, ("result", "late")): run.figures.late_count,
        ("memscale_offload_prefetch_total", model, ("result", "miss")): run.figures.missed_count,
        ("memscale_offload_wait_seconds_total", ("direction", "in"), model): run.figures.in_wait_ns / 1e9,
        ("memscale_offload_trouble_total", ("kind", "lost"), model): 0,
        ("memscale_predicted_peak_bytes", model): plan.predicted.device_used_peak_bytes,
        ("memscale_memory_limit_bytes", model): plan.budget_bytes,
    }
    for key, value in expected.items():
        assert found[key] == value, key


def test_reading_beside_training(tmp_path: Path) -> None:
    """A scrape comes at any moment: before the engine is there, while it is opened, between its copies."""
    pytest.importorskip("prometheus_client")
    model, x, over = Network(), batch(), threading.Event()
    memscale.wrap(model, config(tmp_path, enable_logging=False), sample_input=x)
    seen: list[int] = []

    def read() -> None:
        last = False
        while not last:
            last = over.is_set()
            metrics.render(model)
            figures = memscale.executor_of(model).offload_figures()
            seen.append(0 if figures is None else figures.tiers[0].out_bytes)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(3):
            step(model, x)
    finally:
        over.set()
        reader.join()
    figures = memscale.executor_of(model).offload_figures()
    assert figures is not None
    assert seen == sorted(seen) and 0 < seen[-1] == figures.tiers[0].out_bytes


# ---- the log ---------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def three_steps(
    folder: Path, faults: dict[str, int | bool], monkeypatch: pytest.MonkeyPatch, backward: bool = True
) -> Network:
    use_engines_with(monkeypatch, faults)
    model, x = Network(), batch()
    memscale.wrap(model, config(folder), sample_input=x)
    for _ in range(3):
        if backward:
            step(model, x)
        else:
            model(x)
    return model


def test_one_block_then_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        three_steps(tmp_path, {}, monkeypatch)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("memscale")]
    assert message.startswith("---- MemScale") and "offload" in message


def test_memory_that_cannot_be_pinned_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = three_steps(tmp_path, {"pinned_bytes": 64 * MIB, "fault_refuse_pins": True}, monkeypatch)
    (line,) = warnings_of(caplog)
    assert line.startswith("offload: the pinned tier is not used as asked: cannot ") and "\n" not in line
    figures = memscale.executor_of(model).offload_figures()
    assert figures is not None
    assert {tier.tier for tier in figures.tiers if tier.out_bytes} == {"file"}


def test_a_tier_without_room_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_steps(tmp_path, {"file_bytes": 4 * MIB}, monkeypatch)
    (line,) = warnings_of(caplog)
    assert re.fullmatch(r"offload: \d+ tensors? stayed on the device: no tier had room", line)


def test_copies_that_fail_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"fault_fail_ppm": 300_000, "fault_seed": 1}
    three_steps(tmp_path, faults, monkeypatch, backward=False)  # it would fail to read as well
    assert len([line for line in warnings_of(caplog) if "the copy failed" in line]) == 1
