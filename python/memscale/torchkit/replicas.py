# SPDX-License-Identifier: Apache-2.0
"""Wrappers that make replicas of a model: which module has the plan, and which wrapper is refused.

`nn.DataParallel` is refused: its replicas share the stand-ins of the module that they were copied from. A
replica copies the module's attributes for each forward. The stand-in among them runs the original module,
with the original's weights on the original's device, whatever the replica holds.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale.torchkit.forward_slot import StandIn
from memscale.torchkit.plain_copies import Ours

_NAME = "_replicate_for_data_parallel"  # nn.Module's own, called for each replica
_WHY = (
    "nn.DataParallel does not go with MemScale: its replicas would run the wrapped module in place of "
    "themselves. Use DistributedDataParallel, one process per GPU; or memscale.detach the model first"
)


def refuse(model: nn.Module) -> None:
    """Raises TypeError for a model that is, or contains, an `nn.DataParallel`."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise TypeError(_WHY)


def wrapped_one(model: nn.Module) -> nn.Module:
    """The module that has the plan: the one inside of a `DistributedDataParallel`, if that was wrapped.

    Raises:
        TypeError: techniques of an outer module's plan lie on this one.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel) and not _has_executor(model):
        inner: nn.Module = model.module
        if _has_executor(inner):
            return inner
    if any(map(_has_executor, model.modules())):
        return model
    if any(isinstance(module.__dict__.get("forward"), StandIn) for module in model.modules()):
        raise TypeError(
            f"this {type(model).__name__} is a part of a model that MemScale wraps; give the model that was "
            "given to wrap"
        )
    return model


def _has_executor(module: nn.Module) -> bool:
    return "_memscale_executor" in module.__dict__


class ReplicaGuard(Ours):
    """Lies on a wrapped model, in front of the method that makes a replica."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def put(self) -> None:
        """From now on no replica can be made."""
        module = self._module()
        assert module is not None
        module.__dict__[_NAME] = self

    def remove(self) -> None:
        """As before."""
        module = self._module()
        if module is not None and module.__dict__.get(_NAME) is self:
            del module.__dict__[_NAME]

    def __call__(self) -> NoReturn:
        """Refuses."""
        raise TypeError(_WHY)


def replicas_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DDP in a model, and the one around it, if the model's forward runs in that one's."""
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    around = replica_around(model)
    return found if around is None else [around, *found]


def replica_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP whose forward is running around a model, if any."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is None or active is model or not any(module is model for module in active.modules()):
        return None
    return active  # type: ignore[no-any-return]
