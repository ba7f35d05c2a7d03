# SPDX-License-Identifier: Apache-2.0
"""Trackio's runs: of the SQLite file of a project, or of the folder that has them all."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

from memscale.recording.foreign import ForeignRun, Point, SourceError, foreign_id, opened

__all__ = ["trackio_runs"]

_SYSTEM: Final = "system/"
"""Before the names of what it measures of the machine, which has no steps: they are counted."""

_NUMBERS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_EVENTS: Final = 10_000
_MOST_TEXT: Final = 1000


def trackio_runs(place: Path) -> Iterator[ForeignRun]:
    """All runs of a place.

    Args:
        place: a project's file, or a folder of them.

    Raises:
        SourceError: it has none.
    """
    files = [place] if place.is_file() else sorted(place.glob("*.db")) if place.is_dir() else []
    if not files:
        raise SourceError(f"{place} is no file of Trackio, and no folder with *.db in it")
    for file in files:
        with opened(file) as database:
            yield from _runs(database, file.stem)


def _runs(database: sqlite3.Connection, project: str) -> Iterator[ForeignRun]:
    columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
    if not {"timestamp", "run_name", "step", "metrics"} <= columns:
        raise SourceError(f"{project} is no project of Trackio: it has no table of metrics")
    # Before runs had ids, their names were theirs.
    key = "run_id" if "run_id" in columns else "run_name"
    rows = database.execute(
        f"SELECT {key}, max(run_name), min(timestamp), max(timestamp) FROM metrics"
        f" GROUP BY {key} ORDER BY 3, 1"
    ).fetchall()
    for run, name, first, last in rows:
        yield ForeignRun(
            foreign_id("trackio", project, f"{project}/{run}"), project, str(name), _ms(first), _ms(last),
            "finished", _config(database, key, run),
            partial(_series, database, key, run), tuple(_alerts(database, key, run)),
        )  # fmt: skip


def _has(database: sqlite3.Connection, table: str, key: str) -> bool:
    return key in {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _config(database: sqlite3.Connection, key: str, run: str) -> dict[str, Any]:
    if not _has(database, "configs", key):
        return {}
    row = database.execute(f"SELECT config FROM configs WHERE {key} = ?", (run,)).fetchone()
    found = _object(row[0]) if row else {}
    return {"params": found} if found else {}


class _Columns:
    """The points of one series, as three columns."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("q"), array("d")

    def points(self) -> Iterator[Point]:
        return zip(self.steps, self.times, self.values, strict=True)


def _series(database: sqlite3.Connection, key: str, run: str) -> Iterator[tuple[str, Iterator[Point]]]:
    """Each row has values of many series: one pass takes them apart."""
    found: dict[str, _Columns] = {}
    for table, step, prefix in (("metrics", "step", ""), ("system_metrics", "NULL", _SYSTEM)):
        if not _has(database, table, key):
            continue
        query = f"SELECT {step}, timestamp, metrics FROM {table} WHERE {key} = ? ORDER BY id"
        for at, time, text in database.execute(query, (run,)):
            time_ms = _ms(time)
            for name, value in _object(text).items():
                number = _number(value)
                if number is not None:
                    columns = found.setdefault(prefix + name, _Columns())
                    columns.steps.append(len(columns.steps) if at is None else int(at))
                    columns.times.append(time_ms)
                    columns.values.append(number)
    for name, columns in sorted(found.items()):
        yield name, columns.points()


def _alerts(database: sqlite3.Connection, key: str, run: str) -> Iterator[dict[str, Any]]:
    if not _has(database, "alerts", key):
        return
    rows = database.execute(
        f"SELECT timestamp, title, text, level, step FROM alerts WHERE {key} = ? ORDER BY id LIMIT ?",
        (run, _MOST_EVENTS),
    )
    for time, title, text, level, step in rows:
        words = f"{title}: {text}" if text else str(title)
        found = {"kind": "alert", "time_ms": _ms(time), "text": words[:_MOST_TEXT],
                 "data": {"level": str(level)}}  # fmt: skip
        yield found if step is None else {**found, "step": int(step)}


def _object(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _NUMBERS.get(value)
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond doubles
        return None


def _ms(text: Any) -> int:
    """A time in ISO's form; one without a zone is of UTC."""
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError as error:
        raise SourceError(f"{str(text)[:40]!r} is no time") from error
    at = found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
    return int(at.timestamp() * 1000)
