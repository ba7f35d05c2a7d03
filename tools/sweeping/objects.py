# SPDX-License-Identifier: Apache-2.0
"""Every tensor that Python holds, also among objects that the garbage collector was told to leave alone."""

from __future__ import annotations

import gc
from typing import Any

import torch


def living() -> list[Any]:
    """All objects, after a collection.

    The processes of a sweep are frozen (`gc.freeze`) when they begin, and planning freezes again: what it
    left behind would hide among the frozen ones.
    """
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    return found


def living_tensors() -> list[torch.Tensor]:
    """Those that are tensors, by their type: some objects pretend to be what they are not."""
    found = living()
    kinds = {kind for kind in set(map(type, found)) if issubclass(kind, torch.Tensor)}
    return [item for item in found if type(item) in kinds]
