# SPDX-License-Identifier: Apache-2.0
"""The run that this process records: one at a time, opened by the first thing that there is to record.

    values, events, documents ──► Recorder (C: a ring, a thread, the spool) ──► Sender, for a server
    close ──► the end, flush, send: within a budget; the rest stays in the spool

Nothing raises here, and nothing waits but `close`. What cannot be done is a warning once, and then a counter.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from memscale import _core, log
from memscale.recording.places import Target, name_of
from memscale.recording.run_folder import RunFolder, RunInfo, is_run_id
from memscale.recording.sender import Sender
from memscale.recording.tokens import token_for

__all__ = ["RUN", "Run", "now_ms"]

RUN: Final = "MEMSCALE_RUN"
"""The environment variable with the id of a run to go on with."""

_EXIT_SECONDS: Final = 2.0
_MOST_TEXT_BYTES: Final = 4096
_MOST_DATA_BYTES: Final = 8192
_MOST_PENDING: Final = 64


def now_ms() -> int:
    """Now, since 1970."""
    return time.time_ns() // 1_000_000


class Run:
    """A run that is recorded.

    Args:
        target: where to.
        name: of the run; "": after the project and the time.

    Attributes:
        id: of the run.
        attempt: of its processes, which one this is; 0 for the first.
        step: the latest that has ended; -1: none has.
        has_loss: somebody records the series "loss".
        is_over: nothing is recorded any more.
        at_close: called before the run ends.
    """

    def __init__(self, target: Target, name: str = "") -> None:
        given = os.environ.get(RUN, "").strip()
        self.target, self._name = target, name
        self.id = given if is_run_id(given) else secrets.token_hex(8)
        self.attempt, self.step = 0, -1
        self.has_loss = False
        self._lock = threading.RLock()
        self._recorder: _core.Recorder | None = None
        self._sender: Sender | None = None
        self._live_file: int | None = None
        self._pending: list[tuple[str, str, str]] = []  # events and documents before it is opened
        self._figures: dict[str, int] = {}
        self.is_over = self._has_warned = self._has_refused = False
        self.at_close: list[Callable[[], None]] = []
        self._process = os.getpid()

    # ---- what is recorded ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether something was recorded, and more may be."""
        return self._recorder is not None

    def resume(self, id: str, attempt: int, step: int) -> None:
        """Goes on with a run that another process has begun, if this one has recorded nothing yet.

        Args:
            id: of the run.
            attempt: which of its processes this is.
            step: the latest that was recorded and counts.
        """
        with self._lock:
            if not self.is_open and is_run_id(id):
                self.id, self.attempt = id, max(attempt, 0)
                self.step = max(self.step, step)

    def go_on_from(self, step: int) -> None:
        """Steps up to this one were made before, such as by the run of a trainer's checkpoint."""
        self.step = max(self.step, step)

    def values(self, step: int, values: dict[str, Any], unit: str = "") -> None:
        """Records numbers of a step.

        Args:
            step: counts from 0.
            values: by the name of their series.
            unit: of all of them.
        """
        try:
            recorder = self._recorder or self._open()
            if recorder is not None:
                recorder.row(step, now_ms(), values, unit)
        except Exception as error:
            self.warn(error)

    def event(self, kind: str, text: str, step: int | None = None, **data: Any) -> None:
        """Records that something has happened.

        Args:
            kind: one word.
            text: what, for people.
            step: in which; None: the one at hand.
            **data: plain values; those that are None are left out.
        """
        try:
            found: dict[str, Any] = {"kind": kind, "time_ms": now_ms(), "text": _cut(text, _MOST_TEXT_BYTES)}
            at = self.step + 1 if step is None else step
            known = {name: value for name, value in data.items() if value is not None}
            if len(_json(known)) <= _MOST_DATA_BYTES:
                found["data"] = known
            self._put(
                "event", "", _json({**found, "step": max(at, 0)}), opens=kind in ("oom", "error", "note")
            )
        except Exception as error:
            self.warn(error)

    def document(self, name: str, content: Any, opens: bool = False) -> None:
        """Records a document in the place of an earlier one of this name.

        Args:
            name: lower case.
            content: anything that is JSON.
            opens: a run without it would be none.
        """
        try:
            self._put("document", name, _json(content), opens)
        except Exception as error:
            self.warn(error)

    def figures(self) -> dict[str, int]:
        """What became of what was recorded."""
        recorder = self._recorder
        return self._figures if recorder is None else recorder.figures()

    def _put(self, what: str, name: str, text: str, opens: bool) -> None:
        recorder = self._recorder
        if recorder is None and opens:
            recorder = self._open()
        if recorder is None:
            if not self.is_over and len(self._pending) < _MOST_PENDING:
                self._pending.append((what, name, text))
            return
        if what == "event":
            recorder.event(text)
        else:
            recorder.document(name, text)

    # ---- life ------------------------------------------------------------------------------------

    def _open(self) -> _core.Recorder | None:
        """Opens the spool; None: it cannot be, or the run is over."""
        with self._lock:
            if self.is_over or self._recorder is not None or self._process != os.getpid():
                return self._recorder
            try:
                self._recorder = self._opened()
            except Exception as error:
                self.is_over, self._pending = True, []
                self._release()
                self.warn(error)
                return None
            pending, self._pending = self._pending, []
            for what, name, text in pending:
                self._put(what, name, text, False)
            if self.attempt:
                self.event("attempt", f"attempt {self.attempt} goes on with this run", attempt=self.attempt)
            return self._recorder

    def _opened(self) -> _core.Recorder:
        folder = RunFolder(self.target.root / self.id)
        created = now_ms()
        name = self._name or f"{self.target.project} {time.strftime('%Y-%m-%d %H:%M:%S')}"
        info = RunInfo(self.id, self.target.project, name_of(name), created, self.target.url, self.attempt)
        info = folder.begin(info)
        self.attempt = info.attempts - 1
        client = f"{info.attempts}-{secrets.token_hex(6)}"
        self._live_file = os.open(folder.live_file(client), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._live_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        recorder = _core.Recorder(folder.path, client)
        if self.target.url:
            try:
                self._sender = Sender(folder, client, self.target.url, token_for(self.target.url))
            except BaseException:
                recorder.close()
                raise
        return recorder

    def close(self, state: str, seconds: float = _EXIT_SECONDS) -> None:
        """The run has ended here. What is not sent in time stays in the spool.

        Args:
            state: "finished" or "failed".
            seconds: that it may take.
        """
        if self._process != os.getpid():
            return
        for last in tuple(self.at_close):
            last()
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        try:
            self._close(state, time.monotonic() + seconds)
        except Exception as error:
            self.warn(error)

    def _close(self, state: str, deadline: float) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        dropped = recorder.figures()["dropped_rows"]
        if dropped:
            self.event("dropped", f"{dropped} rows found no room in the spool", points=dropped)
        recorder.end(state)
        recorder.flush(max(0.0, (deadline - time.monotonic()) / 2))
        self._figures = recorder.figures()
        self._recorder = None
        # Its thread may hang in a disk that does not answer: then it is left to itself.
        ending = threading.Thread(target=recorder.close, name="memscale ends", daemon=True)
        ending.start()
        ending.join(max(0.0, deadline - time.monotonic()))
        if self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))
        self._release()

    def forget(self) -> None:
        """In a child of a fork: the run is the parent's."""
        self._lock = threading.RLock()
        self.is_over = True
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()
        if self._sender is not None:
            self._sender.forget()
        self._release()

    def _release(self) -> None:
        descriptor, self._live_file = self._live_file, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def warn(self, error: Exception) -> None:
        """Says once what cannot be recorded."""
        if not self._has_warned:
            self._has_warned = True
            kind = type(error).__name__
            log.LOGGER.warning("recording to %s: %s: %s: training goes on", self._where, kind, error)

    def refuse(self, text: str) -> None:
        """Says once what is not taken of what the program records."""
        if not self._has_refused:
            self._has_refused = True
            log.LOGGER.warning("record: %s", text)

    @property
    def _where(self) -> str:
        return self.target.url or str(self.target.root)


def _json(value: Any) -> str:
    """JSON as the server takes it: NaN and infinities are strings."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut(text: str, most: int) -> str:
    clean = text.encode("utf-8", "replace")
    return clean[:most].decode("utf-8", "ignore")
