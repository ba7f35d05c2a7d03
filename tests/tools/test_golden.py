# SPDX-License-Identifier: Apache-2.0
"""`tools/golden.py`: what it takes is the same each time, and a difference is a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "golden.py"


def _golden(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_what_has_changed_is_all_that_differs(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    assert _golden("record", str(file), "two-heads", "--mode", "balanced").returncode == 0
    entries = json.loads(file.read_text())
    assert len(entries) == 7 and all(entry["bytes"] for key, entry in entries.items() if " % " in key)
    entries["two-heads balanced 30 % host"]["digest"] = "other"
    entries["two-heads bits"] = "other"
    entries["two-heads aggressive 30 % host"] = entries["another balanced 30 % host"] = "not asked for"
    file.write_text(json.dumps(entries))
    other = _golden("check", str(file), "two-heads", "--mode", "balanced")
    assert other.returncode == 1
    assert [line.split(":")[0] for line in other.stdout.splitlines()] == [
        "two-heads balanced 30 % host",
        "two-heads bits",
    ]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    refused = _golden("record", str(tmp_path / "x.json"), "nothing")
    assert refused.returncode == 2 and "no such workload: nothing" in refused.stderr
    assert not (tmp_path / "x.json").exists()
