# SPDX-License-Identifier: Apache-2.0
"""Runs that the library records, at the real server: all of it, once, whatever is killed meanwhile."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from server_process import Client, Server, serving

#: Records numbered values, and says how many are on disk for sure, now and then.
TRAINING = """
import sys
import memscale
from memscale.recording.current import CURRENT
for step in range(10**9):
    memscale.record({"loss": step / 8, "x/y": -step}, step=step)
    if step % 500 == 0:
        memscale.record("note", f"step {step}", step=step)
        CURRENT.run._recorder.flush(60.0)
        print(step, flush=True)
    if step == int(sys.argv[1]):
        break
"""
ROUNDS = 4


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MEMSCALE_RECORD", "MEMSCALE_RUN", "MEMSCALE_TOKEN", "RANK"):
        monkeypatch.delenv(name, raising=False)


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def command(*words: str, given: str = "", status: int = 0) -> dict[str, Any]:
    """What a command of `memscale` answers with `--json`."""
    line = [sys.executable, "-m", "memscale", *words, "--json"]
    done = subprocess.run(line, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found


def training(url: str, last: int = -1) -> subprocess.Popen[str]:
    environment = {**os.environ, "MEMSCALE_RECORD": url}
    words = [sys.executable, "-c", TRAINING, str(last)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def runs_of(client: Client) -> list[dict[str, Any]]:
    projects = client.ask("GET", "/api/v1/projects").json["projects"]
    return [
        run
        for project in projects
        for run in client.ask("GET", f"/api/v1/projects/{project['id']}/runs?limit=500").json["runs"]
    ]


def steps_of(client: Client, run: str) -> dict[str, list[int]]:
    text = client.ask("GET", f"/api/v1/runs/{run}/export?format=csv").body.decode()
    found: dict[str, list[int]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        found.setdefault(row["series"], []).append(int(row["step"]))
    return found


def test_login_record_and_read_back(server: Server, ann: Client, tool: Client) -> None:
    assert tool.token is not None
    found = command("login", url_of(server), given=f"{tool.token}\n")
    assert found["account"] == "ann" and tool.token not in json.dumps(found)
    process = training(f"{url_of(server)}/demo", 1200)
    assert process.wait(120) == 0
    assert command("sync")["runs"] == []  # nothing waits
    (run,) = runs_of(tool)
    assert run["state"] == "finished"
    steps = steps_of(tool, run["id"])
    assert steps == {"loss": [*range(1201)], "x/y": [*range(1201)]}
    events = tool.ask("GET", f"/api/v1/runs/{run['id']}/events").json["events"]
    assert [event["text"] for event in events] == ["step 0", "step 500", "step 1000"]


def test_login_refuses_what_the_server_refuses(server: Server, ann: Client) -> None:
    command("login", url_of(server), given="ms_" + "0" * 16 + "_" + "0" * 64 + "\n", status=2)
    command("login", url_of(server), given="password\n", status=2)
    reader = server.with_token(ann, "read")
    command("login", url_of(server), given=f"{reader.token}\n", status=2)
    assert not (Path(os.environ["XDG_CONFIG_HOME"]) / "memscale").exists()


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_kills_on_both_sides_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    with serving(tmp_path / "data") as first:
        tool = first.with_token(first.set_up(), "admin")
        port, url = first.port, url_of(first)
        command("login", url, given=f"{tool.token}\n")
        processes = [training(url) for _ in range(2)]
        for process in processes:
            read(process, chance.randrange(1, 6))
        first.kill()
    flushed = [read(process, chance.randrange(1, 4)) for process in processes]  # training goes on
    if seed % 2:
        kill(processes)
    with serving(tmp_path / "data", "--listen", f"127.0.0.1:{port}") as second:
        if not seed % 2:
            flushed = [read(process, chance.randrange(1, 3)) for process in processes]
            kill(processes)
        line = [sys.executable, "-m", "memscale", "sync", "--wait", "100"]
        for sync in [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(2)]:
            sync.communicate(timeout=200)
        assert command("sync")["runs"] == []  # nothing waits
        tool.port = second.port
        tool.close()
        runs = runs_of(tool)
        assert len(runs) == 2
        last = []
        for run in runs:
            steps = steps_of(tool, run["id"])
            assert steps["loss"] == steps["x/y"] == [*range(len(steps["loss"]))]
            assert run["state"] in ("running", "lost")
            last.append(steps["loss"][-1])
        assert all(one >= other for one, other in zip(sorted(last), sorted(flushed), strict=True))


def read(process: subprocess.Popen[str], lines: int) -> int:
    """Lets it go on for so many lines. The step that is on disk for sure."""
    assert process.stdout is not None
    return max(int(process.stdout.readline()) for _ in range(lines))


def kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
