# SPDX-License-Identifier: Apache-2.0
"""Live streams, slow clients, floods of connections, the page, and the routes of the description."""

from __future__ import annotations

import json
import re
import select
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from server_process import ROOT, Client, Server, batch, begin_run, binary, raw, serving


class Stream:
    """Server-sent events of a run."""

    def __init__(self, client: Client, run: str, last: int | None = None, query: str = "") -> None:
        self.socket = socket.create_connection(("127.0.0.1", client.port), timeout=60)
        resumed = f"Last-Event-ID: {last}\r\n" if last is not None else ""
        self.socket.sendall(
            f"GET /api/v1/runs/{run}/live{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {client.token}\r\n{resumed}\r\n".encode()
        )
        self.file = self.socket.makefile("rb")
        assert self.file.readline().split()[1] == b"200"
        while self.file.readline() not in (b"\r\n", b""):
            pass
        self.text = b""
        self.next()  # the comment at the beginning, or a reset

    def chunk(self) -> bytes:
        """One chunk of the body; empty at its end."""
        size = int(self.file.readline() or b"0", 16)
        data = self.file.read(size)
        self.file.readline()
        return data

    def next(self) -> tuple[int, str, object] | None:
        """The next event: id, kind, data. None: a comment. Raises EOFError at the end."""
        while b"\n\n" not in self.text:
            part = self.chunk()
            if not part:
                raise EOFError
            self.text += part
        event, _, self.text = self.text.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in event.decode().split("\n") if not line.startswith(":"))
        return (int(fields["id"]), fields["event"], json.loads(fields["data"])) if fields else None

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def send(tool: Client, run: str, number: int) -> None:
    answer = tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(number, [number], [float(number)]))
    assert answer.status == 200


