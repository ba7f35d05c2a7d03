# SPDX-License-Identifier: Apache-2.0
"""Says now and then that a long planning goes on: a large model takes seconds for each trace."""

from __future__ import annotations

import time

from memscale.observability import logs

_FIRST_SECONDS = 10.0


class Pace:
    """Of one planning. Its lines come after 10 s, 20 s, 40 s and so on; a short planning has none."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._next = _FIRST_SECONDS
        self._traced = 0

    def traced(self) -> None:
        """A step was traced."""
        self._traced += 1
        seconds = time.perf_counter() - self._began
        if seconds < self._next:
            return
        logs.LOGGER.info(
            "planning goes on: the step was traced in %d ways so far, in %.0f s", self._traced, seconds
        )
        while self._next <= seconds:
            self._next *= 2
