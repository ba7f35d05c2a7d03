# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own honesty: what is measured, with which settings, and that no result is lost."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memscale.benchmarks import BENCHMARK_MODELS, Shape, child, loops, memory, peers, suite, table
from memscale.benchmarks.command import main
from memscale.benchmarks.goals import goals
from memscale.benchmarks.job import Job
from memscale.benchmarks.program import Measure, Measuring
from memscale.benchmarks.registry import WAYS, build, chosen
from memscale.benchmarks.rows import COLUMNS, Rows, make_row
from memscale.benchmarks.runner import run_job
from memscale.benchmarks.sweep import hypercube, points
from memscale.errors import MemScaleError
from memscale.offload.engine import Offload, OffloadSettings

TINY = BENCHMARK_MODELS[0].tiny
BERT = Shape("bert", 2, 64, 2, 512, 2, 64)

HASTY = {
    "allocated_bytes": 100, "step_ms": 2.0, "step_low_ms": 1.0, "step_high_ms": 3.0, "losses": [1.0, 0.5],
    "gradients": "same", "status": "ok", "reason": "",
}  # fmt: skip


def job(way: str = "plain-fp32", shape: Shape = TINY, **more: Any) -> Job:
    values: dict[str, Any] = {"precision": "fp32", "steps": 3, "warm_up": 1}
    return Job("registry", "gpt2-medium", "tiny", shape, way, **{**values, **more})


# ---- what is measured --------------------------------------------------------------------------------


def test_the_registry_is_the_contracts() -> None:
    sizes = {
        model.name: (model.full.layers, model.full.width, model.full.batch, model.full.length)
        for model in BENCHMARK_MODELS
    }
    assert sizes == {
        "bert-base": (12, 768, 16, 128),
        "bert-large": (24, 1024, 16, 128),
        "gpt2-medium": (24, 1024, 4, 512),
        "gpt2-large": (36, 1280, 2, 512),
        "gpt2-xl": (48, 1600, 1, 512),
    }


def parameters(shape: Shape) -> int:
    """Of blocks and words."""
    return shape.layers * 12 * shape.width**2 + shape.words * shape.width


def test_reduced_shapes_keep_every_share_of_the_memory() -> None:
    for model in BENCHMARK_MODELS:
        full, small = model.full, model.reduced
        tokens, fewer = full.batch * full.length, small.batch * small.length
        assert parameters(full) / parameters(small) == pytest.approx(16, rel=0.01), model.name
        activations = (full.layers * full.width * tokens) / (small.layers * small.width * fewer)
        assert activations == pytest.approx(16, rel=0.01), model.name
        assert full.words * tokens / (small.words * fewer) == pytest.approx(16, rel=0.01), model.name


@pytest.mark.parametrize("shape", [TINY, BERT])
def test_models_have_the_shape_that_is_asked_for(shape: Shape) -> None:
    model = build(shape)
    counted = sum(value.numel() for name, value in model.named_parameters() if value.dim() == 2)
    beside = {"gpt2": 1024, "bert": 512 + 2 + shape.width}[shape.kind] * shape.width  # places, kinds, head
    assert counted == parameters(shape) + beside


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MemScaleError, match="pip install transformers"):
        build(TINY)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpt5'.*gpt2-medium"):
        chosen(["gpt5"])


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000))
def test_every_part_of_every_dimension_has_one_point(count: int, dimensions: int, seed: int) -> None:
    found = hypercube(count, dimensions, seed)
    assert found == hypercube(count, dimensions, seed)
    for column in zip(*found, strict=True):
        assert sorted(int(value * count) for value in column) == list(range(count))


def test_the_sweep_covers_models_sizes_and_precisions() -> None:
    found = points(BENCHMARK_MODELS, "full")
    assert len(found) == len(set(found)) == 25
    for scale in ("reduced", "tiny"):
        assert len(set(points(BENCHMARK_MODELS, scale))) == 25
    assert len(points(BENCHMARK_MODELS[:1], "tiny")) == 8  # all there are
    assert {point.model.name for point in found} == {model.name for model in BENCHMARK_MODELS}
    assert {point.shape.batch for point in found} == {1, 2, 4, 8, 16}
    assert {point.shape.length for point in found} == {64, 128, 256, 512}
    assert {point.precision for point in found} == {"fp32", "bf16-amp"}


