# SPDX-License-Identifier: Apache-2.0
"""`memscale env`: what it says is so, and it says it where parts are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cli_samples import Runner
from memscale import __version__
from memscale.cli import env
from memscale.core import calibration
from memscale.hardware.present_gpu import PresentGpu
from processors import use_gpu


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def test_it_says_what_there_is(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("MEMSCALE_CALIBRATION", "off")
    done = run("env", "--json")
    found = done.document
    assert done.code == 0
    assert (found["format"], found["version"], found["memscale"]) == ("memscale-env", 1, __version__)
    assert found["torch"]["version"] == torch.__version__
    assert found["packages"]["Jinja2"] is not None
    assert found["host"]["total_bytes"] >= found["host"]["available_bytes"] > 0
    assert found["host"]["optimizer_steps"] in ("scalar", "avx2", "avx512")
    assert found["environment"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["rates"]["source"] == "table"
    text = run("env").out
    for part in (__version__, torch.__version__, "expandable_segments:True", "table (MEMSCALE_CALIBRATION)"):
        assert part in text


def test_a_card_is_told_with_its_memory(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    card = PresentGpu("NVIDIA T4", 16 << 30, (7, 5))
    use_gpu(monkeypatch, card)
    assert "NVIDIA T4, 16.00 GiB, compute capability 7.5" in run("env").out


def test_it_names_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert calibration.cache_file().is_relative_to(tmp_path)
    rates = env.document()["rates"]
    assert rates["file"] == "~/.cache/memscale/rates.json"
    assert not rates["file_exists"]


def test_it_works_without_pytorch(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("env")
    assert done.code == 0
    assert "torch                 not installed\n" in done.out


def test_a_bad_setting_is_shown_and_no_reason_to_fail(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_CALIBRATION", "perhaps")
    done = run("env")
    assert done.code == 0
    assert "'perhaps'; allowed" in done.out
