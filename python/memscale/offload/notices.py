# SPDX-License-Identifier: Apache-2.0
"""Warnings of an offload engine: each once per model, however often it recurs.

The engine learns in its first step that memory cannot be pinned or that a disk is full. Nothing stops then,
but memory or time may be other than planned, and nobody would look for a reason in the counters.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from memscale import log
from memscale.offload.figures import TIER_NAMES, troubles

if TYPE_CHECKING:
    from memscale.offload.engine import Offload

__all__ = ["warn"]

_said: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""By model, what was said: names of tiers and kinds of trouble."""


def warn(model: nn.Module, offload: Offload) -> None:
    """Logs what is new. Called after every forward.

    Args:
        model: which is wrapped.
        offload: its engine.
    """
    said = _said.setdefault(model, set())
    for note in offload.notes():
        name, _, why = note.partition(": ")
        tier = TIER_NAMES[name]
        if tier not in said:
            said.add(tier)
            log.LOGGER.warning("offload: the %s tier is not used as asked: %s", tier, why)
    for kind, text in troubles(offload.counters()).items():
        if kind not in said:
            said.add(kind)
            log.LOGGER.warning("offload: %s", text)
