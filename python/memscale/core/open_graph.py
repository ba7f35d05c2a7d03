# SPDX-License-Identifier: Apache-2.0
"""Whether graphs of a loop's forwards still wait for their backward, told without holding them.

a = model(x)      none waits     count 0
b = model(y)      that of a      count 1: this step has two forwards, and so will later ones
loss(a, b).backward()
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

from memscale.core.leaves import tensors_of


class _Life:
    """Lives as long as a node of autograd's graph, in the node's own dictionary."""

    __slots__ = ("__weakref__", "has_run")

    def __init__(self) -> None:
        self.has_run = False


_KEY = "memscale_life"

_COUNTS: Final = (1, 2, 3, 4, 8)
"""Forwards before one backward that plans are made for: each of them is traced. More are not counted."""


class OpenGraph:
    """The graph behind an output.

    Args:
        output: of a forward, of any structure.

    Attributes:
        thread: that has run the forward.
    """

    def __init__(self, output: Any) -> None:
        self.thread = threading.get_ident()
        self._lives: list[weakref.ref[_Life]] = []
        nodes: set[Any] = {leaf.grad_fn for leaf in tensors_of(output)}
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


class OpenGraphs:
    """Those of a loop's forwards; each thread that runs the model has a loop of its own.

    Attributes:
        waiting: how many of this thread's waited when the latest forward was about to run.
        are_of_others: some of another thread's did.
        most: forwards that were seen before one backward.
    """

    def __init__(self) -> None:
        self._graphs: list[OpenGraph] = []
        self.waiting = 0
        self.are_of_others = False
        self.most = 1

    def look(self) -> None:
        """Counts: a forward is about to run."""
        self._graphs = [graph for graph in self._graphs if graph.waits]
        me = threading.get_ident()
        self.waiting = sum(graph.thread == me for graph in self._graphs)
        self.are_of_others = self.waiting < len(self._graphs)
        self.most = max(self.most, self.waiting + 1)

    def add(self, output: Any) -> None:
        """A forward has run."""
        if len(self._graphs) <= _COUNTS[-1]:
            self._graphs.append(OpenGraph(output))

    @property
    def planned(self) -> int:
        """Forwards that a step is to be planned for."""
        return next((count for count in _COUNTS if count >= self.most), _COUNTS[-1])

    @property
    def are_too_many(self) -> bool:
        """More than plans count."""
        return self.most > self.planned


class _RanOnce:
    """A hook of a node that notes that a backward has passed. It must not hold what the node holds."""

    __slots__ = ("_life",)

    def __init__(self, life: _Life) -> None:
        self._life = weakref.ref(life)

    def __call__(self, *gradients: Any) -> None:
        life = self._life()
        if life is not None:
            life.has_run = True
