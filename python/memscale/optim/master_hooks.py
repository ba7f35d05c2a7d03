# SPDX-License-Identifier: Apache-2.0
"""Hooks that make `state_dict` and `load_state_dict` use the FP32 masters of BF16 weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from memscale.optim.masters import Master, master_of
from memscale.torchkit import plain_copies


class _ModuleHook(plain_copies.Ours):
    """Lies on a module in front of one of its methods. Copies, whose weights are FP32, are without it."""

    name = ""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.before = vars(module).get(self.name)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def put(self) -> None:
        """From now on it is called."""
        vars(self.module)[self.name] = self
        plain_copies.begin(self.module)

    def remove(self) -> None:
        """As before, unless somebody else's lies on top."""
        module = self._module()
        if module is None:
            return
        plain_copies.end(module)
        if vars(module).get(self.name) is not self:
            return
        if self.before is None:
            del vars(module)[self.name]
        else:
            vars(module)[self.name] = self.before

    def without(self, key: str) -> Any:
        """What was there before; nothing, where that is the class's own."""
        before = self.before
        if isinstance(before, plain_copies.Ours):
            return before.without(key)
        return plain_copies.GONE if before is None else before

    def original(self, *args: Any) -> Any:
        """Calls the method."""
        if self.before is not None:
            return self.before(*args)
        return getattr(type(self.module), self.name)(self.module, *args)

    def masters(self, prefix: str) -> Iterator[tuple[str, Master]]:
        """Masters of the module's own weights, by their keys."""
        for name, parameter in self.module._parameters.items():
            master = None if parameter is None else master_of(parameter)
            if master is not None:
                yield prefix + name, master


class _Saves(_ModuleHook):
    name = "_save_to_state_dict"

    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.original(destination, prefix, keep_vars)
        for key, master in self.masters(prefix):
            if not keep_vars and key in destination:
                destination[key] = master.shown()


class _Loads(_ModuleHook):
    name = "_load_from_state_dict"

    def __call__(self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        self.original(state_dict, prefix, metadata, *args)
        for key, master in self.masters(prefix):  # those that were assigned to are other parameters now
            value = state_dict.get(key)
            if isinstance(value, Tensor) and value.shape == master.parameter.shape and not value.is_meta:
                master.set(value)


def hooks_for(parameters: Iterable[nn.Parameter], model: nn.Module) -> list[_ModuleHook]:
    """What makes a model's state dict have the masters of some parameters; not put yet."""
    wanted = {id(parameter) for parameter in parameters}
    owners = [
        module
        for module in model.modules()
        if any(id(parameter) in wanted for parameter in module._parameters.values())
    ]
    return [kind(module) for module in owners for kind in (_Saves, _Loads)]
