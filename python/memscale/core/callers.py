# SPDX-License-Identifier: Apache-2.0
"""The threads that run one wrapped model.

Planning exchanges the model's tensors for fakes, and techniques come and go with a plan. Who begins a forward
in another thread meanwhile waits for the end of that; and nothing is planned while another thread is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NO_BACKWARD = -1


class Callers:
    """Who runs a model."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # thread → forwards of it, one in another
        self._planner = 0
        self._depth = 0  # plans of this thread, one in another

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A forward of this thread. Waits while another thread plans."""
        me = threading.get_ident()
        with self._changed:
            while self._planner not in (0, me) and not _works_for_another():
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
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
        with self._changed:
            while me not in self._inside and (self._planner not in (0, me) or self._are_others(me)):
                self._changed.wait()
            alone = self._planner in (0, me) and not self._are_others(me)
            if alone:
                self._planner = me
                self._depth += 1
        try:
            yield alone
        finally:
            if alone:
                with self._changed:
                    self._depth -= 1
                    if not self._depth:
                        self._planner = 0
                        self._changed.notify_all()

    def _are_others(self, me: int) -> bool:
        return bool(self._inside.keys() - {me})


def _works_for_another() -> bool:
    """Whether autograd has this thread run a forward again: the thread that plans may wait for it."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)
