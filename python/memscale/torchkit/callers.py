# SPDX-License-Identifier: Apache-2.0
"""The threads that run one wrapped model.

Planning exchanges the model's tensors for fakes, and techniques come and go with a plan. Who begins a forward
in another thread meanwhile waits for the end of that; and nothing is planned while another thread is inside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from memscale.torchkit.graph_task import in_backward


class Callers:
    """Who runs a model."""

    def __init__(self) -> None:
        # Taken by `with` as it is: no signal's exception comes between the block and the release.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}  # thread → forwards of it, one in another
        self._planner = 0
        self._depth = 0  # plans of this thread, one in another

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A forward of this thread. Waits while another thread plans."""
        me, entered = threading.get_ident(), False
        try:
            with self._lock:
                # Autograd may recompute a forward in this thread, and the thread that plans may wait for it.
                while self._is_planned_by_another(me) and not in_backward():
                    self._changed.wait()
                self._inside[me] = self._inside.get(me, 0) + 1
                entered = True
            yield
        finally:
            if entered:
                self._leave(me)

    @property
    def is_nested(self) -> bool:
        """Whether this thread's forward runs inside another one of its own."""
        return self._inside.get(threading.get_ident(), 0) > 1

    def _leave(self, me: int) -> None:
        with self._lock:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    @contextmanager
    def planning(self) -> Iterator[bool]:
        """This thread changes the model: others wait before their next forward, and it waits for theirs.

        Within a forward it does not wait: the other one may want the same.

        Yields:
            Whether nobody else is inside. If not, the model must stay as it is.
        """
        me = threading.get_ident()
        alone = False
        try:
            with self._lock:
                while me not in self._inside and (self._is_planned_by_another(me) or self._are_others(me)):
                    self._changed.wait()
                alone = not (self._is_planned_by_another(me) or self._are_others(me))
                if alone:
                    self._depth = self._depth + 1 if self._planner == me else 1
                    self._planner = me
            yield alone
        finally:
            if alone:
                with self._lock:
                    self._depth -= 1
                    if not self._depth:
                        self._planner = 0
                        self._changed.notify_all()

    def _is_planned_by_another(self, me: int) -> bool:
        return self._planner not in (0, me) and is_there(self._planner)

    def _are_others(self, me: int) -> bool:
        return any(thread != me and is_there(thread) for thread in self._inside)


def is_there(thread: int) -> bool:
    """Whether a thread is in this process: a forked one has only the thread that forked."""
    return thread in sys._current_frames()
