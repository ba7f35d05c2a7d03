# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call as a list of leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from memscale.torchkit.compiled import never_compiled

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

_LEAVES = (Tensor, int, float, str, type(None), torch.dtype)
"""Arguments that hold nothing else."""


class FlatSpec:
    """A call without containers among its arguments: there is nothing to flatten."""

    __slots__ = ("names", "positional")

    def __init__(self, positional: int, names: tuple[str, ...]) -> None:
        self.positional = positional
        self.names = names

    def unflatten(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Positional and keyword arguments."""
        named = zip(self.names, leaves[self.positional :], strict=True)
        return tuple(leaves[: self.positional]), dict(named)


def flattened(call: tuple[Any, Any]) -> tuple[list[Any], TreeSpec | FlatSpec]:
    """The leaves of positional and keyword arguments, and how they are put together again."""
    args, kwargs = call
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            return tree_flatten(call)
    return leaves, FlatSpec(len(args), tuple(kwargs))


never_compiled(FlatSpec, flattened)
