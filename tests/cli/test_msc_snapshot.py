# SPDX-License-Identifier: Apache-2.0
"""``msc snapshot`` from outside. The environment variable ``MSC`` names the program."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

DATA = Path(__file__).parents[1] / "data/snapshots"


def msc(*args: object) -> subprocess.CompletedProcess[str]:
    """Runs the tool and returns what it said."""
    program = os.environ.get("MSC")
    assert program, "set MSC to the path of the msc program"
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=60, check=False)


def test_text_and_json_agree() -> None:
    done = msc("snapshot", DATA / "ring.pickle", "--replay")
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(msc("snapshot", DATA / "ring.pickle", "--replay", "--json").stdout)["devices"]
    assert f"({device['reserved_peak_bytes']} bytes)" in done.stdout
    assert device["replay"]["exact"] and "exact: 135 requests and frees" in done.stdout
    assert device["at_end"][0]["site"].startswith("workloads.py:")
    assert device["at_end"][0]["site"] in done.stdout
    assert device["actions"]["alloc"] == 46


def test_a_difference_is_no_failure() -> None:
    done = msc("snapshot", DATA / "oom-split.pickle", "--replay")
    assert done.returncode == 0
    assert "differs" in done.stdout and "recorded" in done.stdout


def test_without_replay() -> None:
    done = msc("snapshot", DATA / "pool.pickle")
    assert done.returncode == 0
    assert "Device 0: " in done.stdout and "replay" not in done.stdout


def test_refusals(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.write_bytes(b"cos\nsystem\n(Vtrue\ntR.")
    done = msc("snapshot", evil)
    assert done.returncode == 2 and "GLOBAL is refused" in done.stderr and done.stdout == ""
    assert msc("snapshot", tmp_path / "none").returncode == 3
    done = msc("snapshot")
    assert done.returncode == 2 and "exactly one snapshot file" in done.stderr
    done = msc("snapshot", DATA / "ring.pickle", "--device", "cuda")
    assert done.returncode == 2 and "snapshot does not take --device" in done.stderr
    done = msc("inspect", DATA / "ring.pickle", "--replay")
    assert done.returncode == 2 and "inspect does not take --replay" in done.stderr
