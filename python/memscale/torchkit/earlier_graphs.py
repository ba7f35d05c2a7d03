# SPDX-License-Identifier: Apache-2.0
"""Where the graph of a trace goes on into graphs that were there before it.

A model may read a tensor that has a graph: an encoder's output in an object, the keys of an earlier forward
in a cache. That graph waits for a backward of the program's own. One of a trace must end where it begins:

    loss ◄── nodes of the trace ◄── edge ◄── an earlier node ◄── its leaves

PyTorch numbers the nodes that a thread makes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memscale.errors import ProfileError
from memscale.torchkit.leaves import tensors_of


class Edge(NamedTuple):
    """From a node of a trace to an earlier one.

    Attributes:
        parent: the former, whose backward makes a gradient for the latter.
        node: the latter.
        output: number of the tensor that it has made.
    """

    parent: Any
    node: Any
    output: int


class Extent(NamedTuple):
    """Where the graph of a trace ends.

    Attributes:
        leaves: that it reaches by itself, some of them also from earlier graphs.
        edges: into earlier graphs.
        earlier_leaves: ids of the leaves of these.
    """

    leaves: list[Tensor]
    edges: list[Edge]
    earlier_leaves: frozenset[int]

    def own_leaves(self) -> list[Tensor]:
        """Leaves to which no earlier graph leads: backward to them runs into none."""
        return [leaf for leaf in self.leaves if id(leaf) not in self.earlier_leaves]


def nodes_so_far() -> int:
    """The number that this thread's next node will have."""
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        node = torch.ones(1, requires_grad=True).view(1).grad_fn
    assert node is not None
    return int(node._sequence_nr()) + 1


def extent_of(loss: Tensor, since: int, earlier: Collection[Any] = ()) -> Extent:
    """Follows a trace's graph to its ends.

    Args:
        loss: where it begins.
        since: `nodes_so_far` when the trace began.
        earlier: nodes known to be of earlier graphs, whatever their numbers: another thread made them.
    """
    known = set(earlier)
    leaves, found, edges = _walk([loss.grad_fn], lambda node: node._sequence_nr() < since or node in known)
    if not edges:
        return Extent(leaves, [], frozenset())
    beyond, *_ = _walk([edge.node for edge in edges], lambda node: node in found)
    return Extent(leaves, edges, frozenset(map(id, beyond)))


def _walk(roots: Sequence[Any], ends_at: Any) -> tuple[list[Tensor], set[Any], list[Edge]]:
    """Leaves, nodes and edges to nodes at which it ends, of a graph."""
    leaves: dict[int, Tensor] = {}
    found: set[Any] = set()
    edges: list[Edge] = []
    pending = [root for root in roots if root is not None]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None:
            leaves[id(leaf)] = leaf
        for below, output in node.next_functions:
            if below is None:
                continue
            if type(below).__name__ != "AccumulateGrad" and ends_at(below):
                edges.append(Edge(node, below, output))
            else:
                pending.append(below)
    return list(leaves.values()), found, edges


def backward_to_edges(loss: Tensor, inputs: Sequence[Tensor], edges: Sequence[Edge]) -> None:
    """Backward of a trace to some leaves, with room for the gradients that go into earlier graphs.

    Args:
        loss: where it begins.
        inputs: the leaves, to which no earlier graph leads.
        edges: into earlier graphs.
    """
    gradients = _Gradients(edges)
    with ExitStack() as stack:
        for edge in edges:
            stack.callback(edge.parent.register_hook(gradients.hook_of(edge)).remove)
        if inputs:
            loss.backward(inputs=list(inputs))


class _Gradients:
    """What stands for the gradients of the tensors at edges: made with the first part, gone with the last."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._made: dict[tuple[Any, int], Tensor] = {}
        self._parts: dict[tuple[Any, int], int] = {}
        for edge in edges:
            key = edge.node, edge.output
            self._parts[key] = self._parts.get(key, 0) + 1

    def hook_of(self, edge: Edge) -> Any:
        """For the node that computes one part of a gradient."""
        key = edge.node, edge.output
        metadata = edge.node._input_metadata[edge.output]

        def part(*_: Any) -> None:
            if key not in self._made and not getattr(metadata, "is_nested_tensor", False):
                self._made[key] = torch.empty(metadata.shape, dtype=metadata.dtype, device=metadata.device)
            self._parts[key] -= 1
            if not self._parts[key]:
                self._made.pop(key, None)

        return part


def nodes_of(batch: Any) -> list[Any]:
    """Nodes that have made tensors among the arguments of a forward, in objects among them, too."""
    return [tensor.grad_fn for tensor in tensors_of(batch) if tensor.grad_fn is not None]


def check_apart(loss: Tensor, earlier: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    """Raises where backward to some leaves would run into an earlier graph.

    Args:
        loss: where it begins.
        earlier: `nodes_of` the arguments, before the forward.
        leaves: where it is to end.

    Raises:
        ProfileError: an earlier graph leads to them, too.
    """
    beyond = extent_of(loss, 0, earlier).earlier_leaves if earlier else frozenset()
    if any(id(leaf) in beyond for leaf in leaves):
        raise ProfileError(
            "the forward goes on from an earlier one whose backward is still to come, as where a cache holds "
            "its tensors: such a step cannot be recorded by running it"
        )
