# SPDX-License-Identifier: Apache-2.0
"""Counts graphs of forwards that still wait for their backward, without holding them.

a = model(x)      none waits     count 0
b = model(y)      that of a      count 1: this step has two forwards, and so will later ones
loss(a, b).backward()            both are passed through, until it ends
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import torch

from memscale.torchkit.callers import is_there
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.graph_task import in_backward
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.output_use import SeenUse


class _Life:
    """Lives as long as a node of autograd's graph, in the node's own dictionary."""

    __slots__ = ("__weakref__", "has_run", "passing", "places", "seen")

    def __init__(self, seen: SeenUse, places: list[tuple[int, int]]) -> None:
        self.has_run = False
        self.seen = seen
        self.places = places
        self.passing: weakref.ref[_Pass] | None = None

    @property
    def runner(self) -> int:
        """The thread whose backward passes now; 0: none."""
        passing = None if self.passing is None else self.passing()
        return 0 if passing is None or passing.has_ended else passing.thread


_KEY = "memscale_life"

_COUNTS: Final = (1, 2, 3, 4, 8)
"""Forwards before one backward that plans are made for: each of them is traced. More are not counted."""


class OpenGraph:
    """The graph behind an output.

    Args:
        output: of a forward, of any structure.

    Attributes:
        thread: that has run the forward.
        seen: which of the outputs its backward goes through.
    """

    def __init__(self, output: Any) -> None:
        self.thread = threading.get_ident()
        self._lives: list[weakref.ref[_Life]] = []
        leaves = tensors_of(output)
        self.seen = SeenUse(leaves)
        nodes: dict[Any, list[tuple[int, int]]] = {}  # node → (place, which of its outputs)
        for place, leaf in enumerate(leaves):
            if leaf.grad_fn is not None:
                nodes.setdefault(leaf.grad_fn, []).append((place, leaf.output_nr))
        for node, places in nodes.items():
            life = _Life(self.seen, places)
            node.metadata[_KEY] = life  # the C++ node's: objects of Python that stand for it come and go
            node.register_prehook(_Begins(life))
            self._lives.append(weakref.ref(life))

    @property
    def waits(self) -> bool:
        """It is there, and no backward has gone through any of it."""
        lives = self._alive()
        return bool(lives) and not any(life.has_run for life in lives)

    @property
    def is_open(self) -> bool:
        """It waits, or a backward goes through it."""
        return self.waits or any(life.runner for life in self._alive())

    def is_open_elsewhere(self, me: int) -> bool:
        """Whether a thread that is not this one has a backward to run through it, or runs it."""
        runners = {life.runner for life in self._alive()} - {0}
        return bool(runners - {me}) or (self.waits and self.thread != me and is_there(self.thread))

    def _alive(self) -> list[_Life]:
        return [life for life in (ref() for ref in self._lives) if life is not None]


class OpenGraphs:
    """Those of a loop's forwards; each thread that runs the model has a loop of its own.

    Attributes:
        most: forwards that were seen before one backward.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._graphs: list[OpenGraph] = []
        self._waiting: dict[int, int] = {}
        self._seen: dict[int, SeenUse | None] = {}
        self.most = 1

    @property
    def waiting(self) -> int:
        """How many of this thread's waited when its latest forward was about to run."""
        return self._waiting.get(threading.get_ident(), 0)

    @property
    def seen(self) -> SeenUse | None:
        """What this thread's step before has shown of its outputs, as the latest forward was about to run."""
        return self._seen.get(threading.get_ident())

    @property
    def are_of_others(self) -> bool:
        """Whether another thread is between a forward and the end of its backward, now."""
        me = threading.get_ident()
        with self._lock:
            return any(graph.is_open_elsewhere(me) for graph in self._graphs)

    @property
    def are_there(self) -> bool:
        """Whether a backward of any thread is still to come, or under way, now."""
        with self._lock:
            return any(graph.is_open for graph in self._graphs)

    def look(self) -> None:
        """Counts: a forward is about to run."""
        me = threading.get_ident()
        with self._lock:
            own = [graph for graph in self._graphs if graph.thread == me and not graph.is_open]
            self._seen[me] = own[-1].seen if own else None
            self._graphs = [graph for graph in self._graphs if graph.is_open]
            self._waiting[me] = sum(graph.waits for graph in self._graphs if graph.thread == me)
            self.most = max(self.most, self._waiting[me] + 1)

    def add(self, output: Any) -> SeenUse | None:
        """A forward has run. Returns what its backward will fill; None: too many forwards wait for theirs."""
        me = threading.get_ident()
        with self._lock:
            if sum(graph.thread == me for graph in self._graphs) > _COUNTS[-1]:
                return None
            self._graphs.append(OpenGraph(output))
            return self._graphs[-1].seen

    @property
    def planned(self) -> int:
        """Forwards that a step is to be planned for."""
        return next((count for count in _COUNTS if count >= self.most), _COUNTS[-1])

    @property
    def are_too_many(self) -> bool:
        """More than plans count."""
        return self.most > self.planned


class _Begins:
    """A hook of a node that notes a backward from here to its end. It must not hold what the node holds."""

    __slots__ = ("_life",)

    def __init__(self, life: _Life) -> None:
        self._life = weakref.ref(life)

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        life = self._life()
        if life is None:
            return
        life.has_run = True
        come = [(place, output) for place, output in life.places if _has_come(gradients, output)]
        life.seen.note([place for place, _ in come])
        if torch.is_grad_enabled():
            life.seen.keeps_graph = True
        elif life.seen.meter is not None:
            given = dict(enumerate(gradients))
            life.seen.meter.reached([(place, given.get(output)) for place, output in come])
        if torch.compiler.is_compiling() or not in_backward():
            return
        passing = _Pass(life.seen)
        life.passing = weakref.ref(passing)
        torch.autograd.Variable._execution_engine.queue_callback(passing)


def _has_come(gradients: tuple[Any, ...], output: int) -> bool:
    """Whether backward has come to this output of a node that may have several."""
    return output >= len(gradients) or gradients[output] is not None


class _Pass:
    """A backward. Autograd holds it and calls it at the end; one that fails is dropped."""

    __slots__ = ("__weakref__", "_seen", "has_ended", "thread")

    def __init__(self, seen: SeenUse) -> None:
        self.thread = threading.get_ident()
        self.has_ended = False
        self._seen = seen

    def __call__(self) -> None:
        self.has_ended = True
        self._seen.backward_is_over()


never_compiled(_Begins, _Pass)
