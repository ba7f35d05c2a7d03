# SPDX-License-Identifier: Apache-2.0
"""What a loop does with a model's outputs: which its loss goes through, which it still holds in backward.

A trace sees the model, not the loop. Until a real step has shown otherwise it assumes that a loss that the
model returns is the loop's; else, that the loss goes through the output that leaves most of the graph unused;
and that the loop holds all outputs until the step is over. An output that no loss uses keeps its graph for as
long as it is held; one that is dropped before backward takes no memory in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memscale.core.leaves import tensors_of
from memscale.core.loss import own_loss

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.tracer import StepFacts


@dataclass(frozen=True)
class OutputUse:
    """What becomes of a model's outputs, one flag per tensor, in order.

    Attributes:
        used: backward goes through it.
        held: the loop holds it when backward begins.
    """

    used: tuple[bool, ...]
    held: tuple[bool, ...]

    def with_held(self, other: OutputUse) -> OutputUse:
        """The same with all that is held in either."""
        return OutputUse(self.used, tuple(map(max, self.held, other.held)))

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether an output has as many tensors."""
        return len(self.used) == len(leaves)


class SeenUse:
    """What one backward shows of the outputs of its forward. Graphs hold it; it holds no tensor."""

    __slots__ = ("_held", "_refs", "_used", "sizes")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._refs = [weakref.ref(leaf) for leaf in leaves]
        self._used: set[int] = set()
        self._held: tuple[bool, ...] | None = None
        self.sizes = [leaf.nbytes for leaf in leaves]

    def note(self, places: Sequence[int]) -> None:
        """A backward goes through the outputs at these places."""
        self._used.update(places)
        if self._held is None:
            self._held = tuple(ref() is not None for ref in self._refs)

    @property
    def use(self) -> OutputUse | None:
        """None where no backward has been."""
        if self._held is None:
            return None
        return OutputUse(tuple(place in self._used for place in range(len(self._refs))), self._held)


class LearnedUse:
    """What the steps of a loop have shown so far.

    Attributes:
        use: to plan for; None: nothing that differs from what traces assume, or no rule.
    """

    def __init__(self) -> None:
        self.use: OutputUse | None = None
        self._varies = False

    def learn(self, seen: SeenUse, assumed: OutputUse | None, least_bytes: int) -> None:
        """Takes one step in.

        Args:
            seen: of the step.
            assumed: by the plan that it ran under.
            least_bytes: outputs that are smaller are held, as far as plans go.
        """
        use = seen.use
        if use is None or assumed is None or self._varies or len(use.used) != len(assumed.used):
            return
        small = [size < least_bytes for size in seen.sizes]
        use = use.with_held(OutputUse(use.used, tuple(small)))
        if self.use is not None and len(self.use.used) == len(use.used):
            self._varies = self.use.used != use.used
            self.use = None if self._varies else use.with_held(self.use)
        elif use.used != assumed.used or any(
            there and not here for there, here in zip(assumed.held, use.held, strict=True)
        ):
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


def held_of(recorder: GraphRecorder, output: Any, loss: Tensor | None, step: StepFacts) -> Any:
    """Output and loss, as far as a loop holds them in backward. The recorder notes what is assumed."""
    leaves = tensors_of(output)
    if step.forwards > 1 or loss is None:
        return output, loss
    if step.use is None and own_loss(output) is None:
        recorder.another_use = one_alone(output)
    held = step.use.held if step.use is not None and step.use.fits(leaves) else (True,) * len(leaves)
    recorder.use = OutputUse(reached(loss, leaves), held)
    return [leaf for leaf, is_held in zip(leaves, held, strict=True) if is_held], loss


_LEAST_SHARE = 0.1
"""Of a graph's nodes: outputs that have fewer for themselves are not worth another trace."""


def one_alone(output: Any) -> OutputUse | None:
    """The use of an output's first or last tensor alone that leaves most of the graph unused.

    None where it would leave little of it.
    """
    leaves = tensors_of(output)
    ends = [place for place, leaf in enumerate(leaves) if leaf.grad_fn is not None]
    if len(ends) < 2:
        return None
    whole = len(nodes_behind(leaves))
    sizes = {place: len(nodes_behind([leaves[place]])) for place in (ends[0], ends[-1])}
    place = min(sizes, key=lambda end: sizes[end])
    if whole - sizes[place] < _LEAST_SHARE * whole:
        return None
    return OutputUse(reached(leaves[place], leaves), (True,) * len(leaves))
