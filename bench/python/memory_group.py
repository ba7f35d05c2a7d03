# SPDX-License-Identifier: Apache-2.0
"""A limit of the system on all memory of a process: a control group of Linux, of version 1 or 2.

What a process takes after it has joined counts, pages of files included. Where those fill the limit the
system takes them back; where nothing can be taken back it ends the process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OLD, _NEW = ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), ("memory.max", "memory.peak")


class MemoryGroup:
    """A control group with a limit.

    Args:
        name: its folder's.
        make: False: it is there already.

    Raises:
        OSError: there are no such groups, or they are not this process's to make.
    """

    def __init__(self, name: str, make: bool = True) -> None:
        old = (_ROOT / "memory" / _OLD[0]).exists()
        self._path = (_ROOT / "memory" if old else _ROOT) / name
        self._limit, self._peak = _OLD if old else _NEW
        if make:
            self._path.mkdir()
        if make and not (self._path / self._limit).exists():
            self.remove()
            raise OSError(f"{_ROOT} does not limit memory here")

    def join(self, most_bytes: int) -> None:
        """This process, and all of its threads, from now on."""
        (self._path / self._limit).write_text(str(most_bytes))
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def lift(self) -> int:
        """Takes the limit away. Returns the most bytes that were in use at once."""
        found = int((self._path / self._peak).read_text())
        (self._path / self._limit).write_text("-1" if self._limit == _OLD[0] else "max")
        return found

    def remove(self) -> None:
        """When no process is left in it."""
        with contextlib.suppress(OSError):
            self._path.rmdir()
