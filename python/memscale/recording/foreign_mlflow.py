# SPDX-License-Identifier: Apache-2.0
"""MLflow's runs: of a tracking folder (`mlruns`), or of its SQLite file.

mlruns/<experiment>/meta.yaml                    name of the experiment
mlruns/<experiment>/<run>/meta.yaml              name, state and times of the run
mlruns/<experiment>/<run>/metrics/<key>          lines: time, value, step
mlruns/<experiment>/<run>/{params,tags}/<key>    the value
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from memscale.recording.foreign import ForeignRun, Point, SourceError, foreign_id, opened

__all__ = ["mlflow_runs"]

_STATES: Final = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "failed",
                  3: "finished", 4: "failed", 5: "failed"}  # fmt: skip
_DELETED: Final = "deleted"
_LARGEST: Final = 1.7976931348623157e308
"""What its SQL store has in the place of infinity."""


def mlflow_runs(place: Path) -> Iterator[ForeignRun]:
    """All runs of a place but those that were deleted.

    Args:
        place: a tracking folder, or a SQLite file.

    Raises:
        SourceError: it is neither.
    """
    if place.is_file():
        with opened(place) as database:
            yield from _runs_of_database(database)
        return
    experiments = [folder for folder in _folders(place) if (folder / "meta.yaml").is_file()]
    if not experiments:
        raise SourceError(f"{place} is no tracking folder of MLflow: no folder in it has a meta.yaml")
    for folder in experiments:
        yield from _runs_of_experiment(folder)


# ---- the folder ----------------------------------------------------------------------------------


def _runs_of_experiment(folder: Path) -> Iterator[ForeignRun]:
    about = _meta(folder)
    if about.get("lifecycle_stage") == _DELETED:
        return
    project = str(about.get("name") or folder.name)
    for run in _folders(folder):
        if not (run / "meta.yaml").is_file():
            continue
        found = _meta(run)
        if found.get("lifecycle_stage") == _DELETED:
            continue
        tags = _texts(run / "tags")
        name = str(found.get("run_name") or tags.get("mlflow.runName") or run.name)
        yield _run(project, str(found.get("run_id") or run.name), name, found, _texts(run / "params"), tags,
                   partial(_series_of_folder, run / "metrics"))  # fmt: skip


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SourceError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} has no keys")
    return found


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise SourceError(f"{place} cannot be read: {error.strerror or error}") from error


def _files(place: Path) -> list[tuple[str, Path]]:
    """Files below a folder by the key that their path is."""
    found = sorted(path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return [(path.relative_to(place).as_posix(), path) for path in found]


def _texts(place: Path) -> dict[str, str]:
    return {key: path.read_text(encoding="utf-8", errors="replace") for key, path in _files(place)}


def _series_of_folder(place: Path) -> Iterator[tuple[str, Iterator[Point]]]:
    for key, path in _files(place):
        yield key, _points_of_file(path)


def _points_of_file(path: Path) -> Iterator[Point]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            words = line.split()
            try:
                if words:
                    yield int(words[2]) if len(words) > 2 else number, int(words[0]), float(words[1])
            except (ValueError, IndexError) as error:
                raise SourceError(f"{path}, line {number + 1}: {line[:80]!r} is no point") from error


# ---- the SQL store -------------------------------------------------------------------------------


def _runs_of_database(database: sqlite3.Connection) -> Iterator[ForeignRun]:
    try:
        rows = database.execute(
            "SELECT r.run_uuid, r.name, r.status, r.start_time, r.end_time, e.name FROM runs r"
            " JOIN experiments e ON e.experiment_id = r.experiment_id"
            " WHERE r.lifecycle_stage <> ? AND e.lifecycle_stage <> ? ORDER BY r.start_time, r.run_uuid",
            (_DELETED, _DELETED),
        ).fetchall()
    except sqlite3.Error as error:
        raise SourceError(f"this is no tracking store of MLflow: {error}") from error
    for id_, name, status, start, end, project in rows:
        params, tags = _pairs(database, "params", id_), _pairs(database, "tags", id_)
        about = {"status": status, "start_time": start, "end_time": end}
        shown = str(name or tags.get("mlflow.runName") or id_)
        yield _run(str(project), id_, shown, about, params, tags,
                   partial(_series_of_database, database, id_))  # fmt: skip


def _pairs(database: sqlite3.Connection, table: str, run: str) -> dict[str, str]:
    rows = database.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ? ORDER BY key", (run,))
    return {str(key): "" if value is None else str(value) for key, value in rows}


def _series_of_database(database: sqlite3.Connection, run: str) -> Iterator[tuple[str, Iterator[Point]]]:
    keys = database.execute("SELECT DISTINCT key FROM metrics WHERE run_uuid = ? ORDER BY key", (run,))
    for (key,) in keys.fetchall():
        yield str(key), _points_of_database(database, run, key)


def _points_of_database(database: sqlite3.Connection, run: str, key: str) -> Iterator[Point]:
    rows = database.execute(
        "SELECT step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY rowid",
        (run, key),
    )
    for step, time_ms, value, is_nan in rows:
        number = math.nan if is_nan else float(value)
        yield int(step), int(time_ms), math.copysign(math.inf, number) if abs(number) >= _LARGEST else number


def _run(
    project: str, id_: str, name: str, about: dict[str, Any], params: dict[str, str], tags: dict[str, str],
    series: Callable[[], Iterator[tuple[str, Iterator[Point]]]],
) -> ForeignRun:  # fmt: skip
    end = about.get("end_time")
    state = _STATES.get(about.get("status", ""), "")
    documents = {key: values for key, values in (("params", params), ("tags", tags)) if values}
    return ForeignRun(foreign_id("mlflow", project, id_), project, name, int(about.get("start_time") or 0),
                      None if end is None else int(end), state, documents, series)  # fmt: skip
