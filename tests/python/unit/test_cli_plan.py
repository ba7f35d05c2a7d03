# SPDX-License-Identifier: Apache-2.0
"""`memscale plan`: what it prints, saves and ends with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memscale
from cli_samples import Runner, sized
from core_samples import chain

SIZED = ("plan", "cli_samples:sized", "--batch", 64, "--seq", 64, "--device", "cpu")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Runner(capsys)


def planned(budget: str) -> memscale.Plan:
    """The same plan through the library."""
    model, ids = sized(64, 64)
    return memscale.plan(model, None, memscale.Config(memory_budget=budget), ids)


def test_it_prints_what_explain_says(run: Runner) -> None:
    said = run(*SIZED, "--budget", "55MiB")
    assert said.code == 0
    expected = planned("55MiB")
    assert expected.active
    assert expected.explain() in said.out
    assert "FITS WITH A PLAN" in said.out
    assert "memory_budget='55MiB'" in said.out
    assert "frontier" not in said.out


def test_verbose_has_every_module(run: Runner) -> None:
    said = run(*SIZED, "--budget", "55MiB", "--verbose")
    assert planned("55MiB").explain(verbose=True) in said.out
    assert all(f" {choice.module} " in said.out for choice in planned("55MiB").choices if choice.module)


def test_the_frontier_falls_in_bytes_and_rises_in_time(run: Runner) -> None:
    said = run(*SIZED, "--budget", "55MiB", "--frontier", "--json")
    rows = said.document["frontier"]
    assert len(rows) > 1
    peaks, times = ([row[name] for row in rows] for name in ("peak_bytes", "step_ns"))
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in rows)
    assert peaks[0] == said.document["plain_peak_bytes"]
    assert peaks[-1] == said.document["smallest_peak_bytes"]
    text = run(*SIZED, "--budget", "55MiB", "--frontier").out
    assert "frontier: the fastest plan found within a budget" in text
    assert "× 1.000" in text


def test_json_is_the_plan(run: Runner) -> None:
    said = run(*SIZED, "--budget", "55MiB", "--json")
    found, expected = said.document, planned("55MiB")
    assert (found["format"], found["version"], found["verdict"]) == ("memscale-plan", 1, "plan")
    assert found["digest"] == expected.digest
    assert found["planned_peak_bytes"] == expected.predicted.device_used_peak_bytes
    assert found["pressure_ppm"] == round(expected.pressure * 1_000_000)
    assert [item["module"] for item in found["choices"]] == [item.module for item in expected.choices]
    assert set(found["choices"][0]) >= {"kept", "joined", "other_peak_bytes", "other_ns", "rule", "reason"}
    assert "frontier" not in found


def test_a_saved_plan_is_read_again(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = run(*SIZED, "--budget", "55MiB", "--save", path)
    assert said.out.endswith(f"saved: {path}\n")
    again, expected = memscale.Plan.from_json(path.read_text()), planned("55MiB")
    assert (again.digest, again.choices) == (expected.digest, expected.choices)
    assert again.frontier == expected.frontier
    run(*SIZED, "--save", tmp_path / "no" / "where").refused("cannot write", "No such file")


def test_what_does_not_fit_is_3(run: Runner) -> None:
    said = run(*SIZED, "--budget", "4MiB")
    assert said.code == 3
    assert "DOES NOT FIT" in said.out
    assert "raise the budget to" in said.out
    assert run(*SIZED, "--budget", "4MiB", "--json").document["verdict"] == "no"


def test_a_graph_is_planned_too(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "step.graph"
    chain(4).save(path)
    said = run("plan", path, "--device", "cpu", "--budget", "1GiB")
    assert said.code == 0
    assert "nothing to do: the plain step fits" in said.out


def test_one_case_only(run: Runner) -> None:
    run("plan", "cli_samples:sized", "--batch", "1,2").refused("--batch")
    run("plan", "cli_samples:missing").refused("has no function 'missing'")


@pytest.mark.parametrize("command", ["plan", "estimate", "report"])
def test_without_pytorch_it_says_so(command: str) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom memscale.cli.main import main\n"
        f"sys.exit(main([{command!r}, 'gpt2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "memscale: PyTorch is not installed: pip install torch\n"


def test_modules_are_left_out(run: Runner, tmp_path: Path) -> None:
    paths = [item.module for item in planned("55MiB").choices if item.techniques]
    said = run(*SIZED, "--budget", "55MiB", "--exclude", paths[0], "--exclude", paths[0], "--json")
    rules = {item["module"]: item["rule"] for item in said.document["choices"]}
    assert rules[paths[0]] == "excluded"
    assert any(note.startswith(f"exclude: {paths[0]}") for note in said.document["notes"])
    only = run(*SIZED, "--budget", "4MiB", "--only", paths[0], "--json").document["choices"]
    assert {item["module"] for item in only if item["techniques"]} <= {paths[0]}
    run(*SIZED, "--only", "no.such").refused("only: the pattern 'no.such' matches no module")
    path = tmp_path / "step.graph"
    chain(4).save(path)
    run("plan", path, "--device", "cpu", "--exclude", "x").refused("need a model")
