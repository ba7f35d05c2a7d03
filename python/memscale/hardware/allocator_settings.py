# SPDX-License-Identifier: Apache-2.0
"""How PyTorch's CUDA allocator is set in this process: `PYTORCH_ALLOC_CONF`, as the simulator takes it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Final

from memscale import _core
from memscale.errors import MemScaleError

__all__ = ["EXPANDABLE", "AllocatorSettings", "allocator_settings"]

EXPANDABLE: Final = "expandable_segments:True"

_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one wins, as in PyTorch

_LIMITS: Final = ("per_process_memory_fraction", "garbage_collection_threshold")
"""Settings that act at a limit. A prediction says what would be needed without one."""

_OUTSIDE_BRACKETS: Final = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the allocator.

    Attributes:
        conf: What decides about segments, as in `PYTORCH_ALLOC_CONF`; "" for the defaults.
        note: What could not be taken into account, or "".
    """

    conf: str = ""
    note: str = ""

    @property
    def sim(self) -> dict[str, Any]:
        """The allocator, as `_core.replay` takes it."""
        return {"kind": "cuda", "alloc_conf": self.conf} if self.conf else {"kind": "cuda"}

    @property
    def is_expandable(self) -> bool:
        """Whether segments grow in place."""
        return EXPANDABLE.lower() in self.conf.lower().replace(" ", "")


def allocator_settings() -> AllocatorSettings:
    """The settings of this process. What the simulator refuses is left out, with a note."""
    name = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if name is None:
        return AllocatorSettings()
    text = os.environ[name]
    parts = [part.strip() for part in _OUTSIDE_BRACKETS.split(text)]
    kept = ",".join(part for part in parts if part and not part.startswith(_LIMITS))
    try:
        _core.Simulator("cuda", kept)
    except (MemScaleError, ValueError) as error:
        return AllocatorSettings(note=f"{name}={text!r} is not taken into account: {error}")
    return AllocatorSettings(kept)
