# SPDX-License-Identifier: Apache-2.0
"""A real server on a free port of loopback, and a plain client for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse battery"
#: Sanitizers make everything slow; nothing here is timed, these only end what hangs.
PATIENCE_S = 60


def binary() -> Path | None:
    """The program: of MEMSCALE_SERVER, or of the build folder of `make test`."""
    named = os.environ.get("MEMSCALE_SERVER")
    path = Path(named) if named else ROOT / "build" / "gcc" / "server" / "memscale-server"
    return path if path.is_file() else None


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Somebody who talks to the server: with a token, a cookie, or as nobody."""

    port: int
    token: str | None = None
    cookie: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    _connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection that is kept; opened again where the server has closed it."""
        sent = {"Host": f"127.0.0.1:{self.port}", **self.headers}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        if self.cookie is not None:
            sent["Cookie"] = self.cookie
            sent["Origin"] = f"http://127.0.0.1:{self.port}"
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        sent.update({name.replace("_", "-"): value for name, value in headers.items()})
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            self._connection.request(method, path, data, sent)
            response = self._connection.getresponse()
            answer = Answer(
                response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
            )
        except OSError:
            self.close()
            raise
        if response.will_close:
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def new_id() -> str:
    """An id for a run, as a client chooses it."""
    return "run-" + secrets.token_hex(12)


class Server:
    """The program in a folder. `kill` is what a power cut is to it; `start` begins again in it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.process: subprocess.Popen[str] | None = None
        self.port = 0
        self.setup_token: str | None = None

    def start(self) -> Server:
        program = binary()
        assert program is not None
        words = [str(program), "--data", str(self.folder), "--listen", "127.0.0.1:0", *self.options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self._line()
        found = re.search(r"http://127\.0\.0\.1:(\d+)$", line)
        assert found, (line, self.process.stderr.read() if self.process.stderr else "")
        self.port = int(found.group(1))
        self.setup_token = None
        if self.client().ask("GET", "/api/v1/setup").json["needed"]:
            self.setup_token = self._line().rpartition("#token=")[2]
        return self

    def _line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def client(self, **fields: Any) -> Client:
        return Client(self.port, **fields)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        """SIGTERM; it must end by itself, with status 0 and without a word."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        said, status = self._reap()
        assert (status, said) == (0, ""), said[-4000:]

    def _reap(self) -> tuple[str, int]:
        assert (
            self.process is not None and self.process.stderr is not None and self.process.stdout is not None
        )
        said = self.process.stderr.read()
        status = self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        self.process.stderr.close()
        self.process = None
        return said, status

    # ---- accounts

    def set_up(self) -> Client:
        """Makes the first account, "ann"; returns her with a session."""
        made = self.client().ask(
            "POST", "/api/v1/setup", {"token": self.setup_token, "name": "ann", "password": PASSWORD}
        )
        assert made.status == 201, made
        return self.client(cookie=cookie_of(made))

    def join(self, owner: Client, name: str, role: str = "member", team: int = 1) -> Client:
        """A new account that comes in by an invitation; with its session."""
        made = owner.ask("POST", f"/api/v1/teams/{team}/invitations", {"role": role})
        assert made.status == 201, made
        body = {"token": made.json["token"], "name": name, "password": PASSWORD}
        joined = self.client().ask("POST", "/api/v1/invitations/accept", body)
        assert joined.status == 201, joined
        return self.client(cookie=cookie_of(joined))

    def log_in(self, name: str) -> Client:
        answer = self.client().ask("POST", "/api/v1/login", {"name": name, "password": PASSWORD})
        assert answer.status == 200, answer
        return self.client(cookie=cookie_of(answer))

    def with_token(self, of: Client, *scopes: str, **bound: int) -> Client:
        made = of.ask("POST", "/api/v1/tokens", {"name": "test", "scopes": list(scopes), **bound})
        assert made.status == 201, made
        return self.client(token=made.json["token"])


def cookie_of(answer: Answer) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """A server that is stopped at the end, if the test has not done so."""
    server = Server(folder, *options).start()
    try:
        yield server
    except BaseException:
        if server.process is not None:
            server.kill()
        raise
    if server.process is not None:
        server.stop()


def begin_run(client: Client, project: str = "p", name: str | None = None) -> str:
    run = new_id()
    answer = client.ask("POST", "/api/v1/runs", {"id": run, "project": project, "name": name or run})
    assert answer.status == 201, answer
    return run


def batch(
    sequence: int, steps: list[int], values: list[Any], series: str = "loss", client: str = "c"
) -> dict[str, Any]:
    return {
        "client": client,
        "sequence": sequence,
        "points": [{"series": series, "steps": steps, "values": values}],
    }


def raw(port: int, request: bytes, wait_s: float = PATIENCE_S) -> bytes:
    """Sends bytes and reads until the server closes or is silent for a moment after its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
        with suppress(OSError):  # it may be refused while it is sent
            connection.sendall(request)
        return read_until_quiet(connection, wait_s)


def read_until_quiet(connection: socket.socket, wait_s: float) -> bytes:
    got = b""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        patience = 0.3 if got else end - time.monotonic()
        ready, _, _ = select.select([connection], [], [], patience)
        if not ready:
            break
        try:
            part = connection.recv(65536)
        except OSError:
            break
        if not part:
            break
        got += part
    return got
