# SPDX-License-Identifier: Apache-2.0
"""Switches off what a transformers model does on its own and what does not go with blocks that run twice.

    key/value cache       a checkpointed block that appends to a cache would append again when it is
                          recomputed; in training the cache serves nothing
    its own checkpoints   (`model.gradient_checkpointing_enable()`) inside ours they would run a block three
                          times; the plan decides instead, block by block

Both are flags, on configurations and on modules, and found as such, without a list of classes.

A cache of keys and values changes no bit of a training step. That of recurrent layers does: with it a model
takes another way (a convolution over a padded state), and its gradients have other last bits. Models that say
so of themselves (`_is_stateful`) keep it.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from memscale.techniques import plain_copies

_FLAG = "gradient_checkpointing"


def configs_with_cache(model: nn.Module, stateful: bool = False) -> list[Any]:
    """The distinct configuration objects in a model that have `use_cache` on.

    Args:
        model: of any kind.
        stateful: those of models whose recurrent layers compute otherwise without it, else all others.
    """
    found: dict[int, Any] = {}
    recurrent = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            found[id(config)] = config
            if getattr(module, "_is_stateful", False) is True:
                recurrent.add(id(config))
    return [config for key, config in found.items() if (key in recurrent) is stateful]


def modules_with_checkpoints(model: nn.Module) -> list[nn.Module]:
    """Modules that have checkpoints of their own, switched on or off."""
    return [module for module in model.modules() if isinstance(getattr(module, _FLAG, None), bool)]


class CacheSwitch:
    """`use_cache` and the model's own checkpoints off, and on again.

    Attributes:
        configs: configurations whose cache is on.
    """

    name = "use_cache"

    def __init__(self, model: nn.Module) -> None:
        self.configs = configs_with_cache(model)
        # Weakly: the model itself may be among them, and it owns the executor that owns this.
        self._flagged = [weakref.ref(module) for module in modules_with_checkpoints(model)]
        self._on = [ref for ref in self._flagged if _is_on(ref())]
        self._twins: dict[int, Any] = {}  # by the id of a configuration: what copies of the model have for it
        held = {id(config) for config in self.configs}
        touched = (
            module for module in model.modules() if any(id(part) in held for part in vars(module).values())
        )
        modules = {id(module): module for module in (*modules_with_checkpoints(model), *touched)}
        self._touched = [weakref.ref(module) for module in modules.values()]

    @property
    def checkpoints(self) -> int:
        """Number of modules whose own checkpoints it switches off."""
        return len(self._on)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to switch off."""
        return bool(self.configs or self._on)

    @property
    def lines(self) -> list[str]:
        """What it does, for the log."""
        lines = ["use_cache  switched off while blocks are checkpointed"] if self.configs else []
        if self._on:
            lines.append(f"replaces   the model's own gradient checkpointing ({len(self._on)} modules)")
        return lines

    def attach(self) -> None:
        """Switches them off wherever they are on."""
        for config in self.configs:
            config.use_cache = False
        self._set(False)
        self._twins = {
            id(config): copy.copy(config) for config in self.configs if hasattr(config, "__dict__")
        }
        for module in self._alive():
            plain_copies.begin(module, self._put_right)

    def hold(self) -> None:
        """Switches checkpoints off that have been switched on since: a trainer does so when it begins."""
        on = [ref for ref in self._flagged if _is_on(ref())]
        if on:
            self._on += [ref for ref in on if ref not in self._on]
            self._set(False)

    def undo(self) -> None:
        """Switches them on where they were."""
        for module in self._alive():
            plain_copies.end(module, self._put_right)
        for config in self.configs:
            config.use_cache = True
        self._set(True)

    def _alive(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self._touched) if module is not None]

    def _put_right(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Switches on in the attributes of a copy what is on without this.

        A configuration that modules share is one in their copies, too: the same for all of them.
        """
        if _FLAG in attributes and any(ref() is module for ref in self._on):
            attributes[_FLAG] = True
        for key, value in attributes.items():
            twin = self._twins.get(id(value))
            if twin is not None:
                vars(twin).clear()
                vars(twin).update(vars(value))
                twin.use_cache = True
                attributes[key] = twin

    def _set(self, value: bool) -> None:
        for module in (ref() for ref in self._on):
            if module is not None:
                setattr(module, _FLAG, value)


def _is_on(module: nn.Module | None) -> bool:
    return getattr(module, _FLAG, False) is True
