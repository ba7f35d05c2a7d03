# SPDX-License-Identifier: Apache-2.0
"""Finds which of a model's outputs a loop's loss goes through.

A trace sees the model, not the loop. Until a real step has shown otherwise it assumes that a loss that the
model returns is the loop's; else, that the loss goes through the output that leaves most of the graph unused;
and that the loop holds all outputs until the step is over. An output that no loss uses keeps its graph for as
long as it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class OutputUse:
    """Which of a model's outputs backward goes through, one flag per tensor, in order."""

    used: tuple[bool, ...]

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether an output has as many tensors."""
        return len(self.used) == len(leaves)


@dataclass(frozen=True)
class LossBytes:
    """What a loop's loss takes from the model's outputs on, and back to them in backward.

    Attributes:
        peak: most bytes at once, above what there is as the forward returns.
        left: of what it made, there as backward comes to the outputs, their gradients included.
        dense: per output, whether its gradient has memory of its own; that of a mean, for one, has not.
        use: which outputs the loss goes through.
        drops_output: the loop holds none of the outputs by then.
    """

    peak: int
    left: int
    dense: tuple[bool, ...]
    use: OutputUse
    drops_output: bool

    def covers(self, other: LossBytes) -> bool:
        """Whether a plan for this loss holds for another one."""
        return (
            self.peak >= other.peak
            and self.left >= other.left
            and self.use == other.use
            and len(self.dense) == len(other.dense)
            and all(mine >= theirs for mine, theirs in zip(self.dense, other.dense, strict=True))
            and other.drops_output >= self.drops_output
        )

    def with_more(self, other: LossBytes) -> LossBytes:
        """The most of both."""
        both = zip(self.dense, other.dense, strict=False)
        return LossBytes(
            max(self.peak, other.peak),
            max(self.left, other.left),
            tuple(mine or theirs for mine, theirs in both),
            OutputUse(tuple(map(any, zip(self.use.used, other.use.used, strict=False)))),
            self.drops_output and other.drops_output,
        )

    def plus(self, more: int) -> LossBytes:
        """With bytes that the loss has taken of outputs of earlier forwards."""
        return replace(self, peak=self.peak + more, left=self.left + more)

    def times(self, factor: float) -> LossBytes:
        """Of a larger batch."""
        return replace(self, peak=int(self.peak * factor), left=int(self.left * factor))


class Meter(Protocol):
    """Measures what a loss takes: `trace.loss_meter`."""

    def reached(self, gradients: Sequence[tuple[int, Tensor | None]]) -> None:
        """Backward has come to outputs at some places, with these gradients."""


class SeenUse:
    """What a step shows of the outputs of its forward. Graphs hold it; it holds no tensor.

    Attributes:
        meter: measures what the loss takes; None: nothing does.
        keeps_graph: a backward was to be differentiated in turn (`create_graph`).
    """

    __slots__ = ("_count", "_used", "keeps_graph", "meter")

    def __init__(self, count: int) -> None:
        self._count = count
        self._used: set[int] = set()
        self.meter: Meter | None = None
        self.keeps_graph = False

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
