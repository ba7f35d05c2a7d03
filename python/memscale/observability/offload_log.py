# SPDX-License-Identifier: Apache-2.0
"""What an offload engine found out on the way, as warnings: each once for a model, however often it recurs.

The engine learns in its first step that memory cannot be pinned or that a disk is full. Nothing stops then,
but memory or time may be other than planned, and nobody would look for a reason in the counters.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from memscale.observability import logs
from memscale.observability.offload_figures import TIER_NAMES, troubles

if TYPE_CHECKING:
    from memscale.core.executor import Executor
    from memscale.offload.engine import Offload

__all__ = ["warn"]

_said: weakref.WeakKeyDictionary[Executor, set[str]] = weakref.WeakKeyDictionary()
"""By model, what was said: names of tiers and kinds of trouble."""


def warn(executor: Executor, offload: Offload) -> None:
    """Logs what is new. Called after every forward.

    Args:
        executor: of the model.
        offload: its engine.
    """
    said = _said.setdefault(executor, set())
    for note in offload.notes():
        name, _, why = note.partition(": ")
        tier = TIER_NAMES[name]
        if tier not in said:
            said.add(tier)
            logs.LOGGER.warning("offload: the %s tier is not used as asked: %s", tier, why)
    for kind, text in troubles(offload.counters()).items():
        if kind not in said:
            said.add(kind)
            logs.LOGGER.warning("offload: %s", text)
