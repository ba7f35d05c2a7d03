# SPDX-License-Identifier: Apache-2.0
"""Switches a transformers model's key/value cache off while its blocks run twice.

A checkpointed block that appends to a cache would append again when it is recomputed. In training the cache
serves nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def configs_with_cache(model: nn.Module) -> list[Any]:
    """The distinct configuration objects in a model that have `use_cache` on."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            found[id(config)] = config
    return list(found.values())


class CacheSwitch:
    """`use_cache` off, and on again."""

    name = "use_cache"

    def __init__(self, model: nn.Module) -> None:
        self.configs = configs_with_cache(model)

    def attach(self) -> None:
        """Switches it off wherever it is on."""
        for config in self.configs:
            config.use_cache = False

    def undo(self) -> None:
        """Switches it on where it was."""
        for config in self.configs:
            config.use_cache = True
