# SPDX-License-Identifier: Apache-2.0
"""The released gradients of a model, and which of them are on the device.

All that is here and need not be takes at most the window: what is on its way out, and what was used a moment
ago. What somebody else has a view of stays until that is gone, and goes with the next operation on any of
them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from memscale.optim.offload.pieces import PIECE_ELEMENTS
from memscale.optim.release.gradient_bytes import GradientBytes

if TYPE_CHECKING:
    from memscale import _core
    from memscale.offload.engine import Offload


class ReleaseWindow:
    """The released gradients of one attachment, and how many of their bytes may be here.

    Args:
        offload: opens the engine.
        most_bytes: that are here without being used: on their way out, or in use a moment ago.
        piece_elements: of a block; a multiple of 128, as the core's arrays of scales need it.

    Attributes:
        in_step: an optimizer is stepping: it uses a gradient several times in a row, and the latest stays
            until it uses another one.
    """

    def __init__(self, offload: Offload, most_bytes: int, piece_elements: int = PIECE_ELEMENTS) -> None:
        self.offload = offload
        self.most_bytes = most_bytes
        self.piece_elements = piece_elements
        self.in_step = False
        self.lock = threading.RLock()
        self._backward = -1
        self._here: dict[int, weakref.ref[GradientBytes]] = {}  # the latest used last

    @property
    def engine(self) -> _core.OffloadEngine:
        """The engine of this process."""
        return self.offload.engine

    def begin_backward(self) -> None:
        """A gradient is complete. When this backward ends, all of them go."""
        self.in_step = False  # of a step that was broken off
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)

    @contextmanager
    def using(self, gradients: list[GradientBytes], written: list[GradientBytes]) -> Iterator[None]:
        """Has gradients here inside the block; those that it writes are offloaded again."""
        with self.lock:
            for item in gradients:
                item.users += 1
        try:
            with self.lock:
                if self.in_step and not all(item.here for item in gradients):
                    self.trim()
                for item in gradients:
                    item.fetch()
            with ExitStack() as stack:
                for item in gradients:
                    if item.stream is not None:
                        stack.enter_context(item.in_order())
                yield
        finally:
            with self.lock:
                for item in gradients:
                    item.users -= 1
                    if item.here and (item in written or item.is_held()):
                        item.changed()
                    self.note(item)
                self.trim(but_newest=self.in_step)

    def note(self, item: GradientBytes) -> None:
        """It was used just now."""
        self._here.pop(id(item), None)
        if item.here and not item.stays:
            self._here[id(item)] = weakref.ref(item)

    def clear(self) -> None:
        """Lets all gradients go that can."""
        with self.lock:
            self.trim(most_bytes=0)

    def trim(self, but_newest: bool = False, most_bytes: int | None = None) -> None:
        """Lets gradients go, the oldest first, until the rest fits the window.

        Args:
            but_newest: the one that was used last stays, and does not count.
            most_bytes: another window.
        """
        most = self.most_bytes if most_bytes is None else most_bytes
        items = []
        for key, ref in list(self._here.items()):
            item = ref()
            if item is None or not item.here or item.stays:
                del self._here[key]
            elif not item.users:
                items.append(item)
        if but_newest:
            items = items[:-1]
        total = 0
        for item in items:
            if item.is_held():
                continue
            if item.put():
                total += item.nbytes
            else:
                del self._here[id(item)]  # no room: it is asked for again when it is used next
        for item in items:
            if total <= most:
                break
            if id(item) in self._here and item.let_go():
                total -= item.nbytes
                del self._here[id(item)]
