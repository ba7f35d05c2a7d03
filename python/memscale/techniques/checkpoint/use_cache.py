# SPDX-License-Identifier: Apache-2.0
"""What a transformers model does on its own and what does not go with modules that are recomputed.

    key/value cache       caches that a training forward makes keep nothing, see `empty_caches`
    its own checkpoints   (`model.gradient_checkpointing_enable()`) inside ours they would run a block three
                          times; the plan decides instead, block by block, and an offload of what they hold
                          (`offload=True`) goes with them. A model that checkpoints itself
                          makes no cache, so none is made where ours are in their place

Configurations are as the user has them between forwards, and so on disk and in copies. The flags of own
checkpoints are found on modules, without a list of classes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from memscale.techniques.checkpoint.call_kinds import runs_plain
from memscale.techniques.checkpoint.empty_caches import (
    Seen,
    compiled_with_empty_caches,
    forward_with_empty_caches,
    hooks,
    is_given_a_cache,
)
from memscale.torchkit import plain_copies
from memscale.torchkit.forward_slot import ForwardSlot, StandIn

_FLAG = "gradient_checkpointing"

_TAKEN: Final = 0
"""The flag's value where MemScale has switched it off: as false as the user's own False, and yet no bool."""


def configs_of(model: nn.Module) -> list[Any]:
    """The distinct configuration objects in a model that say whether it uses a cache."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(getattr(config, "use_cache", None), bool)}
    return list(configs.values())


def modules_with_checkpoints(model: nn.Module) -> list[nn.Module]:
    """Modules that have checkpoints of their own, switched on or off."""
    return [module for module in model.modules() if isinstance(getattr(module, _FLAG, None), bool)]


class _OwnCheckpoints:
    """The flags of a model's own checkpoints; the user may switch them meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        # Weakly: the model itself may be among them, and it owns the executor that owns this.
        self._flagged = [weakref.ref(module) for module in modules_with_checkpoints(model)]

    @property
    def alive(self) -> list[nn.Module]:
        """The modules that have a flag."""
        return [module for module in (ref() for ref in self._flagged) if module is not None]

    @property
    def on(self) -> list[nn.Module]:
        """Those whose flag would be on without MemScale."""
        return [module for module in self.alive if _is_on(module) or _is_taken(module)]

    @property
    def would_run(self) -> bool:
        """Whether a forward would checkpoint itself, and make no cache."""
        return any(module.training for module in self.on)

    @property
    def offload(self) -> bool:
        """Whether what one of them holds waits in host memory (transformers from 5.17 on)."""
        run = (getattr(module, "_gradient_checkpointing_func", None) for module in self.on)
        codes = (getattr(getattr(item, "func", item), "__code__", None) for item in run)
        return any(code is not None and "save_on_cpu" in code.co_names for code in codes)

    def take(self) -> list[nn.Module]:
        """Switches off those that are on; returns them."""
        on = [module for module in self.alive if _is_on(module)]
        for module in on:
            setattr(module, _FLAG, _TAKEN)
        return on

    def give_back(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Switches on again what `take` has switched off and the user has not set since.

        Args:
            modules: of these; None: of all.
        """
        for module in self.alive if modules is None else modules:
            if _is_taken(module):
                setattr(module, _FLAG, True)


