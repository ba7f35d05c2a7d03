# SPDX-License-Identifier: Apache-2.0
"""The loop's part of a graph: from the roots of a backward to the outputs of forwards.

Nodes have numbers, in the order in which a thread makes them. So the nodes of a forward are known by the
numbers that it began and ended with, and a way to one that does not lead through an output is found.

    loss ─► … ─► boundary            the model's graph is behind it
            └──► a node with a number from inside the forward: a tensor that has left the model another way
            └──► weight              the loss uses it, too
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memscale.torchkit.compiled import never_compiled

_REASON_WEIGHTS = "its loop asks for gradients of single weights or inner tensors (autograd.grad, inputs=)"
_REASON_TWICE = "its loop runs a backward with create_graph=True"
_REASON_BESIDE = (
    "its loop uses a tensor from inside of the forward that is no output (an attribute, a cast of autocast's)"
)
_REASON_WEIGHT = "its loss uses weights of the model beside a forward"


class Window(NamedTuple):
    """The nodes of one forward.

    Attributes:
        thread: that has run it; numbers are a thread's own.
        begin: number of the first.
        end: one after the last.
        outputs: of what it has returned; empty where a boundary is there.
        weight_ids: ids of the weights that the model trains.
    """

    thread: int
    begin: int
    end: int
    outputs: frozenset[int]
    weight_ids: frozenset[int]

    def has(self, number: int) -> bool:
        """Whether a node is of this forward, seen from its thread."""
        return self.begin <= number < self.end and self.thread == threading.get_ident()


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
        leaf_ids: ids of the leaves that it uses.
    """

    def __init__(
        self, roots: Iterable[Any], windows: Sequence[Window], boundary_of: Callable[[Any], Any]
    ) -> None:
        self.boundaries: list[Any] = []
        self.reached: set[Window] = set()
        self.leaks: set[Window] = set()
        self.leaf_ids: set[int] = set()
        pending = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
        self.leaf_ids |= {id(root) for root in roots if getattr(root, "is_leaf", False)}
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node is None or self._is_end(node, windows, boundary_of):
                continue
            for child, _ in node.next_functions:
                leaf = getattr(child, "variable", None)
                if leaf is not None:
                    self.leaf_ids.add(id(leaf))
                elif child is not None and child not in seen:
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
        if any(id(item) in weight_ids or _is_inside(item, windows) for item in inputs):
            return _REASON_WEIGHTS
        if self.leaks:
            return _REASON_BESIDE
        return _REASON_WEIGHT if self.leaf_ids & weight_ids else ""


def _is_inside(item: Any, windows: Sequence[Window]) -> bool:
    """Whether an input of a backward is a tensor, or an edge, from inside of a forward that is no output."""
    node = getattr(item, "node", None) or getattr(item, "grad_fn", None)
    if node is None:
        return False
    number = node._sequence_nr()
    return any(window.has(number) and number not in window.outputs for window in windows)


def leads_beside(outputs: Iterable[Tensor], window: Window) -> bool:
    """Whether the graph of a forward goes on into what was there before it, other than the model's weights.

    Args:
        outputs: of the forward.
        window: its nodes.
    """
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if node._sequence_nr() < window.begin or (leaf is not None and id(leaf) not in window.weight_ids):
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return False


never_compiled(OuterGraph, leads_beside, next_number)
