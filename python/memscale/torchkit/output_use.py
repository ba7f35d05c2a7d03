# SPDX-License-Identifier: Apache-2.0
"""Finds which of a model's outputs a loop's loss goes through.

A trace sees the model, not the loop. Until a real step has shown otherwise it assumes that a loss that the
model returns is the loop's; else, that the loss goes through the output that leaves most of the graph unused;
and that the loop holds all outputs until the step is over. An output that no loss uses keeps its graph for as
long as it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class OutputUse:
    """Which of a model's outputs backward goes through, one flag per tensor, in order."""

    used: tuple[bool, ...]

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether an output has as many tensors."""
        return len(self.used) == len(leaves)


class SeenUse:
    """What a step shows of the outputs of its forward. Graphs hold it; it holds no tensor."""

    __slots__ = ("_count", "_used")

    def __init__(self, count: int) -> None:
        self._count = count
        self._used: set[int] = set()

    def note(self, places: Sequence[int]) -> None:
        """A backward goes through the outputs at these places."""
        self._used.update(places)

    @property
    def use(self) -> OutputUse | None:
        """None where no backward has been."""
        return OutputUse(tuple(place in self._used for place in range(self._count))) if self._used else None


class LearnedUse:
    """What the steps of a loop have shown so far.

    Attributes:
        use: to plan for; None: nothing that differs from what traces assume, or no rule.
    """

    def __init__(self) -> None:
        self.use: OutputUse | None = None
        self._varies = False

    def learn(self, seen: SeenUse, assumed: OutputUse | None) -> None:
        """Takes one step in, which ran under a plan that assumed this."""
        use = seen.use
        if use is None or assumed is None or self._varies or len(use.used) != len(assumed.used):
            return
        if self.use is not None and len(self.use.used) == len(use.used):
            self._varies = self.use != use
            self.use = None if self._varies else use
        elif use != assumed:
            self.use = use


def reached(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which tensors backward from a loss goes through."""
    nodes = nodes_behind([loss])
    return tuple(leaf.grad_fn in nodes or leaf is loss for leaf in leaves)


def nodes_behind(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of autograd's graph behind some tensors."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    found: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return found
