# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, with no arguments, and say what they promise.

All but 05_predict.py, whose 14 traces of 24 layers take half a minute: its model has fewer and wider layers
here. With `MEMSCALE_TESTS=all` it runs as it stands, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amounts import also

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "python"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(tmp_path: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot plan" not in done.stderr
    return done


def labels(text: str) -> list[str]:
    """First words of the lines of a log block, each once: figures and plans are the machine's."""
    words = (line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip())
    return list(dict.fromkeys(words))


@pytest.mark.long
def test_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_CALIBRATION", "off")  # as where the README shows the block
    done = run(tmp_path, "02_ten_lines.py")
    shown = README.partition("---- MemScale -")[2].partition("```")[0]
    assert labels(done.stderr.partition("---- MemScale -")[2]) == labels(shown)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert "checkpoint" in done.stderr or "selective" in done.stderr
    assert "cannot be met" not in done.stderr


@pytest.mark.long
def test_plan_and_explain(tmp_path: Path) -> None:
    text = run(tmp_path, "03_plan_and_explain.py").stdout
    for part in (
        "plain step: peak",
        "fits; step time",
        "checkpoint",
        "frontier",
        "fits=False",
        "raise the budget",
    ):
        assert part in text


@pytest.mark.long
def test_optimize_block(tmp_path: Path) -> None:
    text = run(tmp_path, "04_optimize_block.py").stdout
    assert "checkpoint" in text
    assert "bit-equal to plain training: yes" in text


SIZES = "LAYERS, WIDTH, HEADS, VOCABULARY = "


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["4, 2560, 16, 32_000", *also("24, 1024, 16, 32_000")])
def test_predict(sizes: str, tmp_path: Path) -> None:
    source = (EXAMPLES / "05_predict.py").read_text(encoding="utf-8")
    assert source.count(f"\n{SIZES}24, 1024, 16, 32_000\n") == 1
    changed = source.replace(f"\n{SIZES}24, 1024, 16, 32_000\n", f"\n{SIZES}{sizes}\n")
    (tmp_path / "05_predict.py").write_text(changed, encoding="utf-8")
    text = run(tmp_path, str(tmp_path / "05_predict.py")).stdout
    assert "RTX 4060" in text and "does not fit" in text
    assert "05_predict.py:27" in text and "fragmentation" in text
    line = next(line for line in text.splitlines() if line.startswith("largest batch"))
    planned, plain = (int(word) for word in line.replace(",", "").split() if word.isdigit())
    assert planned > plain > 8


@pytest.mark.long
def test_resume(tmp_path: Path) -> None:
    lines = run(tmp_path, "06_resume.py").stdout.splitlines()
    assert lines == [
        "a run ended with signal 9 in step 3",
        "goes on with step 3",
        "weights bit-equal to those of a run that was not killed: yes",
    ]


@pytest.mark.long
def test_full_stack(tmp_path: Path) -> None:
    text = run(tmp_path, "07_full_stack.py").stdout
    assert "loss_tile" in text and "% of plain" in text


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        limit = 300 if path.name == "demo.py" else 120
        assert len(path.read_text(encoding="utf-8").splitlines()) < limit, path.name


@pytest.mark.skipif(
    os.environ.get("MEMSCALE_TEST_DEMO") != "1", reason="takes a minute: set MEMSCALE_TEST_DEMO=1"
)
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run(tmp_path, "demo.py", "--short", "--json", "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["broken"] == []
    assert figures["bit_equal"] is True
    assert figures["wrapped_measured_bytes"] <= figures["budget_bytes"] < figures["plain_measured_bytes"]
    assert "DefaultCPUAllocator: can't allocate memory" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
