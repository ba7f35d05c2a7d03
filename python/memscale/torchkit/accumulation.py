# SPDX-License-Identifier: Apache-2.0
"""Makes backward's gradient sums in a trace happen as they do in training: in place.

Where two paths meet, the autograd engine adds their gradients. It reuses the first one's memory if nobody
else holds it, but not while a dispatch mode is active or the tensors are fakes; then it makes a third
tensor. A trace would see memory that training never takes. So every node of the graph reports when its own
work is done: what is added between that moment and the next node's start is the engine's sum, and the
recorder does it in place under the engine's own conditions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor

_ZEROS = frozenset({torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default})

_ALONE = 4
"""References to a tensor that the engine's buffer alone holds: its own, three of this call of the mode."""

_FILLS = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
"""What backward of `gather`, `index_select`, indexing, sorting and the like puts into fresh zeros: in place,
but never with fakes."""


class AccumulationWatch:
    """Knows whether an addition is the engine's own.

    Attributes:
        between_nodes: the last node's work is done, the next one's has not begun.
        into_leaf: the running node adds to a leaf's `.grad`.
        inside_node: a node other than that is at its own work.
        held: addresses of storages that the caller of backward holds, such as the gradients it was given.
        on_node: called with the number of each node before it runs.
        after_node: and when its own work is done.
    """

    def __init__(
        self,
        on_node: Callable[[int], None] = lambda number: None,
        after_node: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.on_node = on_node
        self.after_node = after_node
        self.between_nodes = False
        self.into_leaf = False
        self.inside_node = False
        self.held: set[int] = set()
        self._zeros = 0
        self._handles: list[RemovableHandle] = []

    def watch(self, loss: Tensor) -> None:
        """Puts a hook before and after every node that backward from `loss` may run."""
        pending, seen = [loss.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            is_leaf = node.name() == "torch::autograd::AccumulateGrad"
            begins = self._leaf_begins if is_leaf else self._begins
            number = node._sequence_nr()
            self._handles += (
                node.register_prehook(functools.partial(begins, number)),
                node.register_hook(functools.partial(self._ends, number)),
            )
            pending.extend(following for following, _ in node.next_functions)

    def unwatch(self) -> None:
        """Takes the hooks off: another graph that is alive may have some of these nodes, too."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def rest(self) -> None:
        """Backward is over: additions from now on are not the engine's."""
        self.between_nodes = self.into_leaf = self.inside_node = False
        self.held.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Additions inside the block are not the engine's: a hook's, behind a leaf."""
        was = self.between_nodes, self.into_leaf, self.inside_node
        self.between_nodes = self.into_leaf = self.inside_node = False
        try:
            yield
        finally:
            self.between_nodes, self.into_leaf, self.inside_node = was

    def _begins(self, number: int, *unused: Any) -> None:
        self.on_node(number)
        self._zeros = 0
        self.between_nodes, self.into_leaf, self.inside_node = False, False, True

    def _leaf_begins(self, number: int, *unused: Any) -> None:
        self.between_nodes, self.into_leaf, self.inside_node = False, True, False

    def _ends(self, number: int, *unused: Any) -> None:
        self.after_node(number)
        self.between_nodes, self.into_leaf, self.inside_node = True, False, False

    def made(self, func: Any, result: Any) -> None:
        """Says what an operation returned: the running node may fill it, if it is zeros."""
        if self.inside_node and func in _ZEROS:
            self._zeros = result.untyped_storage()._cdata

    def in_place(self, func: Any, args: Any) -> Any:
        """The operation to run instead of `func`: itself, or the addition in place."""
        if self.inside_node and func in _FILLS and not torch.is_grad_enabled():
            filled = args[0].untyped_storage()._cdata == self._zeros and _only_holder(args[0])
            return _FILLS[func] if filled else func
        if func is not _ADD or not (self.between_nodes or self.into_leaf) or not isinstance(args[1], Tensor):
            return func
        total, part = args[0], args[1]
        same = total.shape == part.shape and total.dtype == part.dtype and total.layout == part.layout
        if not same or torch.is_grad_enabled():
            return func
        alone = total.untyped_storage()._cdata not in self.held and _is_unshared(total)
        return _ADD_IN_PLACE if self.into_leaf or alone else func


def _only_holder(tensor: Tensor) -> bool:
    """True when nothing but the engine's buffer (and the wrapper made here) holds the storage."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2) and _dense(tensor)


def _is_unshared(total: Tensor) -> bool:
    """True when the engine's buffer alone holds a gradient: no other node waits for the very tensor."""
    holders: int = total._use_count()  # type: ignore[attr-defined]
    return holders <= _ALONE and _only_holder(total)


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
