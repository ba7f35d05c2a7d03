# SPDX-License-Identifier: Apache-2.0
"""The optimizers of one model: the one that the caller named, and those that have stepped it.

A model may have several (Muon for matrices and AdamW for the rest, one for each part). No parameter is
stepped by two of them here: who steps one that another had takes that one's place, as where the loop has made
a new optimizer for the same parameters.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim import Optimizer

from memscale.optim.kinds import inner_of


class KnownOptimizers:
    """Holds them weakly.

    Args:
        named: by the caller, or None.
    """

    def __init__(self, named: Optimizer | None = None) -> None:
        self._named = None if named is None else weakref.ref(named)
        self._all = [] if named is None else [weakref.ref(named)]

    @property
    def all(self) -> tuple[Optimizer, ...]:
        """Those that there still are; the named one is the first."""
        return tuple(item for item in (ref() for ref in self._all) if item is not None)

    @property
    def named(self) -> Optimizer | None:
        """The one that the caller has named, unless it has been replaced."""
        named = None if self._named is None else self._named()
        return named if any(item is named for item in self.all) else None

    def name(self, optimizer: Optimizer) -> None:
        """The caller's is this one from now on: the one named before has stood in for it."""
        before, self._named = self.named, weakref.ref(optimizer)
        self._all = [self._named, *(weakref.ref(item) for item in self.all if item is not before)]

    def note(self, optimizer: Optimizer, model: nn.Module) -> bool:
        """An optimizer is about to step; it counts if it is one of this model's.

        Returns:
            Whether it has taken the place of the one that the caller has named.
        """
        known, had_named = self.all, self._named is not None and self._named in self._all
        if any(item is optimizer or inner_of(item) is optimizer for item in known):
            return False
        theirs = _parameters(optimizer)
        if theirs.isdisjoint(id(parameter) for parameter in model.parameters()):
            return False
        kept = [item for item in known if theirs.isdisjoint(_parameters(item))]
        self._all = [weakref.ref(item) for item in (*kept, optimizer)]
        return had_named and self.named is None


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
