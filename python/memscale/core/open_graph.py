# SPDX-License-Identifier: Apache-2.0
"""Whether the graph of a forward still waits for its backward, told without holding it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class _Life:
    """Lives as long as a node of autograd's graph, in the node's own dictionary."""

    __slots__ = ("__weakref__", "has_run")

    def __init__(self) -> None:
        self.has_run = False


_KEY = "memscale_life"


class OpenGraph:
    """The graph behind an output.

    Args:
        output: of a forward, of any structure.
    """

    def __init__(self, output: Any) -> None:
        self._lives: list[weakref.ref[_Life]] = []
        nodes: set[Any] = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        for node in nodes - {None}:
            life = _Life()
            node.metadata[_KEY] = life  # the C++ node's: objects of Python that stand for it come and go
            node.register_hook(_RanOnce(life))
            self._lives.append(weakref.ref(life))

    @property
    def waits(self) -> bool:
        """It is there, and no backward has gone through any of it."""
        lives = [life for life in (ref() for ref in self._lives) if life is not None]
        return bool(lives) and not any(life.has_run for life in lives)


class _RanOnce:
    """A hook of a node that notes that a backward has passed. It must not hold what the node holds."""

    __slots__ = ("_life",)

    def __init__(self, life: _Life) -> None:
        self._life = weakref.ref(life)

    def __call__(self, *gradients: Any) -> None:
        life = self._life()
        if life is not None:
            life.has_run = True
