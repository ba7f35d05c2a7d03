# SPDX-License-Identifier: Apache-2.0
"""`memscale serve` and `make serve-demo`: the program is found, and ends with its signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import PATIENCE_S, ROOT, Client, binary

SERVE = [sys.executable, "-m", "memscale", "serve"]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    program = binary()
    assert program is not None
    base = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "MEMSCALE_SERVER": str(program)}
    return {name: value for name, value in (base | more).items() if value}


def refused(environment: dict[str, str], *words: str, status: int = 2) -> str:
    done = subprocess.run([*SERVE, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done
    return done.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serves_from_the_users_state_until_a_signal(tmp_path: Path, ending: signal.Signals) -> None:
    process = subprocess.Popen(
        [*SERVE, "--listen", "127.0.0.1:0"], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = tmp_path / "state" / "memscale" / "server"
    assert process.stdout.readline() == f"data is kept in {folder}\n"
    address = re.search(r"http://127\.0\.0\.1:(\d+)$", process.stdout.readline().rstrip())
    assert address is not None
    assert "/setup#token=" in process.stdout.readline()
    client = Client(int(address[1]))
    assert client.ask("GET", "/healthz").status == 200
    assert b"<!doctype html>" in client.ask("GET", "/").body.lower()  # the page of the checkout
    client.close()
    process.send_signal(ending)
    assert process.wait(PATIENCE_S) == 0
    process.stdout.close()
    assert folder.stat().st_mode & 0o077 == 0 and any(folder.iterdir())


def test_options_of_the_server_come_behind_dashes(tmp_path: Path) -> None:
    said = refused(environment(tmp_path), "--data", str(tmp_path / "d"), "--", "--threads", "x")
    assert "x is not a number that fits: 1 to 256" in said


def test_a_server_that_is_not_there_is_named_with_what_to_install(tmp_path: Path) -> None:
    assert "'/nowhere', which is no program" in refused(environment(tmp_path, MEMSCALE_SERVER="/nowhere"))
    broken = tmp_path / "memscale-server"
    broken.write_text("#!/bin/sh\necho 'libjansson.so.4: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    said = refused(environment(tmp_path, MEMSCALE_SERVER=str(broken)))
    assert "libjansson.so.4: cannot open" in said and "it needs libmicrohttpd, jansson" in said
    file = tmp_path / "file"
    file.touch()
    assert "cannot make the folder" in refused(environment(tmp_path), "--data", str(file / "below"))


def test_a_second_server_on_a_folder_is_refused_by_the_first(tmp_path: Path) -> None:
    words = [*SERVE, "--listen", "127.0.0.1:0"]
    first = subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline(), first.stdout.readline()
    assert "memscale-server" in refused(environment(tmp_path), "--listen", "127.0.0.1:0", status=3)
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    first.stdout.close()


@pytest.mark.long
def test_the_demo_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    program = ROOT / "examples" / "python" / "demo" / "serve.py"
    line = [sys.executable, str(program), "--short", "--listen", "127.0.0.1:0"]
    places = environment(tmp_path, TMPDIR=str(tmp_path))
    with subprocess.Popen(line, env=places, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C ends" not in said:
            read = process.stdout.readline()
            assert read, said
            said += read
        found = re.search(r"http://127\.0\.0\.1:(\d+)  account (\w+), password (\S+)$", said, re.MULTILINE)
        assert found is not None
        client = Client(int(found[1]))
        answer = client.ask("POST", "/api/v1/login", {"name": found[2], "password": found[3]})
        assert answer.status == 200
        client.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert not any(tmp_path.glob("memscale-demo-*"))


@pytest.mark.long
def test_the_demo_trains_three_runs_and_serves_them(tmp_path: Path) -> None:
    program = ROOT / "examples" / "python" / "demo" / "serve.py"
    line = [sys.executable, str(program), "--short", "--once", "--listen", "127.0.0.1:0"]
    done = subprocess.run(line, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^  (.+): finished, (\d+) series, (\d+) points$", done.stdout, re.MULTILINE)
    assert len(rows) == 3 and all(int(points) > 30 for _, _, points in rows)
    assert re.search(r"^http://127\.0\.0\.1:\d+  account demo, password \S+$", done.stdout, re.MULTILINE)
