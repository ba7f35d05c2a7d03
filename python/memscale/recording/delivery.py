# SPDX-License-Identifier: Apache-2.0
"""Sends what a run's spools hold: each batch once, in order, under the number that it has in the spool.

    spool ──► batch complete? ──► POST …/batches (client, sequence) ──► on the server's disk ──► cursor
                                     │ the same again, from any sender: the server says "duplicate"
                                     └ not now: `wait` seconds; refused for good: counted, and passed over

The cursor saves work only. Without it all is sent again, and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from memscale import _core
from memscale.recording.run_folder import Cursor, RunFolder, RunInfo
from memscale.recording.server import Answer, Backoff, Server, UnreachableError

__all__ = ["Delivery", "Sent"]

_STATES: Final = {1: "finished", 2: "failed"}
_BATCH_SECONDS: Final = 60.0
_NOT_FOUND: Final = 404
_DENIED: Final = (401, 403)


@dataclass
class Sent:
    """What has become of a run's batches.

    Attributes:
        batches: that the server has taken, those that it had already among them.
        duplicates: that it had.
        refused: that it will never take.
        values: numbers in those that were sent.
        problem: why not all of it is there, in a line; "".
        is_stopped: it will not go better later: the run's id is somebody else's, or the token is not good.
    """

    batches: int = 0
    duplicates: int = 0
    refused: int = 0
    values: int = 0
    problem: str = ""
    is_stopped: bool = False


@dataclass
class _Place:
    """Where one is in a client's spool: the cursor, and where in the file that is, while it is the same."""

    cursor: Cursor
    offset: int = 0
    level: int = -1
    end_state: int = 0
    is_done: bool = False


