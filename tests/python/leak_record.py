# SPDX-License-Identifier: Apache-2.0
"""Entries of `test_leaks.py` for the recorder and for what reads its files."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memscale import _core

_numbers = itertools.count()


def _recorder(folder: Path) -> _core.Recorder:
    return _core.Recorder(folder, f"c-{next(_numbers)}", ring_bytes=1 << 20)


def _opened(change: Callable[[_core.Recorder], object]) -> Callable[[Path], object]:
    """An entry on one recorder, which nothing fills: what there is no room for is refused."""
    return lambda _: change(_open_recorder())


def _short(change: Callable[[_core.Recorder], object]) -> Callable[[Path], object]:
    """An entry on a recorder of its own, whose file goes."""

    def run(folder: Path) -> object:
        recorder = _recorder(folder)
        change(recorder)
        recorder.close()
        for path in folder.glob("*.spool"):
            path.unlink()
        return None

    return run


def _refused(action: Callable[[], object], *kinds: type[BaseException]) -> None:
    with pytest.raises(kinds):
        action()


@functools.cache
def _kept_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="memscale-leaks-"))


@functools.cache
def _open_recorder() -> _core.Recorder:
    """The one of all entries. Opened late: its thread is no other test's."""
    recorder = _recorder(_kept_folder())
    recorder.row(0, 1, {"loss": 1.5})
    recorder.event('{"kind":"note"}')
    recorder.document("plan", "{}")
    recorder.flush(30.0)
    return recorder


@functools.cache
def _file() -> Path:
    """What it has written."""
    _open_recorder()
    return next(_kept_folder().glob("*.spool"))


def close_recorder() -> None:
    """Ends its thread."""
    if _open_recorder.cache_info().currsize:
        _open_recorder().close()
        _open_recorder.cache_clear()


RECORD_CALLS: dict[str, Callable[[Path], object]] = {
    "Recorder": _short(lambda r: None),
    "Recorder.row": _opened(lambda r: r.row(10**9, 10**12, {"loss": 1.5, "x/y": 10**9}, unit="bytes")),
    "Recorder.event": _opened(lambda r: (r.event("{}"), r.event(b"{}"))),
    "Recorder.document": _opened(lambda r: r.document("plan", json="{}")),
    "Recorder.end": _short(lambda r: r.end("finished")),
    "Recorder.flush": _opened(lambda r: r.flush(0.0)),
    "Recorder.figures": _opened(lambda r: r.figures()),
    "Recorder.close": _short(lambda r: (r.close(), r.row(0, 0, {"a": 1}), r.flush(1.0), r.figures())),
    "Spool": lambda _: (_core.Spool(_file()), _core.Spool(_file(), 10**9)),
    "Spool.next": lambda _: _core.Spool(_file()).next(),
    "Spool.body": lambda _: _body(),
    "Spool.level": lambda _: _core.Spool(_file()).level(),
    "Spool.damaged_bytes": lambda _: _core.Spool(_file()).damaged_bytes(),
}

RECORD_ERRORS: dict[str, Callable[[Path], object]] = {
    "error: recorder folder": lambda folder: _refused(lambda: _recorder(folder / "none"), OSError),
    "error: recorder client": lambda folder: _refused(lambda: _core.Recorder(folder, "a/b"), ValueError),
    "error: recorder time": lambda folder: _refused(
        lambda: _core.Recorder(folder, "a", batch_seconds=0.0), ValueError
    ),
    "error: row": lambda _: _refused(lambda: _open_recorder().row(0, 0, {"a": "b"}), TypeError),  # type: ignore[dict-item]
    "error: row name": lambda _: _refused(lambda: _open_recorder().row(0, 0, {"a\nb": 1}), ValueError),
    "error: row of nothing": lambda _: _refused(lambda: _open_recorder().row(0, 0, {}), ValueError),
    "error: event": lambda _: _refused(lambda: _open_recorder().event("x" * (1 << 20)), ValueError),
    "error: end": lambda _: _refused(lambda: _open_recorder().end("gone"), ValueError),
    "error: flush": lambda _: _refused(lambda: _open_recorder().flush(-1.0), ValueError),
    "error: no spool": lambda folder: _refused(lambda: _core.Spool(folder / "graph"), ValueError),
    "error: no spool file": lambda folder: _refused(lambda: _core.Spool(folder / "none"), OSError),
    "error: no batch": lambda _: _refused(lambda: _core.Spool(_file()).body("a"), RuntimeError),
}


def _body() -> bytes:
    spool = _core.Spool(_file())
    assert spool.next() is not None
    return spool.body("1-a")
