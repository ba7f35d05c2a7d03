# SPDX-License-Identifier: Apache-2.0
"""Copies of a folder while a server is at work in it, and folders from copies."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from pathlib import Path
from random import Random

import pytest
from server_process import Server, batch, begin_run, binary, serving
from test_durable import Sender, points_of

ROUNDS = 4


def run_copy(*words: str) -> subprocess.CompletedProcess[str]:
    program = binary()
    assert program is not None
    return subprocess.run([str(program), *words], capture_output=True, text=True, check=False)


def backup(folder: Path, file: Path) -> subprocess.CompletedProcess[str]:
    return run_copy("backup", "--data", str(folder), "--to", str(file))


def restore(folder: Path, file: Path) -> subprocess.CompletedProcess[str]:
    return run_copy("restore", "--data", str(folder), "--from", str(file))


def test_copies_under_load_have_what_was_acknowledged(tmp_path: Path) -> None:
    random = Random(7)
    server = Server(tmp_path / "data").start()
    tool = server.with_token(server.set_up(), "admin")
    assert tool.token is not None
    run = begin_run(tool)
    senders = [Sender(tool.token, run, i) for i in range(4)]
    before: list[dict[str, int]] = []
    for number in range(ROUNDS):
        senders = [sender.aim(server.port) for sender in senders]
        wanted = sum(s.acknowledged for s in senders) + random.randrange(20, 80)
        for sender in senders:
            sender.start()
        while sum(s.acknowledged for s in senders) < wanted and any(s.is_alive() for s in senders):
            pass
        before.append({sender.name_: sender.acknowledged for sender in senders})
        done = backup(server.folder, tmp_path / f"copy{number}")
        assert done.returncode == 0, done.stderr
        server.kill()
        for sender in senders:
            sender.join()
        assert not any(sender.wrong for sender in senders)
        server.start()
    server.stop()
    for number, acknowledged in enumerate(before):
        file = tmp_path / f"copy{number}"
        with sqlite3.connect(file) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.close()
        assert file.stat().st_mode & 0o077 == 0
        assert restore(tmp_path / f"again{number}", file).returncode == 0
        with serving(tmp_path / f"again{number}") as copy:
            got = points_of(copy.client(token=tool.token), run)
        for name, batches in acknowledged.items():
            steps = got.get(name, [])
            assert steps == list(range(len(steps))) and len(steps) % 3 == 0, "half a batch"
            assert len(steps) >= 3 * batches, "a point acknowledged before the copy began is not in it"


def test_a_copy_that_was_killed_is_no_copy(server: Server, tmp_path: Path) -> None:
    tool = server.with_token(server.set_up(), "admin")
    run = begin_run(tool)
    steps = list(range(4000))
    for number in range(20):
        body = batch(number, steps, [((s * 2654435761) % 2**32) / 7 for s in steps], f"s{number}")
        assert tool.ask("POST", f"/api/v1/runs/{run}/batches", body).status == 200
    file = tmp_path / "copy"
    program = binary()
    assert program is not None
    words = [str(program), "backup", "--data", str(server.folder), "--to", str(file)]
    for _ in range(5):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        part = tmp_path / "copy.part"
        while not part.exists() and process.poll() is None:
            pass
        process.kill()
        process.wait()
        if file.exists():  # it was faster than the kill
            with sqlite3.connect(file) as db:
                assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            db.close()
            file.unlink()
    assert backup(server.folder, file).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir() if "part" in path.name) == []
    assert restore(tmp_path / "again", file).returncode == 0


def test_what_is_there_stays(server: Server, tmp_path: Path) -> None:
    server.set_up()
    file = tmp_path / "copy"
    file.write_text("mine")
    refused = backup(server.folder, file)
    assert refused.returncode == 3 and "there already" in refused.stderr
    assert file.read_text() == "mine"
    file.unlink()
    assert backup(server.folder, file).returncode == 0
    refused = restore(server.folder, file)
    assert refused.returncode == 3 and "another server" in refused.stderr
    server.stop()
    refused = restore(server.folder, file)
    assert refused.returncode == 3 and "there already" in refused.stderr
    server.start()
    assert server.log_in("ann").ask("GET", "/api/v1/me").status == 200


def test_damage_and_other_files_are_refused(server: Server, tmp_path: Path) -> None:
    server.set_up()
    file = tmp_path / "copy"
    assert backup(server.folder, file).returncode == 0
    damaged = tmp_path / "damaged"
    shutil.copy(file, damaged)
    with damaged.open("r+b") as out:
        out.seek(5 * 4096)
        out.write(b"Z" * 4096)
    other = tmp_path / "other"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE x(y)")
    db.close()
    newer = tmp_path / "newer"
    shutil.copy(file, newer)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    text = tmp_path / "text"
    text.write_text("no database\n" * 500)
    for wrong, says in (
        (damaged, "damaged"),
        (other, "no data of memscale-server"),
        (newer, "form 99"),
        (text, ""),
        (tmp_path / "nothing", "cannot read"),
    ):
        refused = restore(tmp_path / "again", wrong)
        assert refused.returncode == 3 and says in refused.stderr, (wrong, refused)
        assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["lock"]
    assert restore(tmp_path / "again", file).returncode == 0
    assert backup(tmp_path / "no folder", tmp_path / "x").returncode == 3


@pytest.mark.parametrize(
    "words",
    [["backup"], ["backup", "--data", "x"], ["restore", "--data", "x", "--to", "y"], ["copy", "--data", "x"]],
    ids=" ".join,
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    done = run_copy(*words)
    assert done.returncode == 2 and ("usage" in done.stderr or "restore --from" in done.stderr)
