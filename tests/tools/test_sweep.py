# SPDX-License-Identifier: Apache-2.0
"""The sweep finds what it looks for, and a sample of it finds nothing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from sweeping import rows, trial  # noqa: E402
from sweeping.forks import environment  # noqa: E402
from sweeping.subject import Attempts, Made, Recipe, usual_loss  # noqa: E402

SAMPLE, SEED, MINUTES = 40, 21, 2
KEPT: list[Any] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks:
    """A library of one model."""

    def names(self) -> list[str]:
        return ["blocks"]

    def attempts(self, name: str) -> Attempts:
        yield {"width": 15}
        yield {"width": 16}

    def make(self, name: str, recipe: Recipe) -> Made:
        model = nn.Sequential(*(Block() for _ in range(4))).train()

        def batch(step: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            return (torch.randn(64, recipe["width"], generator=torch.Generator().manual_seed(step)),), {}

        return Made(model, batch, usual_loss)


def swept() -> rows.Row:
    """The row of that model, found in this process."""
    plain = trial.plain(Blocks(), "blocks")
    assert plain["recipe"] == {"width": 16} and not plain["unrepeatable"]
    planned = trial.planned(Blocks(), "blocks", plain["recipe"], plain["peak"], 0.6, deferred=False)
    row = rows.Row("blocks", "blocks", "none", {})
    rows.judge(row, plain, planned)
    return row


def after(function: Callable[..., Any], also: Callable[..., Any]) -> Callable[..., Any]:
    """A function of memscale that does something else at its end."""

    def changed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = function(model, *args, **kwargs)
        also(model)
        return result

    return changed


def test_a_model_without_faults_is_equal() -> None:
    row = swept()
    assert row.status == rows.EQUAL, row.problems
    assert row.active and row.predicted and row.peak


def _raise(model: nn.Module) -> None:
    raise RuntimeError("planted")


def _keep_a_fake(model: nn.Module) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        KEPT.append(torch.empty(3))


DEFECTS: dict[str, tuple[str, Callable[[nn.Module], Any], str, str]] = {
    "an attribute": ("predict", lambda model: setattr(model[1], "left", 1), rows.LEFT, "1.left"),
    "a hook": ("predict", lambda m: m[2].register_forward_hook(lambda *_: None), rows.LEFT, "_forward_hooks"),
    "of a weight": ("predict", lambda m: setattr(m[0].up.weight, "left", 1), rows.LEFT, "0.up.weight"),
    "another weight": ("predict", lambda m: setattr(m[0].up, "bias", nn.Parameter(m[0].up.bias.detach())), rows.LEFT, "identity"),
    "a generator": ("predict", lambda model: torch.rand(1), rows.LEFT, "generator torch"),
    "a setting": ("detach", lambda model: torch.set_float32_matmul_precision("medium"), rows.LEFT, "matmul"),
    "what stays": ("detach", lambda model: model[3].register_buffer("left", None), rows.LEFT, "3._buffers"),
    "a fake": ("predict", _keep_a_fake, rows.FAKE, "(3,)"),
    "an exception": ("wrap", _raise, rows.EXCEPTION, "planted"),
    "a bit": ("wrap", lambda m: m[0].up.bias.data.view(torch.int32).bitwise_xor_(1), rows.BITS, "differ"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    function, also, kind, said = DEFECTS[defect]
    monkeypatch.setattr(memscale, function, after(getattr(memscale, function), also), raising=False)
    try:
        row = swept()
    finally:
        KEPT.clear()
        torch.set_float32_matmul_precision("highest")
    assert row.status == rows.FAILED
    assert any(found == kind and said in line for found, _, line in row.problems), row.problems


def test_a_model_that_plain_pytorch_does_not_repeat_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * (1 + next(calls)))
    plain = trial.plain(Blocks(), "blocks")
    assert "loss" in plain["unrepeatable"]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    row = rows.Row("blocks", "blocks", "none", {"torch": "2"}, problems=[(rows.BITS, "step 0", "1 differ")])
    rows.append(tmp_path / "rows.jsonl", dataclasses.replace(row, reason="an earlier run"))
    rows.append(tmp_path / "rows.jsonl", row)
    assert list(rows.read(tmp_path / "rows.jsonl").values()) == [row]


@pytest.mark.timeout(900)
def test_a_sample_has_no_wrong_bit_no_exception_and_no_remains(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [
        sys.executable, str(ROOT / "tools" / "sweep.py"), "--library", "transformers,around", "--installed",
        "--sample", str(SAMPLE), "--seed", str(SEED), "--minutes", str(MINUTES), "--json", str(file),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment(None))
    found = rows.read(file).values()
    assert any(row.status == rows.EQUAL and row.active for row in found), done.stderr[-3000:]
    assert done.returncode == 0, done.stdout[-6000:]
