# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of model classes and of what loops do around models: every bit is plain PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from sweeping import rows  # noqa: E402
from sweeping.forks import environment  # noqa: E402

SAMPLE = {"transformers": 12, "around": 14}
SEED = 21


@pytest.mark.timeout(1800)  # a machine that is busy with other tests; alone it takes a minute
@pytest.mark.parametrize("library", SAMPLE)
def test_a_sample_has_no_wrong_bit_no_exception_and_no_remains(library: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [
        *(sys.executable, str(ROOT / "tools" / "sweep.py"), "--library", library, "--installed"),
        *("--sample", str(SAMPLE[library]), "--seed", str(SEED), "--json", str(file)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(None))
    print(done.stdout)  # predictions and budgets that were missed stand there; they fail nothing here
    found = list(rows.read(file).values())
    swept = [row for row in found if row.status != rows.NOT_SWEPT]
    assert len(found) == SAMPLE[library], done.stderr[-3000:]
    assert 2 * len(swept) >= len(found), done.stderr[-3000:]
    assert any(row.active for row in swept), done.stderr[-3000:]
    assert done.returncode == 0, done.stdout[-6000:]
