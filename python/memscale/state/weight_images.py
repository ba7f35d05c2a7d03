# SPDX-License-Identifier: Apache-2.0
"""Weights that a forward exchanges: `self.weight.data = …`, as constraints on norms do, or `self.weight = …`.

A recompute would read other weights than the first, and exchange them again. The same with gradients: a
forward that runs a backward of its own (local losses), or clears a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memscale.torchkit import sharding
from memscale.torchkit.leaves import gradient_of
from memscale.weights.placement import lasting_address


class _Held(NamedTuple):
    path: str
    module: nn.Module
    name: str
    parameter: nn.Parameter
    data: Tensor


class WeightImages:
    """What the parameters of a model are bound to, and what their data are."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            _Held(path, module, name, parameter, parameter.data)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and _has_storage(parameter)
        ]

    def exchanged(self) -> set[str]:
        """Paths of modules that have another parameter now, or one with other data."""
        return {held.path for held in self._held if _is_exchanged(held)}

    def restore(self) -> None:
        """Gives parameters the data back that they had."""
        for held in self._held:
            if lasting_address(held.parameter) != lasting_address(held.data):
                held.parameter.data = held.data


class GradientImages:
    """The gradients of a model's parameters before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (path, parameter, gradient_of(parameter))
            for path, module in model.named_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def exchanged(self) -> set[str]:
        """Paths of modules with a parameter whose gradient has changed."""
        return {path for path, parameter, before in self._held if gradient_of(parameter) != before}


def _has_storage(parameter: nn.Parameter) -> bool:
    strided = parameter.layout is torch.strided
    return strided and not is_lazy(parameter) and not sharding.is_sharded(parameter)


def _is_exchanged(held: _Held) -> bool:
    # A scripted module's registry has no `get`, and gives other objects each time.
    if (
        isinstance(held.module._parameters, dict)
        and held.module._parameters.get(held.name) is not held.parameter
    ):
        return True
    return lasting_address(held.parameter) != lasting_address(held.data)
