# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel's kill for lack of memory into an error that can be caught, on a CPU host.

Linux promises more memory than there is, and ends a process that touches it. While a guard is on, RLIMIT_DATA
limits private memory to what this process has and what machine and control groups have left: a tensor that
is too large is refused when it is made. The limit follows what is left, before each forward. Where tasks
already wait for memory, the kernel's pressure figures say so early, and a log line passes that on.

Source: setrlimit(2), Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import logging
import resource
import threading
from pathlib import Path
from typing import Final

from memscale.hardware.host import host_memory, memory_pressure_percent, private_bytes
from memscale.units import format_bytes

_LOGGER = logging.getLogger("memscale")

_USABLE_PERCENT: Final = 97
"""Of what is left. The rest is for what the system itself needs to refuse in peace."""

_PRESSURE_PERCENT: Final = 10.0
"""Of the last ten seconds in which some task has waited for memory."""

_ROOT = Path("/")


class Guard:
    """The limit of this process, as long as somebody wants it.

    Args:
        root: holds `proc` and `sys`; tests give a stand-in.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._holders = 0
        self._before: tuple[int, int] | None = None
        self._set = 0
        self._has_warned = False

    def put(self) -> None:
        """One more wants it."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = resource.getrlimit(resource.RLIMIT_DATA)
                self._has_warned = False
            self.follow()

    def remove(self) -> None:
        """One less does. After the last one the limit is what it was, unless somebody else has changed it."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
                if soft == self._set:
                    resource.setrlimit(resource.RLIMIT_DATA, (self._before[0], hard))

    def follow(self) -> None:
        """Has the limit follow what is left."""
        with self._lock:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            assert self._before is not None  # `put` was called
            if self._set and soft not in (self._set, self._before[0]):
                return  # somebody else's by now
            available = host_memory(self._root).available_bytes
            here = private_bytes(self._root)
            if not here or not available:  # this system does not say
                return
            wanted = here + available * _USABLE_PERCENT // 100
            for most in (self._before[0], hard):
                wanted = wanted if most in (resource.RLIM_INFINITY, -1) else min(wanted, most)
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
            self._set = wanted
            self._warn(available)

    def _warn(self, available: int) -> None:
        pressure = memory_pressure_percent(self._root)
        if pressure >= _PRESSURE_PERCENT and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "memory pressure: tasks have waited for memory in %.0f %% of the last ten seconds; %s left",
                pressure,
                format_bytes(available),
            )


GUARD: Final = Guard()
"""This process has one limit, and one guard."""
