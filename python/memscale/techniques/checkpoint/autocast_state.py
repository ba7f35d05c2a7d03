# SPDX-License-Identifier: Apache-2.0
"""Autocast as it is: read before a forward, and put back after its recompute."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memscale.torchkit.compiled import never_compiled


class AutocastPresent:
    """Autocast before a recompute, which may have entered it without leaving it.

    Attributes:
        nesting: how many contexts of it are open.
        states: its state for each kind of device.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self.nesting = autocast_nesting()
        self.states = list(map(autocast_state, kinds))

    def put_back(self) -> None:
        """Makes it the present one again."""
        for _ in range(autocast_nesting() - self.nesting):
            torch.autocast_decrement_nesting()
        for state in self.states:
            kind, dtype, enabled, cached = state
            if autocast_state(kind) != state:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_cache_enabled(cached)


def autocast_nesting() -> int:
    """How many contexts of autocast are open."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def autocast_state(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    """For a kind of device: it, the type to cast to, whether it is on, and whether casts are cached."""
    return (
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )


never_compiled(autocast_state)