class _Forward(StandIn):
    """Stands in for the model's forward.

    Args:
        configs: of the model, which say whether it uses a cache.
        own: its own checkpoints.
        cache_stays: its caches are to stay as they are.
        reads_lengths: of caches that it has filled, which is not known in compiled code.
    """

    calls_through = True

    def __init__(
        self,
        module: nn.Module,
        original: Any,
        configs: list[Any],
        own: _OwnCheckpoints,
        cache_stays: bool,
        reads_lengths: bool,
    ) -> None:
        super().__init__(module, original)
        self.configs = configs
        self.own = own
        self.cache_stays = cache_stays
        self.reads_lengths = reads_lengths

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with caches that keep nothing, or none where the model would make none."""
        if self.passive or not torch.is_grad_enabled():
            return self.run_original(*args, **kwargs)
        if self.own.would_run:
            on = _switched_off(self.configs)
            try:
                return self.run_original(*args, **_without_cache(kwargs))
            finally:
                _switch_on(on)
        if self.cache_stays or is_given_a_cache(args, kwargs):
            return self.run_original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.reads_lengths:  # layers that are given a real cache are not checkpointed
                return self.run_original(*args, **kwargs)
            return compiled_with_empty_caches(self.run_original, args, kwargs)
        if runs_plain():
            return self.original(*args, **kwargs)
        with forward_with_empty_caches():
            return self.original(*args, **kwargs)


class CacheSwitch:
    """Caches that keep nothing, and the model's own checkpoints off.

    Args:
        model: of any kind.
        beneath: the executor's watch over the model's forward; None for the front.
        cache_stays: why its caches are to stay as they are; "" if they need not.
        reads_lengths: see `Seen`.

    Attributes:
        configs: configurations that say whether the model uses a cache.
    """

    name = "use_cache"

    def __init__(
        self,
        model: nn.Module,
        beneath: StandIn | None = None,
        cache_stays: str = "",
        reads_lengths: bool = False,
    ) -> None:
        self.configs = configs_of(model)
        self._own = _OwnCheckpoints(model)
        self._stays = cache_stays
        self._reads_lengths = reads_lengths
        self._model = weakref.ref(model)
        self._beneath = None if beneath is None else weakref.ref(beneath)
        self._slot: ForwardSlot | None = None
        self._is_attached = False

    @property
    def checkpoints(self) -> int:
        """Number of modules whose own checkpoints it switches off."""
        return len(self._own.on)

    @property
    def empties(self) -> bool:
        """Whether the model makes caches, and they are to keep nothing."""
        return not self._stays and any(config.use_cache for config in self.configs)

    @property
    def is_needed(self) -> bool:
        """Whether it changes anything that the model does."""
        return self.empties or bool(self._own.on)

    @property
    def lines(self) -> list[str]:
        """What it does, for the log."""
        if self._own.on:
            offload = ", and its offload of what they hold" if self._own.offload else ""
            return [
                f"replaces   the model's own gradient checkpointing ({self.checkpoints} modules){offload}"
            ]
        if not self.empties:
            return []
        return ["use_cache  stays on; caches that a training forward makes for itself keep nothing"]

    def attach(self) -> None:
        """From now on caches that a forward of the model makes keep nothing. Its own checkpoints are off."""
        self._is_attached = True
        self._own.take()
        for module in self._own.alive:
            plain_copies.begin(module, self._put_right)
        hooks.begin()
        model = self._model()
        if model is not None and self.configs:
            slot = ForwardSlot(model, "", None if self._beneath is None else self._beneath())
            facts = self.configs, self._own, bool(self._stays), self._reads_lengths
            slot.put(_Forward(model, slot.present, *facts))
            self._slot = slot

    def hold(self) -> None:
        """Switches checkpoints off that have been switched on since: a trainer does so when it begins."""
        self._own.take()

    def undo(self) -> None:
        """As before `attach`."""
        if not self._is_attached:
            return
        self._is_attached = False
        if self._slot is not None:
            self._slot.remove()
            self._slot = None
        hooks.end()
        for module in self._own.alive:
            plain_copies.end(module, self._put_right)
        self._own.give_back()

    @contextmanager
    def in_trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None
    ) -> Iterator[Seen]:
        """The block sees the model as `attach` has it, in this thread.

        Args:
            args: positional part of the batch that is traced.
            kwargs: keyword part.
            training: the mode that it is traced in; None: as it is.

        Yields:
            What the model does with caches meanwhile.
        """
        would_run = self._own.would_run if training is None else bool(self._own.on) and training
        with ExitStack() as stack:
            stack.callback(self._own.give_back, self._own.take())
            hooks.begin()
            stack.callback(hooks.end)
            if would_run:
                stack.callback(_switch_on, _switched_off(self.configs))
            if would_run or self._stays or is_given_a_cache(args, kwargs):
                yield Seen()
            else:
                yield stack.enter_context(forward_with_empty_caches())

    def _put_right(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Switches on in the attributes of a copy what is on without this."""
        if _FLAG in attributes and _is_taken(module):
            attributes[_FLAG] = True


def _switched_off(configs: list[Any]) -> list[Any]:
    """Switches the cache off where it is on, for a forward; returns where."""
    on = [config for config in configs if config.use_cache is True]
    for config in on:
        config.use_cache = False
    return on


def _switch_on(configs: list[Any]) -> None:
    for config in configs:
        config.use_cache = True


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A model that checkpoints itself does not listen to `use_cache=True`."""
    return {**kwargs, "use_cache": False} if kwargs.get("use_cache") is True else kwargs


def _is_on(module: nn.Module) -> bool:
    return getattr(module, _FLAG, False) is True


def _is_taken(module: nn.Module) -> bool:
    return type(value := getattr(module, _FLAG, None)) is int and value == _TAKEN
