# SPDX-License-Identifier: Apache-2.0
"""memscale-server: points taken per second, pages of many runs, buckets of long series, memory.

    make library && python bench/python/server.py build/gcc/server/memscale-server

Client and server share this machine. Times are those of a client on loopback with a connection that is
open, its own among them. Sizes can be reduced: --runs 1000 --points 100000 --watchers 100.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import Table, median, parser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "server"))

from server_process import Client, Server, begin_run

#: Of issue and documentation: what a row is held against.
BARS = {
    "ingest": "50000 points/s or more",
    "first page": "50 ms or less",
    "buckets": "50 ms or less",
    "watchers": "64 MB or less",
    "disk": "none",
}
ROUNDS = 31


def resident_mb(server: Server) -> float:
    """Resident memory of the server's process, in MB."""
    assert server.process is not None
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmRSS")


def request(client: Client, method: str, path: str, body: bytes = b"") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {client.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def exchange(connection: socket.socket, sent: bytes) -> bytes:
    """Sends a request, reads a whole answer with a Content-Length, which must be 200."""
    connection.sendall(sent)
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(1 << 20)
    head, _, body = got.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(got[:300].decode(errors="replace"))
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    parts = [body]
    left = length - len(body)
    while left > 0:
        part = connection.recv(1 << 20)
        left -= len(part)
        parts.append(part)
    return b"".join(parts)


def batches(run: str, client: Client, number: int, points: int, at_once: int) -> Iterator[bytes]:
    """Requests that hold so many points, as a training run sends them: bytes, milliseconds, a loss."""
    series = ("memory/peak", "time/step", "loss", "memory/reserved", "memory/activations")
    each = at_once // len(series)
    for sequence in range(points // at_once):
        steps = list(range(sequence * each, (sequence + 1) * each))
        columns = {
            "memory/peak": [8 * 2**30 + (step * 7919) % 2**24 for step in steps],
            "time/step": [50 + (step % 13) for step in steps],
            "loss": [1 / (1 + step * 1e-3) for step in steps],
            "memory/reserved": [9 * 2**30 for _ in steps],
            "memory/activations": [(step * 104729) % 2**31 for step in steps],
        }
        times = [1_700_000_000_000 + 50 * step for step in steps]
        body = {
            "client": f"c{number}",
            "sequence": sequence,
            "points": [
                {"series": name, "steps": steps, "times_ms": times, "values": columns[name]}
                for name in series
            ],
        }
        yield request(client, "POST", f"/api/v1/runs/{run}/batches", json.dumps(body).encode())


def ingest(server: Server, tool: Client, points: int, at_once: int, senders: int) -> float:
    """Points per second that are acknowledged, with so many senders at once."""
    work = [list(batches(begin_run(tool), tool, i, points // senders, at_once)) for i in range(senders)]

    def send(requests: list[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            for sent in requests:
                exchange(connection, sent)

    threads = [threading.Thread(target=send, args=(requests,)) for requests in work]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(len(requests) for requests in work) * at_once / (time.perf_counter() - begun)


def timed_ms(server: Server, sent: bytes) -> float:
    """Median of a request's time."""
    times = []
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        exchange(connection, sent)
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            exchange(connection, sent)
            times.append((time.perf_counter() - begun) * 1e3)
    return median(times)


def add_runs(folder: Path, runs: int) -> int:
    """Rows of many runs in a project of their own, written while the server is stopped."""
    with contextlib.closing(sqlite3.connect(folder / "memscale.db")) as db, db:
        (account,) = db.execute("SELECT id FROM account").fetchone()
        project = db.execute(
            "INSERT INTO project(account, name, created_ms) VALUES(?, 'many', 0)", (account,)
        ).lastrowid
        assert project is not None
        db.executemany(
            "INSERT INTO run(uid, project, name, state, archived, created_ms, seen_ms, version)"
            " VALUES(?, ?, ?, ?, 0, ?, ?, 0)",
            (
                (
                    f"bench-{i:08d}",
                    project,
                    f"gpt2 lr={i % 97} seed {i}",
                    i % 3,
                    1_700_000_000_000 + i * 977,
                    i,
                )
                for i in range(runs)
            ),
        )
    return project


def pages(server: Server, tool: Client, runs: int, add: Callable[[str, str, float, str], None]) -> Client:
    points = 0
    for line in tool.ask("GET", "/metrics").body.decode().splitlines():
        if line.startswith("memscale_server_ingest_points_total "):
            points = round(float(line.split()[1]))
    server.stop()
    size = (server.folder / "memscale.db").stat().st_size
    add("disk", f"{points} points", size / points, "B/point")
    project = add_runs(server.folder, runs)
    server.start()
    tool = server.client(token=tool.token)
    for name, query in (
        ("newest", ""),
        ("by name", "?sort=name"),
        ("failed", "?state=failed"),
        ("search, common", "?search=seed"),
        ("search, nothing", "?search=nothing+of+the+kind"),
    ):
        sent = request(tool, "GET", f"/api/v1/projects/{project}/runs{query}")
        add("first page", f"{runs} runs, {name}", timed_ms(server, sent), "ms")
    return tool


def buckets(server: Server, tool: Client, points: int, add: Callable[[str, str, float, str], None]) -> None:
    run = begin_run(tool)
    at_once = 20_000
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for sequence in range(points // at_once):
            steps = list(range(sequence * at_once, (sequence + 1) * at_once))
            body = {
                "client": "c",
                "sequence": sequence,
                "points": [{"series": "peak", "steps": steps, "values": [(s * 7919) % 2**33 for s in steps]}],
            }
            exchange(
                connection, request(tool, "POST", f"/api/v1/runs/{run}/batches", json.dumps(body).encode())
            )
    for query in ("buckets=400", "buckets=1000", f"buckets=400&from={points // 2}&to={points // 2 + 5000}"):
        sent = request(tool, "GET", f"/api/v1/runs/{run}/points?series=peak&{query}")
        add("buckets", f"{points} points, {query}", timed_ms(server, sent), "ms")


def watchers(server: Server, tool: Client, count: int) -> float:
    """Resident memory with so many idle watchers of one run, whose streams have all begun."""
    run = begin_run(tool)
    held = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request(tool, "GET", f"/api/v1/runs/{run}/live"))
        held.append(connection)
    for connection in held:
        while b": here" not in connection.recv(4096):
            pass
    used = resident_mb(server)
    for connection in held:
        connection.close()
    return used


def main() -> None:
    """Runs all of it."""
    made = parser(__doc__)
    made.add_argument("program", type=Path)
    made.add_argument("--runs", type=int, default=100_000)
    made.add_argument("--points", type=int, default=1_000_000)
    made.add_argument("--watchers", type=int, default=1000)
    made.add_argument(
        "--directory", type=Path, help="where the data lies, which should be a disk; default: /tmp"
    )
    options = made.parse_args()
    os.environ["MEMSCALE_SERVER"] = str(options.program.resolve())
    table = Table("server", ("what", "case", "value", "unit", "bar"), options.dry)

    def add(what: str, case: str, value: float, unit: str) -> None:
        table.add(what, case, value, unit, BARS[what])

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        server = Server(Path(folder) / "data").start()
        try:
            tool = server.with_token(server.set_up(), "admin")
            add(
                "watchers",
                f"{options.watchers} idle, at start",
                watchers(server, tool, options.watchers),
                "MB",
            )
            for at_once, senders in ((5000, 1), (5000, 4), (500, 16)):
                rate = ingest(server, tool, options.points // 2, at_once, senders)
                add("ingest", f"{at_once} at once, {senders} senders", rate, "points/s")
            buckets(server, tool, options.points, add)
            tool = pages(server, tool, options.runs, add)
            add(
                "watchers",
                f"{options.watchers} idle, after reads",
                watchers(server, tool, options.watchers),
                "MB",
            )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
