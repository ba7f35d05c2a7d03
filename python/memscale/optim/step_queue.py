# SPDX-License-Identifier: Apache-2.0
"""Steps of the core beside backward: a thread that takes them one after the other, in the order they came.

    backward   put ── put ── put ············ put (waits for room) ── … ── drain
    thread          step      step      step       step                 step

The gradients of steps that wait, or run, take no more than the window. A step knows its number and settings
from when it was put, and no two of a backward share memory: bits do not depend on when it runs. The core
works without Python's lock, in a quarter as many threads as PyTorch has, which compute the backward; in all
of them where a card does that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from memscale.optim.arrays import threads

if TYPE_CHECKING:
    from torch import Tensor

    from memscale.optim.offload.step import HostCall
    from memscale.optim.steps import CoreStep

    Step = CoreStep | HostCall

_SHARE = 4  # of PyTorch's threads, one in so many


class StepQueue:
    """The queue and its thread, which begins with the first step.

    Args:
        most_bytes: of gradients that wait.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Step] = deque()
        self._done: list[Step] = []  # whose gradients backward's thread frees, which made them
        self._bytes = 0  # of gradients that wait, of the one in use, of those that are done
        self._open = 0  # steps that wait or run
        self._error: tuple[BaseException, Tensor] | None = None
        self._thread: threading.Thread | None = None
        self._threads = max(1, torch.get_num_threads() // _SHARE)
        self._ending = False

    @property
    def waiting_bytes(self) -> int:
        """Of gradients that wait, of the one in use, and of those that nobody has freed yet."""
        return self._bytes

    def takes(self, gradient: Tensor) -> bool:
        """Whether a gradient may wait here: it is not larger than the window."""
        return gradient.nbytes <= self.most_bytes and os.getpid() == self._process

    def put(self, step: Step) -> None:
        """Has a step run in its turn. Waits for room.

        Raises:
            Exception: of a step before it; this one is not run then. `failed` says which.
        """
        size = step.gradient_bytes
        with self._changed:
            self._free()
            while self._error is None and self._bytes and self._bytes + size > self.most_bytes:
                self._changed.wait()
                self._free()
            self._raise()
            self._waiting.append(step)
            self._bytes += size
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="memscale-steps", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all have run.

        Raises:
            Exception: of the first that failed.
        """
        self._await()
        self._raise()

    def failed(self) -> Tensor | None:
        """Waits until all have run, and forgets what failed: the parameter, or None."""
        self._await()
        error, self._error = self._error, None
        return None if error is None else error[1]

    def end(self) -> None:
        """Ends the thread when it has run what waits."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _await(self) -> None:
        if os.getpid() != self._process:  # a child of fork has no thread, and the lock may be taken
            return
        with self._changed:
            while self._open:
                self._changed.wait()
            self._free()

    def _free(self) -> None:
        self._bytes -= sum(step.gradient_bytes for step in self._done)
        self._done.clear()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error[0]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:
                    return
                step = self._waiting.popleft()
            try:
                step.run(threads(self._threads))
            except BaseException as error:
                self._error = self._error or (error, step.parameters[0])
            with self._changed:
                self._done.append(step)
                del step
                self._open -= 1
                self._changed.notify_all()