def test_what_happens_is_heard_once_and_in_order(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    first, second = Stream(tool, run), Stream(tool, run)
    for number in range(1, 6):
        send(tool, run, number)
    for stream in (first, second):
        heard = [stream.next() for _ in range(5)]
        assert [event[0] for event in heard if event] == [1, 2, 3, 4, 5]
        assert heard[2] is not None and heard[2][1] == "batch"
        assert heard[2][2]["series"][0]["last"] == 3  # type: ignore[index]
    send(tool, run, 5)  # a duplicate is no news
    assert tool.ask("POST", f"/api/v1/runs/{run}/finish", {"state": "finished"}).status == 200
    event = first.next()
    assert event is not None and event[:2] == (6, "run")
    first.close()
    for number in range(6, 9):
        send(tool, run, number)
    resumed = Stream(tool, run, last=6)
    assert [(resumed.next() or (0,))[0] for _ in range(3)] == [7, 8, 9]
    resumed.close()
    assert tool.ask("DELETE", f"/api/v1/runs/{run}").status == 204
    assert [(second.next() or (0, ""))[1] for _ in range(5)][-1] == "gone"
    second.close()


def test_a_restart_is_a_reset_where_something_was_missed(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        tool = server.with_token(server.set_up(), "admin")
        run = begin_run(tool)
        send(tool, run, 1)
        send(tool, run, 2)
        server.stop()
        server.start()
        tool = server.client(token=tool.token)
        behind = Stream(tool, run, last=1)
        level = Stream(tool, run, last=2)
        send(tool, run, 3)
        assert (behind.next() or (0,))[0] == 3
        assert (level.next() or (0,))[0] == 3
        behind.close()
        level.close()


def test_the_server_stops_while_it_is_watched(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    streams = [Stream(tool, run) for _ in range(5)]
    server.stop()
    for stream in streams:
        stream.close()


@pytest.mark.long
def test_one_who_does_not_read_costs_a_ring(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    slow = Stream(tool, run)
    body = batch(0, [1], [1.0])
    body["points"] = [{"series": f"{i}" * 100, "steps": [1], "values": [1.0]} for i in range(9)]
    for number in range(600):
        body["sequence"] = number
        assert tool.ask("POST", f"/api/v1/runs/{run}/batches", body).status == 200
    kinds = []
    while not kinds or kinds[-1][0] < 600:
        event = slow.next()
        if event is not None:
            kinds.append(event)
    numbers = [event[0] for event in kinds]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 600
    slow.close()


@pytest.mark.long
def test_slow_requests_are_ended_and_others_served(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--connections", "64", "--threads", "4") as server:
        slow = []
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            slow.append(connection)
        for _ in range(20):
            for connection in slow:
                connection.sendall(b"a")
            assert server.client().ask("GET", "/healthz").status == 200
        # A byte now and then does not keep a connection: all end, at their deadline of 30 seconds.
        left = set(slow)
        while left:
            for connection in list(left):
                try:
                    connection.sendall(b"a")
                except OSError:
                    left.discard(connection)
            ready, _, _ = select.select(list(left), [], [], 1) if left else ([], [], [])
            for connection in ready:
                left.discard(connection)
        for connection in slow:
            connection.close()


def test_more_connections_than_there_may_be(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--connections", "64", "--per-address", "40", "--threads", "2") as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(100)]
        answer = raw(server.port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", wait_s=2)
        assert answer == b"" or b" 200 " in answer
        for connection in held:
            connection.close()
        while True:  # the server notices that they have gone
            try:
                if server.client().ask("GET", "/healthz").status == 200:
                    break
            except OSError:
                continue


def test_exports_are_whole(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    steps = list(range(5000))
    values: list[object] = [step / 7 for step in steps]
    values[100], values[200], values[300] = "NaN", "Infinity", "-Infinity"
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(1, steps, values, 'a,"b')).status == 200
    answer = tool.ask("GET", f"/api/v1/runs/{run}/export?format=csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="{run}.csv"'
    lines = answer.body.decode().split("\r\n")
    assert len(lines) == 5002 and lines[1].startswith('"a,""b","",0,') and lines[101].endswith(",NaN")
    whole = tool.ask("GET", f"/api/v1/runs/{run}/export?format=json").json
    assert [point[2] for point in whole["series"][0]["points"]] == values


def test_head_of_a_stream_is_a_header_alone(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    for path in (f"/api/v1/runs/{run}/live", f"/api/v1/runs/{run}/export?format=csv", f"/api/v1/runs/{run}"):
        answer = tool.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")
    assert tool.ask("OPTIONS", "/healthz").status == 405  # the connection is where it should be
    assert b"sse_clients 0\n" in tool.ask("GET", "/metrics").body


def test_peaks_survive_bucketing(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    steps = list(range(20000))
    values = [1.0] * 20000
    values[12345] = 9e9
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(1, steps, values)).status == 200
    got = tool.ask("GET", f"/api/v1/runs/{run}/points?series=loss&buckets=50").json
    (series,) = got["series"]
    assert sum(series["count"]) == 20000 and got["width"] == 400
    assert series["max"][12345 // 400] == 9e9 and series["min"] == [1] * 50


def test_the_page_is_served_and_nothing_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<!doctype html><title>runs</title>")
    (page / "app.js").write_text("1")
    (tmp_path / "secret").write_text("no")
    with serving(tmp_path / "data", "--page", str(page)) as server:
        nobody = server.client()
        assert nobody.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
        assert nobody.ask("GET", "/setup").body.startswith(b"<!doctype")
        assert nobody.ask("GET", "/runs/anything").status == 200
        assert nobody.ask("GET", "/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
        assert nobody.ask("POST", "/app.js").status == 404
        for path in (
            "/../secret",
            "/%2e%2e/secret",
            "/..%2fsecret",
            "/a/../../secret",
            "//etc/passwd",
            "/nothing.js",
        ):
            answer = nobody.ask("GET", path)
            assert answer.status in (400, 404), path


def test_the_description_has_the_routes_that_there_are() -> None:
    program = binary()
    assert program is not None
    listed = subprocess.run(
        [str(program), "--list-routes"], capture_output=True, text=True, check=True
    ).stdout
    described = yaml.safe_load((ROOT / "server" / "openapi.yaml").read_text())
    paths = {
        f"{method.upper()} {path}"
        for path, item in described["paths"].items()
        for method in item
        if method in ("get", "post", "put", "patch", "delete")
    }
    assert set(listed.splitlines()) == paths
    names = [
        op["operationId"]
        for item in described["paths"].values()
        for op in item.values()
        if isinstance(op, dict)
    ]
    assert len(names) == len(set(names)) and all(re.fullmatch("[a-z_]+", name) for name in names)
