# SPDX-License-Identifier: Apache-2.0
"""The twenty requests, and live streams, through nginx with server/packaging/nginx.conf.

MEMSCALE_NGINX names the program where it is not in PATH; without one the tests are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ROOT, Client, Server, begin_run, raw
from test_raw_requests import GET, HOST, LENIENT, REFUSED, statuses
from test_streams import Stream, send

NGINX = os.environ.get("MEMSCALE_NGINX") or shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

#: What a proxy may answer for its server: it understands these forms, and passes them on in its own.
PROXIED = {
    "absolute form": {200},
    "HTTP/1.0": {200},
    "a header of 64 KiB": {400, 431},
    "unknown coding": {501},
}
#: Refused for what they say, not for where they end: what follows is a request of its own.
WHOLE = ("a foreign Host", "a hundred headers")


@pytest.fixture
def front(server: Server, tmp_path: Path) -> Iterator[int]:
    """Port of nginx in front of the server; without TLS, which does not change how requests are read."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    site = (ROOT / "server" / "packaging" / "nginx.conf").read_text()
    site = re.sub(r"\n\s*ssl_[^\n]*", "", site).replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    site = site.replace("http://127.0.0.1:8300", f"http://127.0.0.1:{server.port}")
    paths = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {tmp_path}/nginx.pid;\nerror_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{site}}}\n"
    )
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-p", str(tmp_path), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                continue
        assert process.poll() is None, (tmp_path / "error.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(("name", "sent", "right"), REFUSED, ids=[row[0] for row in REFUSED])
def test_all_that_is_refused_is_answered_right(front: int, name: str, sent: bytes, right: set[int]) -> None:
    got = statuses(raw(front, sent + GET + HOST + b"\r\n"))
    expected = PROXIED.get(name, right)
    assert got and got[0] in expected, got
    if got[0] >= 400 and name not in WHOLE:
        assert len(got) == 1, "what followed was taken for a request"


@pytest.mark.parametrize("sent", [row[1] for row in LENIENT], ids=[row[0] for row in LENIENT])
def test_the_rest_is_refused_or_read_in_one_way(front: int, sent: bytes) -> None:
    answer = raw(front, sent + b"GET /api/v1/setup HTTP/1.1\r\n" + HOST + b"\r\n")
    got = statuses(answer)
    assert got in ([400], [200, 200]), answer[:400]
    if got == [200, 200]:
        assert answer.count(b"ok\n") == 1 and answer.count(b'{"needed": ') == 1


def test_streams_come_through_at_once(front: int, tool: Client) -> None:
    run = begin_run(tool)
    stream = Stream(Client(front, token=tool.token), run)
    for number in range(1, 4):
        send(tool, run, number)
        event = stream.next()
        assert event is not None and event[0] == number
    stream.close()