def test_data_and_weights_are_the_same_every_time() -> None:
    first, second = (loops.batches(BERT, "cpu") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        masked = one["labels"] != -100
        assert masked.any() and not one["input_ids"][masked].any()
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])
    weights = [[value.clone() for value in loops.fresh_model(job()).parameters()] for _ in range(2)]
    assert all(map(torch.equal, *weights))


def test_peaks_count_from_the_mark() -> None:
    def work(mark: Callable[[], None]) -> None:
        kept = torch.empty(1 << 20, dtype=torch.uint8)
        torch.empty(8 << 20, dtype=torch.uint8)
        mark()
        again = torch.empty(2 << 20, dtype=torch.uint8)
        del kept, again

    found = memory.cpu_peaks(work)
    assert (found.start_bytes, found.allocated_bytes) == (9 << 20, 3 << 20)


# ---- peers -------------------------------------------------------------------------------------------


def test_every_peer_names_its_settings_and_where_they_are_recommended() -> None:
    assert {peer.package for peer in peers.PEERS} >= {
        "torch", "transformers", "trl", "bitsandbytes", "torchao", "liger-kernel", "accelerate", "deepspeed",
    }  # fmt: skip
    names = [peer.name for peer in peers.PEERS]
    assert len(set(names)) == len(names) and not set(names) & set(WAYS)
    for peer in peers.PEERS:
        assert peer.documentation.startswith("https://") and peer.settings
    for name in ("save-on-cpu", "torchao-offload", "trl-offload", "torch-fused", "torch-checkpoint"):
        assert name in names


def test_a_peer_that_cannot_run_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = suite.Settings("tiny", "cpu", 3, 1, "", [])
    skipped = [
        task for task in suite.peers(settings, chosen(["gpt2-medium"])) if isinstance(task, suite.Skipped)
    ]
    reasons = {task.peer.name: task.reason for task in skipped}
    assert reasons["bitsandbytes"] == "not installed: bitsandbytes"
    assert reasons["save-on-cpu"].startswith("not on a CPU host")
    assert {"torch-checkpoint", "torch-fused"}.isdisjoint(reasons)
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    row = Measuring(rows, tmp_path / "logs").row(skipped[0], 1.0)
    assert (row["status"], row["model"]) == ("skipped", "all") and row["documentation"]


@pytest.mark.parametrize("name", ["torch-checkpoint", "hf-checkpoint", "torch-fused", "accelerate"])
def test_peers_train_on_the_same_work(name: str) -> None:
    pytest.importorskip({"accelerate": "accelerate"}.get(name, "torch"))
    losses = []
    for way in ("plain-bf16", name):
        run, _ = child.begin(job(way, precision="bf16-amp"))
        run.train(2)
        losses.append([loss.item() for loss in run.losses])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] == losses[1][0]


@pytest.mark.parametrize("shape", [TINY, BERT])
def test_liger_gets_the_head_of_the_model(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    def fused(weight: Any, hidden: Any, labels: Any, bias: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias).float(), labels)

    kernels = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=lambda: fused)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    values = []
    for way in ("plain-bf16", "liger"):
        run, _ = child.begin(job(way, shape, precision="bf16-amp"))
        torch.manual_seed(0)
        values.append(run.forward(run.data[0])[0].item())
    assert values[0] == pytest.approx(values[1], rel=2e-3)


def test_a_peer_is_beaten_only_in_both_memory_and_time() -> None:
    common = {"model": "m", "scale": "tiny", "suite": "peers", "status": "ok"}
    peer = {**common, "way": "torchao", "allocated_bytes": 100, "step_ms": 10.0}
    better = {**common, "way": "at torchao", "allocated_bytes": 90, "step_ms": 9.0}
    slower = {**common, "way": "budget 12%", "allocated_bytes": 10, "step_ms": 10.5}
    larger = {**common, "way": "resident", "allocated_bytes": 101, "step_ms": 1.0}
    plain = {**common, "way": "plain-bf16", "allocated_bytes": 1, "step_ms": 1.0}
    assert table.beaten(peer, [peer, better, slower, larger, plain]) == [better]


