# SPDX-License-Identifier: Apache-2.0
"""The thread that sends a run to its server while it runs.

It reads the spool and nothing else: it holds no lock that training needs, and texts are made and bytes are
moved without the interpreter's lock. What it cannot send stays in the spool.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from memscale import log
from memscale.recording.delivery import Delivery, Sent
from memscale.recording.run_folder import RunFolder
from memscale.recording.server import Server

__all__ = ["Sender"]

_LOOK_SECONDS: Final = 0.5
_HEARTBEAT_SECONDS: Final = 15.0
_GIVE_UP_SECONDS: Final = 0.2


class Sender:
    """Sends one run until it is closed.

    Args:
        folder: of the run.
        client: this process.
        url: of the server.
        token: for it.

    Attributes:
        sent: what it has done.
    """

    def __init__(self, folder: RunFolder, client: str, url: str, token: str) -> None:
        self.sent = Sent()
        self._folder, self._client = folder, client
        self._server = Server(url, token)
        self._wake = threading.Event()
        self._deadline: float | None = None  # set: the spool is closed, and this is until when to send
        self._has_warned = False
        self._lock_file = folder.lock_sender()
        self._thread = threading.Thread(target=self._run, name="memscale sender", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """The spool is complete: sends what is left, so long at most, and ends the thread."""
        self._deadline = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._server.abort()
            self._thread.join(_GIVE_UP_SECONDS)
        self._unlock()

    def forget(self) -> None:
        """In a child of a fork, which has no such thread: lets go of the parent's files."""
        self._unlock()
        self._server.forget()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._lock_file is None:
                self._say("another process sends this run: what this one records stays in the spool")
                return
            self._send(Delivery(self._folder, self._server, {self._client}, self.sent))
        except Exception as error:  # it must not come to the program's attention in any other form
            self._say(f"{type(error).__name__}: {error}")
        finally:
            self._server.close()

    def _send(self, delivery: Delivery) -> None:
        quiet_since, next_try = time.monotonic(), 0.0
        while True:
            closes = self._deadline is not None
            if closes:
                delivery.own.clear()  # its last batch is complete as it is
            now = time.monotonic()
            if closes or now >= next_try:
                sent = self.sent.batches
                while delivery.advance() and not self._is_late():
                    pass
                if self.sent.batches > sent:
                    quiet_since = time.monotonic()
                next_try = time.monotonic() + delivery.wait
                if self.sent.problem:
                    self._say(self.sent.problem)
            if closes or self.sent.is_stopped:
                break
            if now - quiet_since >= _HEARTBEAT_SECONDS and not delivery.wait:
                delivery.heartbeat()
                quiet_since = now
            self._wake.wait(_LOOK_SECONDS)
        if closes:
            delivery.clean_up()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _say(self, problem: str) -> None:
        """A warning, once; after that there are counters."""
        if not self._has_warned:
            self._has_warned = True
            log.LOGGER.warning(
                "recording: %s is not reached (%s): training goes on, and what is recorded waits in %s; "
                "memscale sync sends it",
                self._server.url,
                problem,
                self._folder.path,
            )

    def _unlock(self) -> None:
        descriptor, self._lock_file = self._lock_file, None
        if descriptor is not None:
            os.close(descriptor)
