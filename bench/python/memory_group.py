# SPDX-License-Identifier: Apache-2.0
"""A limit of the system on all memory of a process: a control group of Linux, of version 1 or 2.

What a process takes after it has joined counts, pages of files included. Where those fill the limit the
system takes them back; where nothing can be taken back it ends the process. Nothing of it goes to swap: with
it, version 2 would count less than the process has.
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
        OSError: there are no such groups, they are not this process's to make, or the system does not tell
            their peak, as Linux before 5.19 does not for version 2.
    """

    def __init__(self, name: str, make: bool = True) -> None:
        old = (_ROOT / "memory" / _OLD[0]).exists()
        self._path = (_ROOT / "memory" if old else _ROOT) / name
        self._limit, self._peak = _OLD if old else _NEW
        if make:
            self._path.mkdir()
        if make and not all((self._path / name).exists() for name in (self._limit, self._peak)):
            self.remove()
            raise OSError(f"{_ROOT} does not limit memory here, or does not tell its peak")

    def join(self, most_bytes: int) -> None:
        """This process, and all of its threads, from now on."""
        (self._path / self._limit).write_text(str(most_bytes))
        self._forbid_swap(most_bytes)
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def _forbid_swap(self, most_bytes: int) -> None:
        """By the first file that there is; none: the system counts no swap, or has none."""
        for file, value in (
            ("memory.swap.max", "0"),
            ("memory.memsw.limit_in_bytes", str(most_bytes)),
            ("memory.swappiness", "0"),
        ):
            if (self._path / file).exists():
                (self._path / file).write_text(value)
                return

    def lift(self) -> int:
        """Takes the limit away. Returns the most bytes that were in use at once."""
        found = int((self._path / self._peak).read_text())
        swap = self._path / "memory.memsw.limit_in_bytes"
        if swap.exists():  # never less than the other limit
            swap.write_text("-1")
        (self._path / self._limit).write_text("-1" if self._limit == _OLD[0] else "max")
        return found

    def remove(self) -> None:
        """When no process is left in it."""
        with contextlib.suppress(OSError):
            self._path.rmdir()
