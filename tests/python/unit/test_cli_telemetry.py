# SPDX-License-Identifier: Apache-2.0
"""`memscale telemetry`: status, enable, disable, show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from cli_samples import Runner
from memscale.telemetry.payload import Said, payload

CLEARED = ("DO_NOT_TRACK", "MEMSCALE_TELEMETRY", "MEMSCALE_TELEMETRY_URL", "CI", "CODEBUILD_BUILD_ID",
           "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD")  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return Runner(capsys)


def test_it_is_off_where_nobody_has_said_anything(run: Runner, tmp_path: Path) -> None:
    done = run("telemetry", "status", "--json")
    assert done.code == 0
    assert done.document == {
        "format": "memscale-telemetry",
        "version": 1,
        "enabled": False,
        "sends": False,
        "decided_by": "default",
        "reason": "nobody has switched it on",
        "url": None,
        "url_problem": "none is built in: set MEMSCALE_TELEMETRY_URL, or run `memscale telemetry "
        "enable --url URL`",
        "file": "~/.config/memscale/telemetry.json",
        "file_exists": False,
        "file_problem": None,
    }
    assert run("telemetry", "status").out.startswith("telemetry   off\ndecided by  default: nobody")
    assert not [*tmp_path.iterdir()]


def test_enable_needs_an_address(run: Runner, tmp_path: Path) -> None:
    run("telemetry", "enable").refused("--url http://HOST:PORT", "MEMSCALE_TELEMETRY_URL")
    run("telemetry", "enable", "--url", "memscale.test").refused("'memscale.test' is no address")
    assert not [*tmp_path.iterdir()]


def test_enable_and_disable(run: Runner, tmp_path: Path) -> None:
    done = run("telemetry", "enable", "--url", "http://memscale.test:8080", "--json")
    found = done.document
    assert (done.code, done.err) == (0, "")
    assert (found["enabled"], found["sends"], found["decided_by"]) == (True, True, "file")
    assert found["url"] == "http://memscale.test:8080/api/v1/telemetry"
    file = tmp_path / ".config" / "memscale" / "telemetry.json"
    assert file.stat().st_mode & 0o777 == 0o600
    off = run("telemetry", "disable")
    assert off.code == 0
    assert off.out.startswith("telemetry   off\ndecided by  file: `memscale telemetry disable` was run\n")
    assert run("telemetry", "enable", "--json").document["url"] == found["url"]  # the one before


def test_the_address_of_the_environment_is_kept(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", "http://memscale.test/in")
    assert run("telemetry", "enable").code == 0
    monkeypatch.delenv("MEMSCALE_TELEMETRY_URL")
    assert run("telemetry", "status", "--json").document["url"] == "http://memscale.test/in"


def test_enable_says_that_something_else_keeps_it_off(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    found = run("telemetry", "enable", "--url", "http://memscale.test", "--json").document
    assert (found["enabled"], found["decided_by"]) == (False, "DO_NOT_TRACK")
    monkeypatch.delenv("DO_NOT_TRACK")
    assert run("telemetry", "status", "--json").document["enabled"]


def test_on_without_an_address_is_said(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_TELEMETRY", "1")
    done = run("telemetry", "status", "--json")
    assert (done.document["enabled"], done.document["sends"]) == (True, False)
    assert run("telemetry", "status").out.startswith("telemetry   on, and nothing is sent\n")


def test_a_damaged_file_is_a_sentence(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".config" / "memscale" / "telemetry.json"
    file.parent.mkdir(parents=True)
    file.write_text("\x1b[31m")
    done = run("telemetry", "status")
    assert (
        done.code == 0 and "is damaged; `memscale telemetry enable` or `disable` writes it again" in done.out
    )
    monkeypatch.setenv("MEMSCALE_TELEMETRY", "0")  # which decides; the file is damaged all the same
    found = run("telemetry", "status", "--json").document
    assert found["decided_by"] == "MEMSCALE_TELEMETRY" and "is damaged" in found["file_problem"]


def test_a_choice_that_cannot_be_written(run: Runner, tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("no folder")
    assert run("telemetry", "status").code == 0
    run("telemetry", "enable", "--url", "http://memscale.test").refused("cannot write", "telemetry.json")


def test_the_switch_works_without_pytorch(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("telemetry", "enable", "--url", "http://memscale.test").code == 0
    assert run("telemetry", "disable").code == 0


def test_show_prints_bytes_alone(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")  # which does not keep anybody from looking
    done = run("telemetry", "show")
    assert done.code == 0 and done.out == payload(Said()).decode() + "\n"
    assert "MODEL shows another" in done.err
    said = run("telemetry", "show", "--json")
    assert (said.out, said.err) == (done.out, "")


def test_show_of_a_model(run: Runner) -> None:
    sizes = ("--batch", 64, "--seq", 64, "--device", "cpu")
    plain = run("telemetry", "show", "cli_samples:sized", *sizes).document
    assert (plain["architecture"], plain["parameters"], plain["techniques"]) == ("other", "<1M", [])
    tight = run("telemetry", "show", "cli_samples:sized", *sizes, "--budget", "30MiB").document
    assert tight["techniques"]
    other = run(
        "telemetry", "show", "cli_samples:transformer", "--device", "cpu", "--budget", "64KiB"
    ).document
    assert (other["architecture"], other["fits"]) == ("gpt2", False)
    run("telemetry", "show", "cli_samples:missing").refused("has no function 'missing'")


def test_show_takes_no_graph(run: Runner, tmp_path: Path) -> None:
    graph = tmp_path / "step.graph"
    graph.write_text("memscale-graph 1\n")
    run("telemetry", "show", graph).refused("has no architecture")


def test_mistakes(run: Runner) -> None:
    run("telemetry").refused("ACTION")
    run("telemetry", "ask").refused("'ask'")
    run("telemetry", "status", "--url", "http://memscale.test").refused("--url")


@pytest.mark.parametrize("action", ["status", "enable", "disable", "show"])
def test_every_option_is_on_the_page(run: Runner, action: str) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "guide" / "cli.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    assert re.search(rf"`memscale telemetry {action}\b", words)
    with pytest.raises(SystemExit):
        run("telemetry", action, "--help")
    options = {*re.findall(r"(?<!\S)--[a-z0-9-]+", run.capsys.readouterr().out)} - {"--help"}
    assert "--json" in options
    assert all(option in words for option in options), options


def test_the_document_is_json(run: Runner) -> None:
    assert json.loads(run("telemetry", "disable", "--json").out)["format"] == "memscale-telemetry"
