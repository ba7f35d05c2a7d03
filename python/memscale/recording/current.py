# SPDX-License-Identifier: Apache-2.0
"""`memscale.record`, and which run it is that this process records.

A run begins with the first wrapped model that is to be recorded, or with `record` where the environment names
a place, and ends when the last of these models is detached, or with the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from memscale.recording.places import record_setting, target_of
from memscale.recording.run import Run

__all__ = ["CURRENT", "record", "record_logged", "resume_from", "state_to_save"]

_RANK: Final = "MEMSCALE_RECORD_RANK"
_RESERVED: Final = ("memory/", "time/", "offload/")
_MOST_NAME_BYTES: Final = 128
_LOSS: Final = "loss"
_MOST_KNOWN: Final = 4096


class Current:
    """The run of this process, and how many wrapped models are in it.

    Attributes:
        run: None: nothing is recorded.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._holders = 0
        self._lock = threading.RLock()
        self._is_watched = False

    def hold(self, setting: str, name: str = "") -> Run | None:
        """One more wants to record; None: this process does not.

        Args:
            setting: as `Config.record`.
            name: of the run.
        """
        with self._lock:
            if not is_recorded_rank():
                return None
            if self.run is None:
                self.run = Run(target_of(setting), name)
                self._watch()
            self._holders += 1
            return self.run

    def release(self, state: str = "finished") -> None:
        """One less does. After the last one the run ends."""
        with self._lock:
            self._holders = max(0, self._holders - 1)
            run = self.run
            if self._holders or run is None:
                return
            self.run = None
        run.close(state)

    def by_environment(self) -> Run | None:
        """The run at hand, or one that the environment asks for."""
        if self.run is None and record_setting(None) is not None:
            self.hold(str(record_setting(None)))
        return self.run

    def refuse(self, text: str) -> None:
        """Says once in a run what is wrong with what is to be recorded."""
        if self.run is not None:
            self.run.refuse(text)

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            atexit.register(self._at_exit)
            os.register_at_fork(after_in_child=self._in_child)

    def _at_exit(self) -> None:
        run, self.run = self.run, None
        if run is None:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:  # the program was ended by it
            kind = type(error).__name__
            run.event("error", f"{kind}: {error}", type=kind)
        run.close("finished" if error is None else "failed")

    def _in_child(self) -> None:
        self._lock = threading.RLock()
        run, self.run, self._holders = self.run, None, 0
        if run is not None:
            run.forget()


CURRENT: Final = Current()
"""This process records one run at a time."""


def is_recorded_rank() -> bool:
    """Whether this process of a distributed run is the one that records: rank 0, or the one asked for."""
    wanted = os.environ.get(_RANK, "0").strip() or "0"
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank()) == wanted
    return os.environ.get("RANK", "0").strip() in (wanted, "")


def record(
    name: str | Mapping[str, Any] | None = None,
    value: Any = None,
    *,
    step: int | None = None,
    params: Mapping[str, Any] | None = None,
) -> None:
    """Records numbers of your own with the run at hand, or a note. Raises nothing, waits for nothing.

    Without a run that is recorded (`Config.record`, or the environment variable `MEMSCALE_RECORD`) it does
    nothing.
    A tensor of a card is waited for, as by `float(tensor)`.

    Args:
        name: of the series, or numbers by their names. What stands before the last "/" groups charts.
            Names that begin with "memory/", "time/" or "offload/" are MemScale's own.
        value: a number; a text is kept as a note under this name.
        step: that it belongs to; None: the step that has ended last.
        params: hyperparameters of the run: texts, numbers and booleans by name.

    Example:
        >>> memscale.record("accuracy", 0.93)
        >>> memscale.record({"train/lr": 3e-4, "train/norm": 1.7}, step=12)
        >>> memscale.record(params={"lr": 3e-4, "batch": 16})
    """
    try:
        run = CURRENT.by_environment()
        if run is None:
            return
        if params is not None:
            run.document("params", {str(key): _plain(item) for key, item in params.items()}, opens=True)
        if name is None:
            return
        at = max(run.step, 0) if step is None else int(step)
        if isinstance(name, str):
            if isinstance(value, str):
                run.event("note", value, at, name=name)
                return
            name = {name: value}
        numbers = {key: float(item) for key, item in name.items() if key in _FREE or _is_free(key)}
        if _LOSS in numbers:
            run.has_loss = True
        if numbers:
            run.values(at, numbers)
    except Exception as error:  # a run is worth more than its record
        CURRENT.refuse(f"{type(error).__name__}: {error}")


def record_logged(logs: Mapping[str, Any], step: int) -> None:
    """Records what a trainer logs: its numbers, under their names.

    Args:
        logs: as the trainer has them.
        step: that has ended last, from 0.
    """
    numbers = {
        name: value
        for name, value in logs.items()
        if isinstance(value, (int, float)) or (hasattr(value, "numel") and value.numel() == 1)
    }
    if numbers and CURRENT.run is not None:
        record(numbers, step=step)


def state_to_save() -> dict[str, Any] | None:
    """What a checkpoint needs for the run to go on in another process; None: nothing is recorded."""
    run = CURRENT.run
    return (
        None if run is None or not run.is_open else {"run": run.id, "attempt": run.attempt, "step": run.step}
    )


def resume_from(state: Any) -> None:
    """Goes on with the run of a checkpoint, if this process records and has recorded nothing yet."""
    run = CURRENT.run
    if run is not None and isinstance(state, Mapping):
        run.resume(str(state.get("run")), int(state.get("attempt", 0)) + 1, int(state.get("step", -1)))


def _is_free(name: object) -> bool:
    """Whether a user may record under a name."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= _MOST_NAME_BYTES:
        CURRENT.refuse(
            f"a name is {str(name)[:40]!r}; allowed: 1 to {_MOST_NAME_BYTES} bytes that can be printed"
        )
        return False
    if name.startswith(_RESERVED):
        CURRENT.refuse(f"{name!r} is one of MemScale's own names: put a word of yours before it")
        return False
    if len(_FREE) < _MOST_KNOWN:
        _FREE.add(name)
    return True


_FREE: Final[set[Any]] = set()
"""Names that were looked at, and are a user's."""


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else str(value)
