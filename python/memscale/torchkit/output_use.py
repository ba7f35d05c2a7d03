# SPDX-License-Identifier: Apache-2.0
"""Finds which of a model's outputs a loop's loss goes through.

A trace sees the model, not the loop. Until a real step has shown otherwise it assumes that a loss that the
model returns is the loop's; else, that the loss goes through the output that leaves most of the graph unused;
and that the loop holds all outputs until the step is over. An output that no loss uses keeps its graph for as
long as it is held. What the loop holds shows at the end of backward: no graph holds outputs any more. It
holds the loss, too, whose storage may be larger than its one element: that of `mse_loss` has the
outputs' size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from torch import Tensor

from memscale.torchkit.backward_calls import roots_of
from memscale.torchkit.leaves import parts_of

_SMALL_BYTES: Final = 4096
"""An output of fewer counts as held, whatever becomes of it."""

_HELD_SHARE: Final = 0.01
"""Of the predicted peak: outputs of more bytes are planned for as the loop has shown."""

_LOSS_SHARE: Final = 0.001
"""Of the predicted peak: a loss that holds more bytes than assumed is planned for."""


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

    Args:
        leaves: the outputs.

    Attributes:
        held: which of the outputs were there as a backward ended; None: none has.
        sizes: of the outputs, in bytes.
        is_own_loss: whether backward went through an output of one element, as a loss of the model's own.
        root_bytes: of the storages that the first backward has begun at, and that are no outputs'.
        meter: measures what the loss takes; None: nothing does.
        keeps_graph: a backward was to be differentiated in turn (`create_graph`).
    """

    __slots__ = (
        "_refs",
        "_single",
        "_thread",
        "_used",
        "held",
        "keeps_graph",
        "meter",
        "root_bytes",
        "sizes",
    )

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        storages = list(map(_storages, leaves))
        self.sizes = tuple(sum(storage.nbytes() for storage in each) for each in storages)
        self._refs = [
            [weakref.ref(storage) for storage in each] if size >= _SMALL_BYTES else None
            for each, size in zip(storages, self.sizes, strict=True)
        ]
        self._single = {place for place, leaf in enumerate(leaves) if leaf.numel() == 1}
        self._thread = threading.get_ident()
        self._used: set[int] = set()
        self.root_bytes = 0
        self.held: tuple[bool, ...] | None = None
        self.meter: Meter | None = None
        self.keeps_graph = False

    def note(self, places: Sequence[int]) -> None:
        """A backward goes through the outputs at these places."""
        if not self._used:
            roots = [root for root in roots_of(self._thread) if isinstance(root, Tensor)]
            found = {storage._cdata: storage.nbytes() for root in roots for storage in _storages(root)}
            outputs = (ref() for refs in self._refs if refs is not None for ref in refs)
            for storage in outputs:
                found.pop(None if storage is None else storage._cdata, None)
            self.root_bytes = sum(found.values())
        self._used.update(places)

    def backward_is_over(self) -> None:
        """One that has gone through the outputs: what is there of them the loop holds, or a kept graph."""
        if self.held is None:
            self.held = tuple(refs is None or any(ref() is not None for ref in refs) for refs in self._refs)

    @property
    def is_own_loss(self) -> bool:
        """See the class."""
        return not self._single.isdisjoint(self._used)

    @property
    def use(self) -> OutputUse | None:
        """None where no backward has been."""
        return (
            OutputUse(tuple(place in self._used for place in range(len(self.sizes)))) if self._used else None
        )


def _storages(leaf: Tensor) -> list[Any]:
    try:
        return [part.untyped_storage() for part in parts_of(leaf)]
    except (NotImplementedError, RuntimeError):  # several at once, as in vmap
        return []


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


class LearnedHold:
    """What a loop holds while backward runs: what it has held in any step.

    Attributes:
        held: which outputs, a flag each, where the model makes the loss itself; None: as traces assume.
        beside: what a loss outside holds beside the outputs, as a share of their bytes.
    """

    def __init__(self) -> None:
        self.held: tuple[bool, ...] | None = None
        self.beside = 0.0
        self._ever: tuple[bool, ...] | None = None
        self._varies = False

    def learn(self, seen: SeenUse, holds_all: bool, peak_bytes: int) -> None:
        """Takes one step in.

        Args:
            seen: in it.
            holds_all: what its plan has assumed, where nothing was learned: all are held, or none.
            peak_bytes: of its plan.
        """
        if seen.held is None:
            return
        if not seen.is_own_loss:
            self.held, self._varies = None, True  # the loss is outside, at least sometimes
            self._learn_outside(seen, seen.held, holds_all, peak_bytes)
        if self._varies:
            return
        ever = self._ever or (False,) * len(seen.held)
        if len(ever) != len(seen.held):
            self.held, self._varies = None, True
            return
        self._ever = ever = tuple(one or other for one, other in zip(ever, seen.held, strict=True))
        assumed = self.held or (holds_all,) * len(ever)
        others = (size for size, one, other in zip(seen.sizes, ever, assumed, strict=True) if one != other)
        if sum(others) > _HELD_SHARE * peak_bytes:
            self.held = ever

    def _learn_outside(self, seen: SeenUse, held: tuple[bool, ...], holds_all: bool, peak_bytes: int) -> None:
        """Outputs that are dropped stay counted, as room for what of such a loss is not seen."""
        whole = sum(seen.sizes)
        there = sum(size for size, is_held in zip(seen.sizes, held, strict=True) if is_held)
        beside = seen.root_bytes + there - (whole if holds_all else 0)
        if whole and beside - self.beside * whole > _LOSS_SHARE * peak_bytes:
            self.beside = beside / whole


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