def test_goals_name_what_misses_them() -> None:
    def row(way: str, memory: float, time: float, suite: str = "registry") -> dict[str, Any]:
        return {
            "suite": suite, "model": "gpt2-xl", "scale": "reduced", "way": way, "status": "ok", "batch": 1,
            "length": 256, "precision": "fp32", "allocated_bytes": int(1000 * memory), "step_ms": 10 * time,
            "of_plain_memory": memory, "of_plain_time": time, "of_bf16_time": None,
        }  # fmt: skip

    fine = [row("resident", 0.30, 1.5), row("smallest", 0.2, 9.0)]
    assert [line.rpartition(": ")[2] for line in goals(fine, "reduced")] == ["met 1 of 1"] * 2
    slow = goals([row("resident", 0.31, 1.6), row("torchao", 0.25, 1.0, "peers")], "reduced")
    assert slow[0].endswith("met 0 of 1; not: gpt2-xl (31.0% of the peak at 1.60 of the time)")
    assert slow[1].endswith("met 0 of 1; not: torchao on gpt2-xl")
    swept = [row("plain-fp32", 1.0, 1.0, "sweep"), row("resident", 0.2, 1.0, "sweep")]
    assert goals(swept, "reduced") == ["sweep: median reduction ≥ 85%: met 0 of 1; not: 80.0%"]
    assert goals(fine, "tiny") == []
    failed = [{**row("resident", 0.1, 1.0, "sweep"), "batch": 1 + extra, "status": "oom"} for extra in (1, 2)]
    most = [*swept[:1], row("resident", 0.1, 1.0, "sweep"), *failed]
    assert goals(most, "reduced") == ["sweep: median reduction ≥ 85%: met 0 of 1; not: 0.0%"]
    broken = [*swept[:1], {**row("resident", 0.1, 1.0, "sweep"), "loss_off_percent": math.inf}]
    assert goals(broken, "reduced") == ["sweep: median reduction ≥ 85%: met 0 of 1; not: 0.0%"]
    alone = goals([row("resident", 0.3, 1.0)], "full")  # nothing of BF16 was measured
    assert alone[0].endswith("not: gpt2-xl (no plain run to compare its time with)")


@pytest.mark.parametrize("wrong", [["--ways", "nope"], ["--steps", "1"], ["--device", "cuda"]])
def test_a_mistake_leaves_the_rows_of_a_run_before(tmp_path: Path, wrong: list[str]) -> None:
    if "cuda" in wrong and torch.cuda.is_available():
        pytest.skip("there is a card")
    before = tmp_path / "benchmarks.json"
    before.write_text('{"rows": []}')
    assert main([*wrong, "--models", "bert-base", "--out", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


# ---- nothing is lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("raise RuntimeError('no such kernel')", "failed", "no such kernel"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "oom", "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "failed", "exit status -11"),
        ("import time; time.sleep(60)", "timeout", "not done after"),
        ("pass", "failed", "exit status 0"),
    ],
)
def test_whatever_becomes_of_a_process_it_is_a_result(
    code: str, status: str, reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found = run_job(job(deadline_s=1.0), log, (sys.executable, "-c", code))
    assert found["status"] == status and reason in found["reason"]
    assert log.exists()


def test_what_was_found_before_a_crash_is_kept() -> None:
    code = "import sys; open(sys.argv[1], 'w').write('{\"step_ms\": 5.0}'); raise MemoryError"
    found = run_job(job(), None, (sys.executable, "-c", code))
    assert (found["status"], found["step_ms"]) == ("failed", 5.0)


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; open(sys.argv[1], 'w').write('{\"status\": \"ok\"}');"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    )
    log = tmp_path / "log"
    began = time.monotonic()
    found = run_job(job(deadline_s=30.0), log, (sys.executable, "-c", code))
    assert found["status"] == "ok" and time.monotonic() - began < 20
    left = Path(f"/proc/{log.read_text().splitlines()[-1]}/stat")
    while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - began < 20  # a signal takes a moment
        time.sleep(0.05)


@pytest.mark.parametrize("losses", [[1.0, float("nan")], [float("inf"), 0.5]])
def test_losses_that_are_not_finite_are_said(losses: list[float], tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), HASTY, rows.rows))
    rows.add(make_row(job("resident"), {**HASTY, "losses": losses}, rows.rows))
    text = (tmp_path / "a.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    again = Rows(tmp_path / "a.csv", tmp_path / "a.json", resume=True)
    for found in (rows.rows, again.rows):
        assert "not finite" in table.report(found, "reduced", [])
        assert "gpt2-medium (losses not finite)" in goals(found, "reduced")[0]


def test_the_engines_memory_counts_on_a_cpu_host(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), HASTY, rows.rows))
    ours = make_row(job("smallest"), {**HASTY, "allocated_bytes": 20, "engine_bytes": 30}, rows.rows)
    assert ours["of_plain_memory"] == 0.5
    peer = {**ours, "suite": "peers", "way": "torchao", "allocated_bytes": 49, "engine_bytes": None}
    assert not table.beaten(peer, [ours]) and table.beaten({**peer, "allocated_bytes": 50}, [ours])


