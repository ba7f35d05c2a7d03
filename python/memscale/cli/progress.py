# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal while something takes longer than a second. Elsewhere: silence."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Final, TextIO

__all__ = ["Progress"]

_PATIENCE_SECONDS: Final = 1.0


class Progress:
    """Says what is being done, once it has taken a second, and takes the line back at the end.

    Args:
        stream: where to; None: standard error. Nothing is written unless it is a terminal.
        seconds: how long to keep silent.

    Example:
        >>> with Progress() as progress:
        ...     progress.say("tracing gpt2")
    """

    def __init__(self, stream: TextIO | None = None, seconds: float = _PATIENCE_SECONDS) -> None:
        self._stream: TextIO | None = sys.stderr if stream is None else stream  # which may be closed
        self._lock = threading.Lock()
        self._text = ""
        self._shown = 0
        self._awake = False
        self._timer = threading.Timer(seconds, self._wake) if self._is_terminal() else None

    def _is_terminal(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __enter__(self) -> Progress:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._awake = False
            self._write("")

    def say(self, text: str) -> None:
        """Sets what is being done now."""
        with self._lock:
            self._text = text
            if self._awake:
                self._write(text)

    def _wake(self) -> None:
        with self._lock:
            self._awake = True
            self._write(self._text)

    def _write(self, text: str) -> None:
        """Replaces the line; nothing is written where nothing was and nothing is."""
        if self._stream is None or (not text and not self._shown):
            return
        self._stream.write("\r" + text.ljust(self._shown) + ("" if text else "\r"))
        self._stream.flush()
        self._shown = len(text)
