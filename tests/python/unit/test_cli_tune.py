# SPDX-License-Identifier: Apache-2.0
"""`memscale tune`: what it prints, its JSON, its exit status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memscale.cli.main import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        return self.body(x).square().mean()

def build():
    return Net(), torch.randn(4, 64)

def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net_to_tune.py"
    path.write_text(MODEL)
    return f"{path}:build"


def test_the_answer_and_the_loop_to_paste(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["tune", net, "--global-batch", "16", "--device", "cpu", "--budget", "16MiB"])
    text = capsys.readouterr().out
    assert status == 0
    assert "= 16 samples per step" in text and "predicted, no step was run" in text
    assert "DataLoader(dataset, batch_size=" in text and "model(batch)" in text


def test_json(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", net, "--global-batch", "8", "--gpu", "RTX 3090", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "memscale-tune" and data["version"] == 1
    assert data["fits"] and not data["confirmed"] and data["global_batch"] == 8
    assert data["micro_batch"] * data["accumulation"] == 8
    assert data["model"]["origin"] == "Net"


def test_confirmed_by_real_steps(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tune",
        net,
        "--global-batch",
        "2",
        "--device",
        "cpu",
        "--budget",
        "16MiB",
        "--confirm",
        "--json",
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["confirmed"]
    run = [one["confirmed"] for one in data["candidates"] if one["confirmed"]]
    assert run and all(one["peak_bytes"] > 0 and not one["out_of_memory"] for one in run)


def test_nothing_fits(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", net, "--global-batch", "8", "--device", "cpu", "--budget", "100KiB"]) == 3
    text = capsys.readouterr().out
    assert (
        "nothing fits 100.00 KiB" in text and "advice  raise the budget" in text and "DataLoader" not in text
    )


def test_batch_normalisation(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", net.replace(":build", ":normed"), "--global-batch", "8", "--device", "cpu", "--json"]
    for more, sizes in ([], [8]), (["--splittable"], [2, 4, 8]), (["--no-splittable"], [8]):
        assert main([*words, *more]) == 0
        data = json.loads(capsys.readouterr().out)
        assert [one["micro_batch"] for one in data["candidates"]] == sizes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--global-batch"),
        (["--global-batch", "0"], "'0' is not a number from 1"),
        (["--global-batch", "8", "--batch", "2"], "unrecognized arguments: --batch 2"),
        (["--global-batch", "8", "--confirm", "--gpu", "RTX 3090"], "--confirm: real steps run here"),
        (["--global-batch", "8", "--optimizer", "muon"], "--optimizer muon: two optimizers"),
        (["--global-batch", "8", "-o", "/nowhere/at.png"], "cannot write '/nowhere/at.png'"),
        (["--global-batch", "8", "--gpu", "RTX 9999"], "none of the"),
    ],
)
def test_what_is_wrong_is_named(
    net: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", net, *words]) == 2
    assert text in capsys.readouterr().err


def test_a_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.graph"
    path.write_bytes(b"memscale-graph 1\n")
    assert main(["tune", str(path), "--global-batch", "8"]) == 2
    assert "is a graph" in capsys.readouterr().err
