# SPDX-License-Identifier: Apache-2.0
"""Runs that other programs have recorded, as `memscale import` takes them.

A source is read as it lies on disk, by the standard library, and never written to. What it has of a run comes
in the order in which it was logged, so that what is there already can be counted and passed over.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memscale.recording.run_folder import is_run_id

__all__ = ["ForeignRun", "Point", "SourceError", "foreign_id", "opened"]

Point = tuple[int, int, float]
"""Step, milliseconds since 1970, value."""

_ID_DIGITS: Final = 32


class SourceError(Exception):
    """A source is not what it is said to be: the message says why, in a line."""


@dataclass(frozen=True)
class ForeignRun:
    """One run of a source.

    Attributes:
        id: that it has here, the same each time.
        project: it belongs to.
        name: of it.
        created_ms: since 1970.
        ended_ms: since 1970; None: it has not ended, or nobody knows when.
        state: "finished", "failed", or "": it runs.
        documents: by name.
        series: reads its series, each with all its points.
        events: as batches have them.
    """

    id: str
    project: str
    name: str
    created_ms: int
    ended_ms: int | None = None
    state: str = ""
    documents: dict[str, Any] = field(default_factory=dict)
    series: Callable[[], Iterator[tuple[str, Iterator[Point]]]] = lambda: iter(())
    events: tuple[dict[str, Any], ...] = ()


def foreign_id(*names: str) -> str:
    """The id of a run here: its own, if that may be one, else made of all its names."""
    if is_run_id(names[-1]):
        return names[-1]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:_ID_DIGITS]


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A SQLite file, to be read alone.

    Raises:
        SourceError: it cannot be read, or is none.
    """
    try:
        found = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise SourceError(f"{path}: {error}") from error
    try:
        found.execute("SELECT count(*) FROM sqlite_schema")
        yield found
    except sqlite3.Error as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    finally:
        found.close()
