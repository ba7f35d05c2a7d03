# SPDX-License-Identifier: Apache-2.0
"""Observers of saved tensors, such as a recording profiler, in checkpointed calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor


class SaveObserver(Protocol):
    """A recording profiler that wants to see the saved tensors of checkpointed calls.

    It records the plain step, where nothing waits in a cache. So selective checkpoints keep nothing while it
    looks on.
    """

    def on_pack(self, tensor: Tensor) -> object:
        """A tensor was saved; the result names the save in later reports."""

    def on_unpack(self, save: object) -> None:
        """Backward asked for it."""

    def on_release(self, save: object) -> None:
        """Autograd dropped it."""

    def on_hold(self, tensor: Tensor) -> Tensor:
        """An argument is to be held for a recompute; the result is held in its place."""

    def unseen(self) -> AbstractContextManager[None]:
        """Inside the block happens what is not part of the plain step, such as a recompute."""


class _Observed(threading.local):
    """Who looks on at the checkpoints of a thread."""

    by: SaveObserver | None = None


observed = _Observed()


@contextmanager
def observed_by(observer: SaveObserver) -> Iterator[None]:
    """Reports every save of every checkpointed call that this thread begins in the block to `observer`."""
    before = observed.by
    observed.by = observer
    try:
        yield
    finally:
        observed.by = before