def test_open_engines_are_found() -> None:
    before = memory.engine_bytes()
    offload = Offload(OffloadSettings(torch.device("cpu"), file_bytes=1 << 26))
    tables = offload.engine.counters()["table_bytes"]
    assert tables > 0 and memory.engine_bytes() == before + (16 << 20) + tables


def test_a_run_before_is_kept_under_another_name(tmp_path: Path) -> None:
    Rows(tmp_path / "a.csv", tmp_path / "a.json").add(make_row(job(), HASTY, []))
    Rows(tmp_path / "a.csv", tmp_path / "a.json").save()
    assert json.loads((tmp_path / "a-1.json").read_text())["rows"]


def test_rows_of_other_settings_do_not_count(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), HASTY, rows.rows))
    assert rows.has(job()) and rows.of("tiny", "cpu") and not rows.of("tiny", "cuda")
    for other in ({"steps": 4}, {"device": "cuda"}, {"budget_bytes": 1}):
        assert not rows.has(job(**other))
    rows.rows[0]["machine"] = "another"
    assert not rows.has(job()) and not rows.of("tiny", "cpu")


def test_without_a_plain_run_nothing_runs_without_its_budget(tmp_path: Path) -> None:
    begun: list[str] = []

    def out_of_memory(asked: Job, log: Path) -> dict[str, Any]:
        begun.append(asked.way)
        return {"status": "oom", "reason": "too large"}

    asked_for = ("--ways", "resident,wrap", "--frontier", "--sweep", "--points", "1")
    assert run(tmp_path, *asked_for, measure=out_of_memory) == 0
    assert begun[0] == "plain-fp32" and all(way.startswith("plain") for way in begun) and len(begun) == 2
    rows = json.loads((tmp_path / "benchmarks.json").read_text())["rows"]
    skipped = [row["suite"] for row in rows if row["status"] == "skipped"]
    assert skipped == ["registry"] * 2 + ["frontier"] * len(suite.FRONTIER) + ["sweep"]


def test_sigterm_is_an_interrupt(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(asked: Job, log: Path) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return dict(HASTY)

    assert run(tmp_path, "--ways", "plain-fp32,wrap", measure=terminated) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    left = json.loads((tmp_path / "benchmarks.json").read_text())["left_out"]
    assert [label.rpartition(", ")[2] for label in left] == ["plain-fp32", "wrap"]


def test_a_failure_has_a_row_without_figures(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), {"status": "oom", "reason": "CUDA out of memory"}, rows.rows))
    (line,) = csv.DictReader((tmp_path / "a.csv").open())
    assert (line["status"], line["reason"], line["step_ms"]) == ("oom", "CUDA out of memory", "")
    assert line["torch"] == torch.__version__ and line["date"]
    assert "oom: CUDA out of memory" in table.report(rows.rows, "tiny", [])


def test_a_good_row_takes_the_place_of_a_failed_one(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), {"status": "failed", "reason": "disk full"}, rows.rows))
    assert not rows.has(job())
    again = Rows(tmp_path / "a.csv", tmp_path / "a.json", resume=True)
    again.add(make_row(job(), HASTY, again.rows))
    assert again.has(job()) and [row["status"] for row in again.rows] == ["ok"]
    kept = [line["status"] for line in csv.DictReader((tmp_path / "a.csv").open())]
    assert kept == ["failed", "ok"]


