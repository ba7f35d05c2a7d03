# SPDX-License-Identifier: Apache-2.0
"""Brings runs of other programs to a server or into a folder, each once.

A server is asked how many points it has of each series, and gets those that come after them: so what was cut
off goes on where it was, and a run that has grown gets the rest. One import at a time: a lock of the user's.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from memscale import _core
from memscale.recording.foreign import ForeignRun, Point, SourceError
from memscale.recording.places import name_of, spool_folder
from memscale.recording.run_folder import RunFolder, RunInfo
from memscale.recording.server import Answer, Backoff, Server, UnreachableError

__all__ = ["Imported", "import_into", "import_to", "importing_alone"]

_MOST_POINTS: Final = 5000
"""Of a batch: some 300 KiB of the 1 MiB that it may have."""

_PATIENCE_SECONDS: Final = 30.0
_FLUSH_SECONDS: Final = 60.0
_CAP_BYTES: Final = 1 << 40


@dataclass(frozen=True)
class Imported:
    """What has become of one run.

    Attributes:
        id: of it here.
        project: it belongs to.
        name: of it.
        points: that were brought now.
        was_there: all of it was there before.
        problem: why not all of it is there; "": it is.
    """

    id: str
    project: str
    name: str
    points: int = 0
    was_there: bool = False
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"id": self.id, "project": self.project, "name": self.name, "points": self.points,
                "was_there": self.was_there, "problem": self.problem}  # fmt: skip


@contextmanager
def importing_alone() -> Iterator[None]:
    """A block in which no other import of this user runs. Waits for one that does."""
    folder = spool_folder().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "import.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---- to a server ---------------------------------------------------------------------------------


class _RefusedError(Exception):
    """The server does not take something; the message is its own."""


class _Bringer:
    """Brings one run to a server."""

    def __init__(self, run: ForeignRun, server: Server) -> None:
        self._run, self._server = run, server
        self._client, self._sequence = f"import-{secrets.token_hex(8)}", 0
        self.points = 0
        self.has_changed = False

    def bring(self) -> None:
        run = self._run
        begun = self._ask("POST", "/api/v1/runs", {
            "id": run.id, "project": name_of(run.project) or "imported", "name": name_of(run.name) or run.id,
            "created_ms": max(run.created_ms, 0),
        })  # fmt: skip
        listed = self._ask("GET", f"/api/v1/runs/{run.id}/series").body
        if not isinstance(listed, dict):
            raise _RefusedError("its list of series cannot be read")
        counts = {str(row["name"]): int(row["count"]) for row in listed["series"]}
        for name, points in run.series():
            self._bring_series(name_of(name) or "unnamed", points, counts)
        self._bring_rest()
        state = begun.body.get("state") if isinstance(begun.body, dict) else None
        if run.state and state in ("running", "lost"):
            ended = {} if run.ended_ms is None else {"ended_ms": max(run.ended_ms, 0)}
            self._ask("POST", f"/api/v1/runs/{run.id}/finish", {"state": run.state, **ended})
            self.has_changed = True

    def _bring_series(self, name: str, points: Iterator[Point], counts: dict[str, int]) -> None:
        rest = itertools.islice(points, counts.get(name, 0), None)
        while some := list(itertools.islice(rest, _MOST_POINTS)):
            steps, times, values = zip(*some, strict=True)
            series = {"series": name, "steps": steps, "times_ms": times, "values": [*map(_shown, values)]}
            self._sequence += 1
            self._send({"client": self._client, "sequence": self._sequence, "points": [series]})
            self.points += len(some)

    def _bring_rest(self) -> None:
        """Documents and events. What they are says which batch it is: what is there already counts once."""
        batches: list[dict[str, Any]] = [
            {"documents": {name: value}} for name, value in self._run.documents.items()
        ]
        numbered = ({"events": [event]} for event in self._run.events)
        for place, batch in enumerate(itertools.chain(batches, numbered)):
            text = json.dumps([place, batch], sort_keys=True).encode()
            number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
            self._send({"client": "import", "sequence": number, **batch})

    def _send(self, batch: dict[str, Any]) -> None:
        answer = self._ask("POST", f"/api/v1/runs/{self._run.id}/batches", batch)
        self.has_changed |= not (isinstance(answer.body, dict) and answer.body.get("duplicate"))

    def _ask(self, method: str, path: str, body: Any = None) -> Answer:
        """One request, again and again while the server says later, up to a time."""
        backoff, waited = Backoff(), 0.0
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        while True:
            answer = self._server.request(method, path, data)
            if answer.is_ok:
                return answer
            wait = backoff.bad(answer.wait)
            if not answer.is_for_later or waited + wait > _PATIENCE_SECONDS:
                raise _RefusedError(f"{answer.words} ({path})")
            waited += wait
            time.sleep(wait)


def _shown(value: float) -> float | str:
    if value != value:
        return "NaN"
    return value if abs(value) != float("inf") else "Infinity" if value > 0 else "-Infinity"


def import_to(run: ForeignRun, server: Server) -> Imported:
    """Brings a run to a server.

    Args:
        run: of a source.
        server: with a token that has the scopes ingest and read.
    """
    found = Imported(run.id, run.project, run.name)
    bringer = _Bringer(run, server)
    try:
        bringer.bring()
    except (_RefusedError, UnreachableError, SourceError, OSError, sqlite3.Error) as error:
        return replace(found, points=bringer.points, problem=str(error))
    return replace(found, points=bringer.points, was_there=not bringer.has_changed)


# ---- into a folder -------------------------------------------------------------------------------


def import_into(run: ForeignRun, root: Path) -> Imported:
    """Writes a run into a folder of runs, whole or not at all. One that is there stays as it is.

    Args:
        run: of a source.
        root: the folder.
    """
    found = Imported(run.id, run.project, run.name)
    place, fresh = root / run.id, root / f".importing-{run.id}"
    if (place / "run.json").is_file():
        return replace(found, was_there=True)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        folder = RunFolder(fresh)
        folder.begin(RunInfo(run.id, name_of(run.project) or "imported", name_of(run.name) or run.id,
                             max(run.created_ms, 0)))  # fmt: skip
        points = _write(run, folder)
        os.replace(fresh, place)
    except (SourceError, OSError, ValueError, sqlite3.Error) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        return replace(found, problem=str(error))
    return replace(found, points=points)


def _write(run: ForeignRun, folder: RunFolder) -> int:
    recorder = _core.Recorder(folder.path, "1-import", cap_bytes=_CAP_BYTES)
    count = 0
    try:
        for name, document in run.documents.items():
            _take(
                recorder, lambda name=name, document=document: recorder.document(name, json.dumps(document))
            )
        for event in run.events:
            _take(recorder, lambda event=event: recorder.event(json.dumps(event)))
        for name, points in run.series():
            for step, time_ms, value in points:
                _take(recorder, lambda *row: recorder.row(*row), step, time_ms, {name_of(name): value})
                count += 1
        if run.state:
            _take(recorder, lambda: recorder.end(run.state))
        if not recorder.flush(_FLUSH_SECONDS):
            raise OSError("the disk does not take it")
    finally:
        recorder.close()
    return count


def _take(recorder: _core.Recorder, record: Any, *values: Any) -> None:
    """Records, and waits where there is no room: here nothing is dropped."""
    if not record(*values) and not (recorder.flush(_FLUSH_SECONDS) and record(*values)):
        raise OSError("the disk does not take it")
