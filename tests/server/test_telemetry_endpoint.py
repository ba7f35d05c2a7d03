# SPDX-License-Identifier: Apache-2.0
"""Telemetry at the real server: each value that the client may send is counted, and no more is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import Client, Server, serving
from torch import nn

import memscale
from memscale.telemetry import sending
from memscale.telemetry.payload import FIELDS, Said, payload

PATH = "/api/v1/telemetry"


@pytest.fixture
def taking(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data", "--telemetry", "7") as started:
        yield started


def counted(server: Server, who: Client) -> dict[str, Any]:
    answer = who.ask("GET", PATH)
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json["fields"] | {"messages": answer.json["messages"]}
    return found


def test_it_is_off_unless_the_server_was_started_with_it(server: Server, ann: Client) -> None:
    for answer in (server.client().ask("POST", PATH, payload(Said())), ann.ask("GET", PATH)):
        assert answer.status == 404 and "--telemetry DAYS" in answer.json["error"]["allowed"]


def test_every_value_of_the_clients_table_is_counted_as_itself(taking: Server) -> None:
    admin = taking.set_up()
    said = json.loads(payload(Said()))
    sent = 0
    for field in FIELDS:
        values = [[value] for value in field.values] if field.is_list else list(field.values)
        for value in values:
            answer = taking.client().ask("POST", PATH, {**said, field.name: value})
            assert answer.status == 204, (field.name, value, answer)
            sent += 1
    found = counted(taking, admin)
    assert found["messages"] == sent
    for field in FIELDS[1:]:
        names = {json.dumps(value).strip('"') for value in field.values}
        assert names <= set(found[field.name]), field.name


def test_what_the_client_sends_arrives(taking: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = taking.set_up()
    for name in ("DO_NOT_TRACK", "CI"):
        monkeypatch.delenv(name, raising=False)
    sending.SENT.clear()  # another test of this process may have sent today's
    monkeypatch.setenv("MEMSCALE_TELEMETRY", "1")
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", f"http://127.0.0.1:{taking.port}")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = memscale.Config(memory_budget="1GiB", enable_logging=False)
    memscale.wrap(model, config, optimizer=optimizer)
    model(torch.randn(2, 8)).sum().backward()
    memscale.detach(model)
    for thread in threading.enumerate():
        if thread.name == "memscale-telemetry":
            thread.join(60)
    found = counted(taking, admin)
    assert found["messages"] == 1
    assert found["device"] == {"cpu": 1} and found["parameters"] == {"<1M": 1}


def test_strangers_read_nothing_and_unknown_keys_are_refused(taking: Server) -> None:
    admin = taking.set_up()
    admin.ask("POST", "/api/v1/accounts", {"name": "bob", "password": "correct horse battery"})
    assert taking.client().ask("GET", PATH).status == 401
    assert taking.log_in("bob").ask("GET", PATH).status == 403
    said = json.loads(payload(Said()))
    answer = taking.client().ask("POST", PATH, {**said, "user": "ann"})
    assert answer.status == 400 and answer.json["error"]["value"] == "user"
    assert taking.client().ask("POST", PATH, b'{"schema": 2' + b" " * 4096 + b"}").status == 413
    assert counted(taking, admin)["messages"] == 0
    taking.stop()
    kept = b"".join(path.read_bytes() for path in taking.folder.iterdir())
    assert b"127.0.0.1" not in kept


def test_counts_outlive_the_server(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--telemetry", "7") as first:
        first.set_up()
        assert first.client().ask("POST", PATH, payload(Said())).status == 204
        first.kill()
    with serving(tmp_path / "data", "--telemetry", "7") as second:
        assert counted(second, second.log_in("ann"))["messages"] == 1
