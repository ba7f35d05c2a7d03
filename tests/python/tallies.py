# SPDX-License-Identifier: Apache-2.0
"""Counts that neither plans nor recomputes put back: in the environment of the process."""

from __future__ import annotations

import os

_PREFIX = "MEMSCALE_TALLY_"


def add(key: object, count: int = 1) -> None:
    """Counts something."""
    os.environ[f"{_PREFIX}{key}"] = str(of(key) + count)


def of(key: object) -> int:
    """How often it has been counted."""
    return int(os.environ.get(f"{_PREFIX}{key}", "0"))


def highest() -> int:
    """That of what has been counted most often."""
    return max(int(value) for name, value in os.environ.items() if name.startswith(_PREFIX))


def clear() -> None:
    """Begins anew."""
    for name in [name for name in os.environ if name.startswith(_PREFIX)]:
        del os.environ[name]


class World:
    """Flags that defective blocks read, where no recompute puts them back."""

    def __contains__(self, name: str) -> bool:
        return of(name) > 0

    def __setitem__(self, name: str, value: bool) -> None:
        add(name)

    def clear(self) -> None:
        """Begins anew."""
        clear()