@dataclass
class Delivery:
    """Brings the spools of one run to a server.

    Args:
        folder: of the run; its right to send is held by the caller.
        server: where to.
        own: clients of this process, which live until they are taken out.

    Attributes:
        sent: what has been done.
        wait: seconds until it makes sense to go on; 0 after a success.
    """

    folder: RunFolder
    server: Server
    own: set[str] = field(default_factory=set)
    sent: Sent = field(default_factory=Sent)
    wait: float = 0.0

    def __post_init__(self) -> None:
        self._info: RunInfo = self.folder.info()
        self._backoff = Backoff()
        self._is_begun = False
        self._missing = 0
        self._places: dict[str, _Place] = {}
        self._told = ""  # the state that the server has of the run, from us

    def advance(self) -> bool:
        """Sends the next batch that is complete, or that the run has ended.

        Returns:
            Whether there may be more to do at once. False: all there is was sent, or `wait` says for how long
            nothing is to be had.
        """
        self.wait = 0.0
        if self.sent.is_stopped:
            return False
        clients = self.folder.clients()
        for client in clients:
            place = self._place(client)
            if not place.is_done and self._step(client, place):
                return not self.wait
            if self.wait or self.sent.is_stopped:
                return False
        return self._finish(clients)

    def heartbeat(self) -> None:
        """Tells the server that the run lives. A heartbeat that does not arrive is followed by the next."""
        if self._is_begun and not self.sent.is_stopped:
            self._ask("POST", f"/api/v1/runs/{self._info.id}/heartbeat")

    def clean_up(self) -> None:
        """Removes a run that was for this server and is there, with its end if it has one."""
        clients = self.folder.clients()
        if self._info.url != self.server.url or self.sent.refused or not self._is_all_sent(clients):
            return
        if self._end_of(clients) in ("", self._told):
            self.folder.remove()

    # ---- batches ---------------------------------------------------------------------------------

    def _place(self, client: str) -> _Place:
        if client not in self._places:
            self._places[client] = _Place(self.folder.cursor(client, self.server.url))
        return self._places[client]

    def _step(self, client: str, place: _Place) -> bool:
        """One batch, or one file further. False: nothing is complete, or nothing is left."""
        lives = client in self.own or self.folder.is_live(client)
        numbers = [number for number in self.folder.segments(client) if number >= place.cursor.segment]
        if not numbers:
            place.is_done = not lives
            return False
        number = numbers[0]
        if number != place.cursor.segment:
            place.cursor, place.offset = Cursor(number, place.cursor.sequence), 0
        is_last = len(numbers) == 1
        spool, batch = self._next_batch(client, place)
        if batch is None:
            if is_last:
                place.is_done = not lives
                return False
            self._leave(client, place, Cursor(number + 1, place.cursor.sequence))
            return True
        if is_last and lives and not batch["is_complete"]:
            return False
        return self._deliver(client, place, spool, batch)

    def _next_batch(self, client: str, place: _Place) -> tuple[_core.Spool | None, dict[str, Any] | None]:
        """The first batch of a file that was not sent. A file that was thinned is read from its beginning."""
        path = self.folder.segment(client, place.cursor.segment)
        try:
            if path.stat().st_size == 0:  # begun, and not written to yet
                return None, None
            spool = _core.Spool(path, place.offset)
            if spool.level() != place.level and place.offset:
                spool = _core.Spool(path)
        except (OSError, ValueError) as error:
            self.sent.problem = f"{path.name} cannot be read: {error}"
            return None, None
        place.level = spool.level()
        batch = spool.next()
        while batch is not None and batch["sequence"] < place.cursor.sequence:
            place.end_state = batch["end_state"] or place.end_state
            batch = spool.next()
        return spool, batch

    def _deliver(self, client: str, place: _Place, spool: _core.Spool | None, batch: dict[str, Any]) -> bool:
        after = place.cursor
        if batch["values"] or batch["events"] or batch["documents"]:
            assert spool is not None
            after = Cursor(place.cursor.segment, batch["sequence"] + 1)
            if not self._begin() or not self._send(spool.body(client), batch["values"]):
                return True
        place.end_state = batch["end_state"] or place.end_state
        place.offset = batch["end"]
        if after != place.cursor:
            place.cursor = after
            self._note(client, after)
        return True

    def _send(self, body: bytes, values: int) -> bool:
        """Posts a batch. False: not now, and `wait` is set, or not at all."""
        answer = self._ask("POST", f"/api/v1/runs/{self._info.id}/batches", body, _BATCH_SECONDS)
        if answer is None:
            return False
        if answer.is_ok:
            found = answer.body if isinstance(answer.body, dict) else {}
            self.sent.batches += 1
            self.sent.values += values
            self.sent.duplicates += found.get("duplicate") is True
            self._missing = 0
            return True
        if answer.status == _NOT_FOUND and self._missing == 0:  # deleted there, or another data folder
            self._missing, self._is_begun, self.wait = 1, False, self._backoff.bad()
            return False
        if answer.status == _NOT_FOUND:
            self._stop(f"the server has no such run: {answer.words}")
            return False
        self.sent.refused += 1
        self.sent.problem = f"a batch was refused: {answer.words}"
        return True

    def _leave(self, client: str, place: _Place, cursor: Cursor) -> None:
        """Goes on to the next file. One that was for the server alone is removed."""
        self._note(client, cursor)
        if self._info.url == self.server.url:
            with contextlib.suppress(OSError):
                os.unlink(self.folder.segment(client, place.cursor.segment))
        place.cursor, place.offset, place.level = cursor, 0, -1

    def _note(self, client: str, cursor: Cursor) -> None:
        with contextlib.suppress(OSError):  # a full disk: it is sent again, and known there
            self.folder.note_sent(client, self.server.url, cursor)

    # ---- the run ---------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Has the server know the run."""
        if self._is_begun:
            return True
        about = {name: getattr(self._info, name) for name in ("id", "project", "name", "created_ms")}
        answer = self._ask("POST", "/api/v1/runs", json.dumps(about).encode())
        if answer is None:
            return False
        if not answer.is_ok:
            self._stop(f"the server does not take the run: {answer.words}")
            return False
        self._is_begun = True
        return True

    def _finish(self, clients: Collection[str]) -> bool:
        """Tells the server that the run has ended, as its latest process has said. False: no more to do."""
        state = self._end_of(clients) if self._is_all_sent(clients) else ""
        if state in ("", self._told) or not self._begin():
            return False
        body = json.dumps({"state": state}).encode()
        answer = self._ask("POST", f"/api/v1/runs/{self._info.id}/finish", body)
        if answer is None:
            return False
        self._told = state
        if not answer.is_ok:
            self.sent.problem = f"the end of the run was refused: {answer.words}"
        return False

    def _is_all_sent(self, clients: Collection[str]) -> bool:
        """Whether all spools were sent, and nobody writes them any more."""
        places = [self._places.get(client) for client in clients]
        return all(place is not None and place.is_done for place in places)

    def _end_of(self, clients: Collection[str]) -> str:
        """What the latest process has said of the run's end; "": nothing."""
        place = self._places.get([*clients][-1]) if clients else None
        return "" if place is None else _STATES.get(place.end_state, "")

    def _ask(self, method: str, path: str, body: bytes | None = None, seconds: float = 15.0) -> Answer | None:
        """An answer that says yes or no; None: not now, and `wait` says how long."""
        try:
            answer = self.server.request(method, path, body, seconds)
        except UnreachableError as error:
            self.sent.problem, self.wait = str(error), self._backoff.bad()
            return None
        if answer.status in _DENIED:
            self._stop(
                f"the server does not let this token in ({answer.words}): memscale login {self.server.url}"
            )
            return None
        if answer.is_for_later:
            self.sent.problem, self.wait = f"the server says {answer.words}", self._backoff.bad(answer.wait)
            return None
        self._backoff.good()
        self.sent.problem = ""
        return answer

    def _stop(self, problem: str) -> None:
        self.sent.problem, self.sent.is_stopped = problem, True
