# SPDX-License-Identifier: Apache-2.0
"""What a loop does with a model's outputs: which of them its loss goes through.

A trace sees the model, not the loop. Until a real step has shown otherwise it assumes that a loss that the
model returns is the loop's; else, that the loss goes through the output that leaves most of the graph unused;
and that the loop holds all outputs until the step is over. An output that no loss uses keeps its graph for as
long as it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memscale.core.leaves import tensors_of
from memscale.core.loss import cached_in, own_loss

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.tracer import StepFacts


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


def note_use(recorder: GraphRecorder, output: Any, loss: Tensor | None, step: StepFacts) -> None:
    """The recorder notes what this trace assumes of the outputs, and what another would."""
    if step.forwards > 1 or loss is None:
        return
    if step.use is None and own_loss(output) is None:
        recorder.another_use = one_alone(output)
    recorder.use = OutputUse(reached(loss, tensors_of(output)))


_LEAST_SHARE = 0.1
"""Of a graph's nodes: outputs that have fewer for themselves are not worth another trace."""


def one_alone(output: Any) -> OutputUse | None:
    """The use of an output's first or last tensor alone that leaves most of the graph unused.

    None where it would leave little of it.
    """
    leaves, cached = tensors_of(output), cached_in(output)
    ends = [place for place, leaf in enumerate(leaves) if leaf.grad_fn is not None and id(leaf) not in cached]
    if len(ends) < 2:
        return None
    whole = len(nodes_behind(leaves))
    sizes = {place: len(nodes_behind([leaves[place]])) for place in (ends[0], ends[-1])}
    place = min(sizes, key=lambda end: sizes[end])
    if whole - sizes[place] < _LEAST_SHARE * whole:
        return None
    return OutputUse(reached(leaves[place], leaves))
