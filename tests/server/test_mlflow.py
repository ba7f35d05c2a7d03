# SPDX-License-Identifier: Apache-2.0
"""An unchanged MLflow client at the real server, in an environment of its own: requirements/mlflow.txt."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from server_process import ROOT, Client, Server, begin_run

PYTHON = Path(os.environ.get("MEMSCALE_MLFLOW", ROOT / "build" / "mlflow-venv" / "bin" / "python"))
MLFLOW = "/api/2.0/mlflow"

with_client = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"{PYTHON} is not there: requirements/mlflow.txt says how to make it"
)


def client_does(server: Server, token: str, *parts: str) -> dict[str, Any]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTHON"))},
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.port}",
        "MLFLOW_TRACKING_TOKEN": token,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "DO_NOT_TRACK": "1",
        "HOME": str(server.folder.parent),
    }
    line = [str(PYTHON), str(Path(__file__).parent / "mlflow_client.py"), *parts]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@with_client
def test_a_script_logs_a_run_and_our_api_reads_it(server: Server, ann: Client) -> None:
    tool = server.with_token(ann, "ingest", "read")
    assert tool.token is not None
    found = client_does(server, tool.token, "run")["run"]
    assert (found["name"], found["status"], found["experiment"]) == ("first", "FINISHED", "vision")
    assert found["lasts"]
    assert found["params"] == {"lr": "0.1", "layers": "4", "note": "é <b>"}
    assert found["tags"] == {"team": "a", "stage": "two", "x": "1"}
    assert {"mlflow.runName", "mlflow.user"} <= {*found["system"]}
    assert found["metrics"] == {"loss": "0.4", "a/b": "1.5", "nan": "nan", "inf": "-inf"}
    assert found["history"] == [[step, 2.0 / (step + 1)] for step in range(5)]
    assert "keep files elsewhere" in found["refused"]["artifact"][1]
    assert found["refused"]["param"][0] == "INVALID_PARAMETER_VALUE"
    run = tool.ask("GET", f"/api/v1/runs/{found['id']}").json
    assert run["name"] == "first" and run["state"] == "finished"
    points = tool.ask("GET", f"/api/v1/runs/{found['id']}/export?format=json").json
    assert points["documents"]["params"]["lr"] == "0.1"
    (loss,) = [series["points"] for series in points["series"] if series["name"] == "loss"]
    assert [[step, value] for step, _, value in loss] == found["history"]


@with_client
def test_batches_at_their_limits_and_a_history_of_pages(server: Server, tool: Client) -> None:
    assert tool.token is not None
    found = client_does(server, tool.token, "batches")["batches"]
    assert found["same"] and (found["params"], found["tags"]) == (100, 140)
    assert found["k3"] == [float(value) for value in range(3, 100, 7)] and found["nothing"] == []
    assert found["status"] == "FAILED" and found["times"] == [1_700_000_000_000, 1_700_000_100_000]


@with_client
def test_searches(server: Server, tool: Client) -> None:
    assert tool.token is not None
    found = client_does(server, tool.token, "searches")["searches"]
    loss = {f"r{index}": (index * 7) % 12 for index in range(12)}
    names = [f"r{index}" for index in range(11, 0, -1)]
    assert found["all"] == names and found["pages"] == [5, 5, 1]
    assert found["loss"] == sorted((name for name in names if loss[name] < 4), key=loss.__getitem__)
    two = [name for name in names if int(name[1:]) % 3 == 2 and loss[name] >= 2]
    assert found["lr"] == sorted(two, key=loss.__getitem__, reverse=True)
    assert found["tag"] == ["r1", "r11"] and found["done"] == ["r8", "r4"]
    assert found["deleted"] == ["r0"] and found["restored"] == 12
    assert found["wrong"][0] == "INVALID_PARAMETER_VALUE"
    assert "many" in found["experiments"] and found["named"] == ["many"]


@with_client
def test_refusals_and_a_run_that_goes_on(server: Server, tool: Client) -> None:
    assert tool.token is not None
    resumed = client_does(server, tool.token, "resumed")["resumed"]
    refused = client_does(server, tool.token, "run", "refusals")["refusals"]
    assert refused["run"][0] == refused["experiment"][0] == "RESOURCE_DOES_NOT_EXIST"
    assert refused["again"][0] == "RESOURCE_ALREADY_EXISTS"
    assert refused["location"][0] == "INVALID_PARAMETER_VALUE"
    assert refused["model"][1] and refused["by_name"] is None
    assert resumed == {"between": "RUNNING", "after": "FINISHED", "experiment": "Default", "loss": 0.5}


@with_client
def test_a_token_that_is_none(server: Server, ann: Client) -> None:
    code, message = client_does(server, "ms_" + "0" * 16 + "_" + "0" * 64, "denied")["denied"]
    assert code == "UNAUTHENTICATED" and "token" in message


def test_errors_have_the_form_that_its_clients_read(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    cases: list[tuple[str, str, Any, int, str]] = [
        ("GET", f"{MLFLOW}/runs/get?run_id={run}x", None, 404, "RESOURCE_DOES_NOT_EXIST"),
        ("GET", f"{MLFLOW}/runs/get", None, 400, "INVALID_PARAMETER_VALUE"),
        ("GET", f"{MLFLOW}/registered-models/search", None, 404, "ENDPOINT_NOT_FOUND"),
        ("GET", f"{MLFLOW}/runs/create", None, 405, "ENDPOINT_NOT_FOUND"),
        ("GET", f"{MLFLOW}/artifacts/list?run_id=x", None, 501, "NOT_IMPLEMENTED"),
        ("POST", f"{MLFLOW}/runs/log-batch", {"run_id": run, "metrics": 3}, 400, "INVALID_PARAMETER_VALUE"),
        ("POST", f"{MLFLOW}/runs/log-batch", b'{"run_id": ', 400, "INVALID_PARAMETER_VALUE"),
        ("POST", f"{MLFLOW}/runs/log-metric", {"run_id": run, "key": "k", "value": "x"}, 400,
         "INVALID_PARAMETER_VALUE"),
        ("POST", f"{MLFLOW}/runs/set-tag", {"run_id": run, "key": "k" * 251, "value": "x"}, 400,
         "INVALID_PARAMETER_VALUE"),
        ("POST", f"{MLFLOW}/runs/search", {"experiment_ids": ["1"], "filter": "x y"}, 400,
         "INVALID_PARAMETER_VALUE"),
    ]  # fmt: skip
    for method, path, body, status, code in cases:
        answer = tool.ask(method, path, body)
        assert (answer.status, answer.json["error_code"]) == (status, code), (path, answer)
        assert answer.json["message"]
    answer = server.client().ask("GET", f"{MLFLOW}/runs/get?run_id={run}")
    assert answer.status == 401 and answer.json["error_code"] == "UNAUTHENTICATED"


def test_scopes_and_accounts_are_ours(server: Server, ann: Client, tool: Client) -> None:
    run = begin_run(tool)
    ann.ask("POST", "/api/v1/accounts", {"name": "bob", "password": "correct horse battery"})
    bob = server.log_in("bob")
    assert bob.ask("GET", f"{MLFLOW}/runs/get?run_id={run}").status == 404
    assert bob.ask("POST", f"{MLFLOW}/runs/log-metric", {"run_id": run, "key": "k", "value": 1}).status == 404
    reader = server.with_token(ann, "read")
    answer = reader.ask("POST", f"{MLFLOW}/experiments/create", {"name": "x"})
    assert answer.status == 403 and answer.json["error_code"] == "PERMISSION_DENIED"
    writer = server.with_token(ann, "ingest")
    assert writer.ask("POST", f"{MLFLOW}/runs/delete", {"run_id": run}).status == 403
