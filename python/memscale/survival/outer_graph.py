# SPDX-License-Identifier: Apache-2.0
"""The loop's part of a graph: from the roots of a backward to the outputs of forwards.

Nodes have numbers, in the order in which a thread makes them. So the nodes of a forward are known by the
numbers that it began and ended with, and a way to one that does not lead through an output is found.

    loss ─► … ─► boundary            the model's graph is behind it
            └──► a node with a number from inside the forward: a tensor that has left the model another way
            └──► weight              the loss uses it, too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memscale.torchkit.compiled import never_compiled

_REASON_WEIGHTS = "its loop asks for gradients of single weights (autograd.grad, inputs=)"
_REASON_TWICE = "its loop runs a backward with create_graph=True"
_REASON_BESIDE = (
    "its loop uses a tensor from inside of the forward that is no output (an attribute, a cast of autocast's)"
)
_REASON_BEFORE = "its loss uses weights of the model from before a forward"


class Window(NamedTuple):
    """The nodes of one forward.

    Attributes:
        begin: number of the first.
        end: one after the last.
        outputs: of what it has returned; empty where a boundary is there.
        weight_ids: ids of the weights that the model trains.
    """

    begin: int
    end: int
    outputs: frozenset[int]
    weight_ids: frozenset[int]

    def has(self, number: int) -> bool:
        """Whether a node is of this forward."""
        return self.begin <= number < self.end


def next_number() -> int:
    """Of the node that this thread makes next."""
    return int(torch._C._autograd._get_sequence_nr())


class OuterGraph:
    """The loop's part of the graph of some roots.

    Args:
        roots: tensors, or edges.
        windows: of forwards whose graphs are in question.
        boundary_of: gives what stands behind a function's node, or None.

    Attributes:
        boundaries: what `boundary_of` has given.
        reached: windows whose outputs it leads to.
        leaks: it leads into a window another way.
        uses: id of a leaf → (leaf, lowest number of what uses it there).
    """

    def __init__(
        self, roots: Iterable[Any], windows: Sequence[Window], boundary_of: Callable[[Any], Any]
    ) -> None:
        self.boundaries: list[Any] = []
        self.reached: set[Window] = set()
        self.leaks: set[Window] = set()
        self.uses: dict[int, tuple[Tensor, int]] = {}
        pending = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node is None or self._is_end(node, windows, boundary_of):
                continue
            for child, _ in node.next_functions:
                self._note_use(child, node)
                if child is not None and child not in seen:
                    seen.add(child)
                    pending.append(child)

    def _is_end(self, node: Any, windows: Sequence[Window], boundary_of: Callable[[Any], Any]) -> bool:
        behind = boundary_of(node) if isinstance(node, BackwardCFunction) else None
        if behind is not None:
            self.boundaries.append(behind)
            return True
        number = node._sequence_nr()
        for window in windows:
            if window.has(number):
                (self.reached if number in window.outputs else self.leaks).add(window)
                return True
        return False

    def _note_use(self, child: Any, node: Any) -> None:
        leaf = getattr(child, "variable", None)
        if leaf is not None:
            number = node._sequence_nr()
            self.uses[id(leaf)] = (leaf, min(number, self.uses.get(id(leaf), (leaf, number))[1]))

    def uses_of(self, weight_ids: Iterable[int]) -> list[tuple[Tensor, int]]:
        """Of some weights those that it uses."""
        return [self.uses[key] for key in sorted(self.uses.keys() & set(weight_ids))]

    def why_not(self, windows: Sequence[Window], create_graph: bool, inputs: Iterable[Any]) -> str:
        """Why forwards cannot be repeated in this backward; "": they can.

        Args:
            windows: of the forwards that it goes through.
            create_graph: of the backward.
            inputs: of the backward.
        """
        if create_graph:
            return _REASON_TWICE
        weight_ids = {key for window in windows for key in window.weight_ids}
        if any(id(item) in weight_ids for item in inputs):
            return _REASON_WEIGHTS
        if self.leaks:
            return _REASON_BESIDE
        for leaf, number in self.uses_of(weight_ids):
            if any(id(leaf) in window.weight_ids and number < window.end for window in windows):
                return _REASON_BEFORE
        return ""


def leads_before(outputs: Iterable[Tensor], begin: int) -> bool:
    """Whether the graph of a forward goes on into what was there before it, other than weights.

    Args:
        outputs: of the forward.
        begin: number of its first node.
    """
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if node._sequence_nr() < begin:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return False


never_compiled(OuterGraph, leads_before, next_number)