def test_rows_compare_with_the_plain_run_of_the_same_precision(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.csv", tmp_path / "a.json")
    rows.add(make_row(job(), HASTY, rows.rows))
    rows.add(make_row(job("plain-bf16", precision="bf16-amp"), {**HASTY, "step_ms": 1.0}, rows.rows))
    ours = {**HASTY, "allocated_bytes": 25, "step_ms": 3.0, "predicted_bytes": 26, "losses": [1.0, 0.505]}
    row = make_row(job("wrap"), ours, rows.rows)
    assert (row["of_plain_memory"], row["of_plain_time"], row["of_bf16_time"]) == (0.25, 1.5, 3.0)
    assert row["predicted_off_percent"] == pytest.approx(4.0)
    assert (
        row["loss_off_percent"] == pytest.approx(1.0) and not row["losses_equal"] and row["gradients_equal"]
    )


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("date,something\n")
    with pytest.raises(MemScaleError, match="other columns"):
        Rows(tmp_path / "a.csv", tmp_path / "a.json")
    assert (tmp_path / "a.csv").read_text() == "date,something\n"


def run(tmp_path: Path, *more: str, measure: Measure | None = None) -> int:
    return main(["--quick", "--out", str(tmp_path), "--models", "gpt2-medium", *more], measure)


def test_an_interrupted_run_keeps_its_rows_and_goes_on_with_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    def second_is_interrupted(asked: Job, log: Path) -> dict[str, Any]:
        begun.append(asked.way)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return dict(HASTY)

    assert run(tmp_path, measure=second_is_interrupted) == 130
    document = json.loads((tmp_path / "benchmarks.json").read_text())
    assert document["interrupted"] and [row["way"] for row in document["rows"]] == ["plain-fp32"]
    with (tmp_path / "benchmarks.csv").open() as file:
        assert next(csv.reader(file)) == list(COLUMNS)
    assert run(tmp_path, "--resume", "--json", measure=second_is_interrupted) == 0
    assert begun == ["plain-fp32", "plain-bf16", *WAYS[1:]]
    assert len((tmp_path / "benchmarks.csv").read_text().splitlines()) == 1 + len(WAYS)
    printed = capsys.readouterr().out
    assert [row["way"] for row in json.loads(printed[printed.index("{\n") :])["rows"]] == list(WAYS)


def test_without_time_the_rest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def begins(asked: Job, log: Path) -> dict[str, Any]:
        pytest.fail("nothing may begin")

    assert run(tmp_path, "--minutes", "0", "--ways", "plain-fp32,wrap", measure=begins) == 0
    assert (
        "Not measured, for want of time: gpt2-medium 2×64, plain-fp32; gpt2-medium 2×64, wrap"
        in capsys.readouterr().out
    )


def test_what_the_end_of_the_time_cuts_off_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_slow(asked: Job, log: Path) -> dict[str, Any]:
        return {"status": "timeout", "reason": "not done"}

    assert run(tmp_path, "--ways", "plain-fp32", measure=too_slow) == 0
    assert json.loads((tmp_path / "benchmarks.json").read_text())["rows"][0]["status"] == "timeout"
    assert run(tmp_path, "--ways", "plain-fp32", "--minutes", "1", measure=too_slow) == 0
    assert json.loads((tmp_path / "benchmarks.json").read_text())["rows"] == []
    assert "for want of time: gpt2-medium 2×64, plain-fp32" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [
    ("--steps", "0"), ("--steps", "many"), ("--points", "0"), ("--points", "-3"), ("--minutes", "-1"),
    ("--minutes", "nan"), ("--minutes", "soon"),
])  # fmt: skip
def test_numbers_that_are_none_are_refused(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", *wrong])
    assert f"{wrong[1]!r} is not a" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--ways", "fast"), ("--models", "gpt5"), ("--steps", "1")])
def test_requests_that_make_no_sense_are_refused(wrong: tuple[str, str], tmp_path: Path) -> None:
    assert main(["--quick", "--out", str(tmp_path), *wrong]) == 2


# ---- as a whole --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_quick_run_measures(tmp_path: Path) -> None:
    """Two processes of their own: what the parts above cannot show."""
    assert run(tmp_path, "--ways", "plain-fp32,wrap", "--steps", "3") == 0
    plain, ours = json.loads((tmp_path / "benchmarks.json").read_text())["rows"]
    assert plain["status"] == ours["status"] == "ok", (plain["reason"], ours["reason"])
    assert ours["exact"] and ours["gradients_equal"] and ours["losses_equal"]
    assert ours["allocated_bytes"] < plain["allocated_bytes"] and plain["resident_bytes"] > 0
    assert 0.9 < ours["predicted_bytes"] / ours["allocated_bytes"] < 1.2
