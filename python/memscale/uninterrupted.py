# SPDX-License-Identifier: Apache-2.0
"""Sections that Ctrl-C must not split, such as a model that is half restored."""

from __future__ import annotations

import threading

# Without the enums of `signal`, which take microseconds.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts SIGINT off until the end of the block."""
    asked: list[Any] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = getsignal(SIGINT)
    if not callable(before):
        yield
        return
    signal(SIGINT, lambda *about: asked.append(about))
    try:
        yield
    finally:
        signal(SIGINT, before)
        if asked:  # where the block has raised, too: its error is this one's context
            before(*asked[0])
