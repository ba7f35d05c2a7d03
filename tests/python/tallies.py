# SPDX-License-Identifier: Apache-2.0
"""Counts that neither plans nor recomputes put back: in a database in memory."""

from __future__ import annotations

import sqlite3
from typing import Final

_DATABASE: Final = sqlite3.connect(":memory:", check_same_thread=False)
_DATABASE.execute("create table tally (key text primary key, count integer)")


def add(key: object, count: int = 1) -> None:
    """Counts something."""
    _DATABASE.execute("replace into tally values (?, ?)", (str(key), of(key) + count))


def of(key: object) -> int:
    """How often it has been counted."""
    found = _DATABASE.execute("select count from tally where key = ?", (str(key),)).fetchone()
    return 0 if found is None else int(found[0])


def highest() -> int:
    """That of what has been counted most often."""
    return int(_DATABASE.execute("select max(count) from tally").fetchone()[0])


def keys() -> set[str]:
    """What has been counted."""
    return {key for (key,) in _DATABASE.execute("select key from tally")}


def clear() -> None:
    """Begins anew."""
    _DATABASE.execute("delete from tally")


class World:
    """Flags that defective blocks read, where no recompute puts them back."""

    def __contains__(self, name: str) -> bool:
        return of(name) > 0

    def __setitem__(self, name: str, value: bool) -> None:
        add(name)

    def clear(self) -> None:
        """Begins anew."""
        clear()
