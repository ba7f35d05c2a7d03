# SPDX-License-Identifier: Apache-2.0
"""A stand-in for memscale-server on the loopback: takes runs and batches, strictly, and fails as asked."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "ms_0123456789abcdef_" + "0a" * 32
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,128}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_CLIENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"/api/v1/runs/([A-Za-z0-9_-]{8,64})/(batches|heartbeat|finish)")
_MOST_BYTES = 1 << 20


@dataclass
class Kept:
    """What a server has of one run."""

    about: dict[str, Any]
    batches: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    duplicates: int = 0
    state: str = "running"
    heartbeats: int = 0

    def points(self, series: str) -> list[tuple[int, Any]]:
        """(step, value) of a series, in the order of clients and batches."""
        found: list[tuple[int, Any]] = []
        for _, batch in sorted(self.batches.items()):
            for points in batch.get("points", []):
                if points["series"] == series:
                    found += zip(points["steps"], points["values"], strict=True)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for _, batch in sorted(self.batches.items()) for event in batch.get("events", [])]

    @property
    def documents(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _, batch in sorted(self.batches.items()):
            found |= batch.get("documents", {})
        return found


@dataclass
class Store:
    """What outlives a server: a second one may have it, as after a restart."""

    runs: dict[str, Kept] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def run(self) -> Kept:
        (only,) = self.runs.values()
        return only


Fault = Callable[["Handler"], bool]
"""Does something in place of an answer; False: answer as usual."""


class StandIn(ThreadingHTTPServer):
    """The server. `fault` is asked before each request; `count` says how many there were."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, store: Store, fault: Fault | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.store, self.fault = store, fault
        self.count = 0
        self.ends = threading.Event()
        self.asked = threading.Condition()
        self.connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def await_requests(self, count: int) -> None:
        """Waits until there were so many."""
        with self.asked:
            assert self.asked.wait_for(lambda: self.count >= count, timeout=60)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go are no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn
    body = b""

    def log_message(self, *unused: Any) -> None:
        """Says nothing."""

    def do_POST(self) -> None:
        self.handle_one()

    def do_GET(self) -> None:
        self.handle_one()

    def handle_one(self) -> None:
        with self.server.asked:
            self.server.count += 1
            self.server.asked.notify_all()
        length = int(self.headers.get("Content-Length", "0"))
        self.body = body = self.rfile.read(length)
        if self.server.fault is not None and self.server.fault(self):
            return
        with self.server.store.lock:
            status, answer = self.answer_for(body)
        self.answer(status, answer)

    def answer(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        text = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def answer_for(self, body: bytes) -> tuple[int, Any]:
        store = self.server.store
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return error(401, "unauthenticated", "who are you?")
        if self.command == "GET" and self.path == "/api/v1/me":
            return 200, {"account": {"name": "ada"}, "via": "token", "scopes": ["ingest"]}
        data = json.loads(body, parse_constant=refuse) if body else {}
        if len(body) > _MOST_BYTES:
            return self.problem("a body of more than 1 MiB")
        if self.path == "/api/v1/runs":
            if set(data) - {"id", "project", "name", "created_ms"} or not _NAME.fullmatch(data["project"]):
                return self.problem(f"a run {data}")
            fresh = data["id"] not in store.runs
            store.runs.setdefault(data["id"], Kept(data))
            return (201 if fresh else 200), {"id": data["id"]}
        match = _RUN.fullmatch(self.path)
        if match is None or match[1] not in store.runs:
            return error(404, "not_found", "no such run")
        run = store.runs[match[1]]
        if match[2] == "finish":
            run.state = data["state"]
            return 200, {"id": match[1]}
        if match[2] == "heartbeat":
            run.heartbeats += 1
            return 204, None
        found = batch_problem(data)
        if found:
            return self.problem(found)
        key = (data["client"], data["sequence"])
        if key in run.batches:
            run.duplicates += 1
            return 200, {"duplicate": True, "version": len(run.batches)}
        run.batches[key] = data
        return 200, {"duplicate": False, "version": len(run.batches)}

    def problem(self, text: str) -> tuple[int, Any]:
        self.server.store.problems.append(text)
        return error(400, "invalid", text)


def refuse(word: str) -> Any:
    raise ValueError(word)


def error(status: int, code: str, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": code, "message": message}}


def batch_problem(data: dict[str, Any]) -> str:
    """What is wrong with a batch, by the contract; ""."""
    if set(data) - {"client", "sequence", "points", "events", "documents"} or not _CLIENT.fullmatch(
        data["client"]
    ):
        return f"keys {sorted(data)}"
    points, events, documents = data.get("points", []), data.get("events", []), data.get("documents", {})
    if len(points) > 1024 or len(events) > 1024 or len(documents) > 32:
        return "too many"
    for item in points:
        if set(item) - {"series", "unit", "steps", "times_ms", "values"} or not _NAME.fullmatch(
            item["series"]
        ):
            return f"points {item}"
        lengths = {len(item[name]) for name in ("steps", "times_ms", "values")}
        numbers = [value for value in item["values"] if not isinstance(value, (int, float))]
        if len(lengths) != 1 or {*numbers} - {"NaN", "Infinity", "-Infinity"} or len(item["unit"]) > 16:
            return f"points {item}"
    for item in events:
        if set(item) - {"kind", "step", "time_ms", "text", "data"} or not _KIND.fullmatch(item["kind"]):
            return f"event {item}"
        if len(item.get("text", "")) > 4096 or not isinstance(item.get("data", {}), dict):
            return f"event {item}"
    return "" if all(_KIND.fullmatch(name) for name in documents) else f"documents {sorted(documents)}"


@contextlib.contextmanager
def serving(
    store: Store, fault: Fault | None = None, port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[StandIn]:
    """A server for the time of a block; at its end every connection is cut, as by a kill."""
    server = StandIn(store, fault, port)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        server.server_close()
        for connection in server.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


# ---- what can go wrong ---------------------------------------------------------------------------------


def silent(handler: Handler) -> bool:
    """Accepts, and never answers."""
    handler.server.ends.wait()
    return True


def broken(handler: Handler) -> bool:
    """500, always."""
    handler.answer(*error(500, "failed", "it is broken"))
    return True


def slow_drip(handler: Handler) -> bool:
    """A byte now and then, without an end."""
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not handler.server.ends.wait(0.05):
            handler.wfile.write(b"a")
            handler.wfile.flush()
    return True


def cut_before_the_answer(handler: Handler) -> bool:
    """Keeps what it is given, and ends the connection before it says so."""
    with handler.server.store.lock:
        handler.answer_for(handler.body)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True
