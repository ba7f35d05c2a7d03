# SPDX-License-Identifier: Apache-2.0
"""`memscale import` at the real server and into a folder: all of a source, each point once, however often."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import Client, Server
from test_mlflow import PYTHON, with_client

RUN_ID = "0123456789abcdef0123456789abcdef"
BEGIN_MS = 1_700_000_000_000
MLFLOW = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("vision")
with mlflow.start_run(run_name="first") as run:
    mlflow.log_param("lr", 0.1)
    mlflow.set_tag("k", "v")
    for step in range(7):
        mlflow.log_metric("a/b", step / 2, step=step)
    mlflow.log_metrics({"nan": float("nan"), "inf": float("-inf")})
with mlflow.start_run(run_name="gone") as other:
    pass
mlflow.delete_run(other.info.run_id)
print(run.info.run_id)
"""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MEMSCALE_TOKEN", raising=False)


def command(*words: str, status: int = 0) -> Any:
    line = [sys.executable, "-m", "memscale", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == status, (done.stdout, done.stderr)
    return json.loads(done.stdout)["runs"] if done.stdout else done.stderr


def rows_of(client: Client, run: str) -> dict[str, list[tuple[int, int, str]]]:
    text = client.ask("GET", f"/api/v1/runs/{run}/export?format=csv").body.decode()
    found: dict[str, list[tuple[int, int, str]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        found.setdefault(row["series"], []).append((int(row["step"]), int(row["time_ms"]), row["value"]))
    return found


def tracking_folder(root: Path, points: int) -> Path:
    """What MLflow's file store has of one experiment with two runs, one of them deleted."""
    run = root / "11" / RUN_ID
    for name, about in {
        "11": {"experiment_id": "11", "name": "vision", "lifecycle_stage": "active"},
        f"11/{RUN_ID}": {"run_id": RUN_ID, "run_name": "first <b>", "status": 3, "start_time": BEGIN_MS,
                         "end_time": BEGIN_MS + 5000, "lifecycle_stage": "active"},
        "11/gone": {"run_id": "gone", "status": 3, "start_time": 1, "lifecycle_stage": "deleted"},
    }.items():  # fmt: skip
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "meta.yaml").write_text("".join(f"{key}: {value}\n" for key, value in about.items()))
    for folder, files in {"metrics/a": {"b": ""}, "metrics": {"nan": ""}, "params": {"lr": "0.1"},
                          "tags": {"note": "é"}}.items():  # fmt: skip
        (run / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (run / folder / name).write_text(text)
    lines = [f"{BEGIN_MS + step} {step / 4} {step}\n" for step in range(points)]
    (run / "metrics" / "a" / "b").write_text("".join(lines))
    (run / "metrics" / "nan").write_text(f"{BEGIN_MS} nan 0\n{BEGIN_MS} -inf 1\n")
    return root


def trackio_file(path: Path, rows: int, with_ids: bool = True) -> Path:
    """What Trackio has of a project with two runs of the same name."""
    path.unlink(missing_ok=True)
    id_ = "run_id TEXT NOT NULL, " if with_ids else ""
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {id_}timestamp TEXT, run_name TEXT,"
                         " step INTEGER, metrics TEXT)")  # fmt: skip
        database.execute(f"CREATE TABLE configs (id INTEGER PRIMARY KEY, {id_}run_name TEXT, config TEXT)")
        if with_ids:
            database.execute("CREATE TABLE system_metrics (id INTEGER PRIMARY KEY, run_id TEXT,"
                             " timestamp TEXT, run_name TEXT, metrics TEXT)")  # fmt: skip
            database.execute("CREATE TABLE alerts (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT,"
                             " run_name TEXT, title TEXT, text TEXT, level TEXT, step INTEGER)")  # fmt: skip
        for run in ("one", "two") if with_ids else ("",):
            ids = (run,) if with_ids else ()
            marks = "?, " * len(ids)
            for step in range(rows):
                metrics = {"loss": step / 8, "bad": "NaN", "table": {"x": 1}, "flag": True}
                database.execute(
                    f"INSERT INTO metrics VALUES (NULL, {marks}?, ?, ?, ?)",
                    (*ids, f"2026-03-01T00:00:{step % 60:02}+00:00", "same", step, json.dumps(metrics)),
                )
            database.execute(f"INSERT INTO configs VALUES (NULL, {marks}?, ?)", (*ids, "same", '{"lr": 3}'))
            if with_ids:
                database.execute("INSERT INTO system_metrics VALUES (NULL, ?, ?, ?, ?)",
                                 (run, "2026-03-01T00:00:00", "same", '{"gpu": 7}'))  # fmt: skip
                alert = (run, "2026-03-01T00:00:00Z", "same", "high", "loss", "warn", 4)
                database.execute("INSERT INTO alerts VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", alert)
    database.close()
    return path


@pytest.fixture
def url(server: Server, tool: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    assert tool.token is not None
    monkeypatch.setenv("MEMSCALE_TOKEN", tool.token)
    return f"http://127.0.0.1:{server.port}"


def test_a_tracking_folder_comes_once_and_what_it_grows_by(tmp_path: Path, url: str, tool: Client) -> None:
    words = ("import", "mlflow", str(tracking_folder(tmp_path / "mlruns", 7000)), "--server", url)
    (found,) = command(*words)
    assert (found["id"], found["project"], found["points"]) == (RUN_ID, "vision", 7002)
    run = tool.ask("GET", f"/api/v1/runs/{RUN_ID}").json
    assert (run["name"], run["state"], run["created_ms"]) == ("first <b>", "finished", BEGIN_MS)
    assert run["ended_ms"] == BEGIN_MS + 5000
    assert tool.ask("GET", f"/api/v1/runs/{RUN_ID}/documents/params").json == {"lr": "0.1"}
    rows = rows_of(tool, RUN_ID)
    assert rows["nan"] == [(0, BEGIN_MS, "NaN"), (1, BEGIN_MS, "-Infinity")]
    assert [(step, float(value)) for step, _, value in rows["a/b"]] == [(s, s / 4) for s in range(7000)]
    (again,) = command(*words)
    assert again["was_there"] and again["points"] == 0 and rows_of(tool, RUN_ID) == rows
    tracking_folder(tmp_path / "mlruns", 7300)
    (grown,) = command(*words)
    assert grown["points"] == 300 and len(rows_of(tool, RUN_ID)["a/b"]) == 7300


def test_trackio_in_both_its_forms(tmp_path: Path, url: str, tool: Client) -> None:
    file = trackio_file(tmp_path / "demo.db", 70)
    words = ("import", "trackio", str(file), "--server", url)
    found = command(*words)
    assert [item["name"] for item in found] == ["same", "same"] and len({item["id"] for item in found}) == 2
    rows = rows_of(tool, found[0]["id"])
    assert {name: len(points) for name, points in rows.items()} == {
        "loss": 70, "bad": 70, "flag": 70, "system/gpu": 1,
    }  # fmt: skip
    assert rows["loss"][3] == (3, 1_772_323_203_000, "0.375") and rows["bad"][0][2] == "NaN"
    events = tool.ask("GET", f"/api/v1/runs/{found[0]['id']}/events").json["events"]
    assert [(event["kind"], event["text"], event["step"]) for event in events] == [("alert", "high: loss", 4)]
    assert all(item["was_there"] for item in command(*words))
    assert tool.ask("GET", f"/api/v1/runs/{found[0]['id']}/events").json["events"] == events
    (tmp_path / "before").mkdir()
    old = trackio_file(tmp_path / "before" / "old.db", 5, with_ids=False)
    (found_old,) = command("import", "trackio", str(old.parent), "--server", url)
    assert found_old["project"] == "old" and found_old["points"] == 15


def test_into_a_folder_and_from_there_to_a_server(tmp_path: Path, url: str, tool: Client) -> None:
    source, root = tracking_folder(tmp_path / "mlruns", 7000), tmp_path / "runs"
    words = ("import", "mlflow", str(source), "--into", str(root))
    (found,) = command(*words)
    assert found["points"] == 7002 and not found["problem"]
    assert command(*words)[0]["was_there"]
    (listed,) = command("runs", str(root))
    assert (listed["id"], listed["state"], listed["last_step"]) == (RUN_ID, "finished", 6999)
    (sent,) = command("sync", str(root), "--server", url)
    assert sent["is_there"]
    rows = rows_of(tool, RUN_ID)
    assert [(step, float(value)) for step, _, value in rows["a/b"]] == [(s, s / 4) for s in range(7000)]
    (after,) = command("import", "mlflow", str(source), "--server", url)
    assert after["points"] == 0  # a server counts what it has, from any client


def test_sources_that_are_none_and_servers_that_refuse(
    tmp_path: Path, url: str, server: Server, ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "file.db").write_bytes(b"no database" * 100)
    for source in ("mlflow", "trackio"):
        for place in (empty, empty / "file.db", empty / "nothing"):
            assert "Traceback" not in command("import", source, str(place), "--server", url, status=2)
    folder = tracking_folder(tmp_path / "mlruns", 3)
    (folder / "11" / RUN_ID / "metrics" / "nan").write_text("what is this\n")
    (found,) = command("import", "mlflow", str(folder), "--server", url, status=1)
    assert "is no point" in found["problem"]
    (found,) = command("import", "mlflow", str(folder), "--into", str(tmp_path / "runs"), status=1)
    assert "is no point" in found["problem"] and not any((tmp_path / "runs").iterdir())
    reader = server.with_token(ann, "read")
    assert reader.token is not None
    monkeypatch.setenv("MEMSCALE_TOKEN", reader.token)
    (found,) = command("import", "mlflow", str(tracking_folder(folder, 3)), "--server", url, status=1)
    assert found["problem"].startswith("403")
    monkeypatch.delenv("MEMSCALE_TOKEN")
    assert "memscale login" in command("import", "mlflow", str(folder), "--server", url, status=2)


@with_client
@pytest.mark.parametrize("store", ["folder", "sqlite"])
def test_what_mlflow_itself_has_written(tmp_path: Path, url: str, tool: Client, store: str) -> None:
    place = tmp_path / ("mlruns" if store == "folder" else "mlflow.db")
    uri = str(place) if store == "folder" else f"sqlite:///{place}"
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "HOME": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    line = [str(PYTHON), "-c", MLFLOW, uri]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    run = done.stdout.split()[-1]
    (found,) = command("import", "mlflow", str(place), "--server", url)
    assert (found["id"], found["project"], found["name"], found["points"]) == (run, "vision", "first", 9)
    rows = rows_of(tool, run)
    assert [(step, value) for step, _, value in rows["a/b"]][:3] == [(0, "0"), (1, "0.5"), (2, "1")]
    assert rows["nan"][0][2] == "NaN" and rows["inf"][0][2] == "-Infinity"
    tags = tool.ask("GET", f"/api/v1/runs/{run}/documents/tags").json
    assert tags["k"] == "v" and tool.ask("GET", f"/api/v1/runs/{run}").json["state"] == "finished"
    assert command("import", "mlflow", str(place), "--server", url)[0]["was_there"]
