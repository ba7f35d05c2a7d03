# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a tqdm bar on a terminal, else a line for each measurement."""

from __future__ import annotations

import importlib
import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Says what is being measured, and what came of it.

    Args:
        total: expected number of measurements.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty():
            try:
                tqdm = importlib.import_module("tqdm")
            except ModuleNotFoundError:
                return
            self.bar = tqdm.tqdm(total=total, unit="run", dynamic_ncols=True)

    def start(self, label: str) -> None:
        """A measurement begins."""
        if self.bar is not None:
            self.bar.set_description(label)

    def end(self, label: str, words: str) -> None:
        """It has ended."""
        self.done += 1
        seconds = time.monotonic() - self.began
        line = f"[{self.done}/{max(self.total, self.done)}, {seconds:.0f} s] {label}: {words}"
        if self.bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bar.total = max(self.total, self.done)
            self.bar.write(line, file=sys.stderr)
            self.bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
