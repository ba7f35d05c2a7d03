# SPDX-License-Identifier: Apache-2.0
"""What the steps of a loop show of it, and no trace of the model can: its loss.

Whether it goes through gradients; which outputs it goes through, and which the loop holds, see `output_use`;
and what it takes, which is measured in a step of each kind, `trace.loss_meter`. Plans count with a measured
loss where the budget would not hold with it, where their prediction would be too low, or so much too high
that a plan could do with fewer techniques.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memscale.core.planner import Planned, device_of
from memscale.core.step_signature import shape_covers, shapes_of
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.output_use import LearnedHold, LearnedUse, LossBytes, OutputUse, SeenUse
from memscale.torchkit.sharding import has_other_processes
from memscale.trace.loss_meter import LossMeter, assumed_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memscale.torchkit.open_graph import OpenGraphs

_Shapes = tuple[tuple[tuple[int, ...], "torch.dtype"], ...]

_PEAK_SHARE: Final = 0.01
"""Of the predicted peak: a loss that takes this much more than assumed is planned for, within the budget."""

_SPARE_SHARE: Final = 0.02
"""The same for a loss that takes less, where the plan does something."""

_MOST_RETRIES: Final = 8
"""Steps that could not be measured and are followed by another try; later ones wait for their turn."""

_MOST_KINDS: Final = 64
"""Kinds of batches whose losses are known; then all are forgotten."""


class LearnedLoop:
    """What the steps of one wrapped model have shown so far.

    Args:
        measures: the loss.

    Attributes:
        differentiates_twice: its loss goes through gradients, as a penalty on them does.
    """

    def __init__(self, measures: bool) -> None:
        self._measures = measures
        self._use = LearnedUse()
        self._hold = LearnedHold()
        self.differentiates_twice = False
        self._losses: dict[_Shapes, LossBytes | None] = {}  # None: as assumed
        self._steps: dict[_Shapes, int] = {}
        self._retries = 0
        self._present: dict[int, _Step] = {}  # by thread

    @property
    def use(self) -> OutputUse | None:
        """Which outputs the loss goes through, where that is not what traces assume."""
        return self._use.use

    def facts(self, forwards: int, is_given: bool) -> dict[str, Any]:
        """What the next step is planned with, by names of `StepFacts`.

        Args:
            forwards: of that step.
            is_given: the caller has said what the loss is.
        """
        facts: dict[str, Any] = {"differentiates_twice": self.differentiates_twice and not is_given}
        if forwards == 1:
            facts["use"] = self.use
            if not is_given:
                facts |= {"held": self._hold.held, "beside": self._hold.beside}
        return facts

    def before(self, graphs: OpenGraphs, planned: Planned | None, args: Any, kwargs: Any) -> LossBytes | None:
        """A forward is about to run. Takes in what this thread has shown since its last one.

        Args:
            graphs: of the forwards before.
            planned: the plan that they ran under.
            args: positional part of the batch.
            kwargs: keyword part.

        Returns:
            What the loss of this batch is going to take; None: what traces assume.
        """
        me, seen, goes_on = threading.get_ident(), graphs.seen, graphs.waiting > 0
        step = self._present.get(me)
        meter = None if step is None else step.meter
        if step is not None and meter is not None and goes_on:
            step.between += meter.so_far()
        if planned is not None and seen is not None:
            self.differentiates_twice |= seen.keeps_graph
            if step is not None and meter is not None and seen.meter is meter:
                self._learn(step, meter.end(seen.use), planned)
            self._use.learn(seen, planned.trace.use)
            if not has_other_processes():  # which must have one plan
                peak = planned.plan.predicted.allocated_peak_bytes
                self._hold.learn(seen, not planned.trace.drops_output, peak)
        self.rest()
        shapes = shapes_of(tensors_of((args, kwargs)))
        expected = self._expected(shapes)
        between = step.between if step is not None and goes_on else 0
        self._present[me] = _Step(shapes, expected, between)
        return expected

    def _expected(self, shapes: _Shapes) -> LossBytes | None:
        if self.differentiates_twice:
            return None
        for known in (shapes, *self._losses):
            if known in self._losses and _covers(known, shapes):
                return self._losses[known]
        larger = [(_growth(known, shapes), loss) for known, loss in self._losses.items() if loss is not None]
        if not larger:
            return None
        growth, loss = min(larger, key=lambda item: item[0])
        return loss.times(growth * growth)  # as of all pairs of a batch, until a step has shown it

    def measure(self, model: nn.Module, is_first: bool) -> None:
        """A forward is about to run, and what follows may be the loss. First steps are measured, then few.

        Args:
            model: runs it.
            is_first: of its step; what the loss takes shows after the last.
        """
        self.rest()
        step = self._present.get(threading.get_ident())
        # Processes that train together must have one plan, and might measure different losses.
        if step is None or not self._measures or has_other_processes():
            return
        count = self._steps[step.shapes] = self._steps.get(step.shapes, 0) + is_first
        if count & (count - 1) == 0:
            try:
                step.meter = LossMeter(device_of(model))
            except (AttributeError, RuntimeError, TypeError):  # another profiler, or another PyTorch
                self._try_next(step)

    def _try_next(self, step: _Step) -> None:
        """This step shows nothing: the next of its kind is measured in its place."""
        if self._retries < _MOST_RETRIES and self._steps.get(step.shapes):
            self._retries += 1
            self._steps[step.shapes] -= 1

    def returned(self, seen: SeenUse | None, output: Any) -> None:
        """It has run.

        Args:
            seen: what its backward will show.
            output: of the forward.
        """
        step = self._present.get(threading.get_ident())
        if seen is not None and step is not None and step.meter is not None:
            seen.meter = step.meter
            step.meter.returned(output)

    def rest(self) -> None:
        """Nothing more of this thread's step is measured: it is over, or did not come to a backward."""
        step = self._present.get(threading.get_ident())
        if step is not None and step.meter is not None:
            step.meter.stop()

    def _learn(self, step: _Step, measured: LossBytes | None, planned: Planned) -> None:
        if measured is None:
            self._try_next(step)
        assumed = assumed_bytes(planned.trace)
        in_tiles = any(name == "loss_tile" for name, _ in planned.places)  # the outputs are not there
        if measured is None or assumed is None or in_tiles or self.differentiates_twice:
            return
        measured = measured.plus(step.between)
        if len(self._losses) >= _MOST_KINDS:
            self._losses.clear()
            self._steps.clear()
        known, plan = self._losses.get(step.shapes), planned.plan
        before, now = plan.predicted.allocated_peak_bytes, _peak_with(measured, assumed, planned)
        breaks = before <= plan.budget_bytes < now
        if breaks or now - before > _PEAK_SHARE * before:
            self._losses[step.shapes] = measured if known is None else known.with_more(measured)
        elif step.shapes not in self._losses:
            does_something = bool(plan.active) or not plan.fits
            differs = step.expected is not None or (does_something and before - now > _SPARE_SHARE * before)
            self._losses[step.shapes] = measured if differs else None


def _peak_with(measured: LossBytes, assumed: tuple[int, int], planned: Planned) -> int:
    """The peak of a plan's step with another loss than its trace has assumed."""
    trace, live = planned.trace, planned.plan.predicted.timeline.live_bytes
    begin, reached = trace.loss_ops or (0, 0)  # before which nothing is recomputed
    peak, left = assumed
    dropped = trace.output_bytes if measured.drops_output and not trace.drops_output else 0
    parts = (
        (live[:begin], 0),
        (live[begin:reached], measured.peak - peak),
        (live[reached:], measured.left - left - dropped),
    )
    return max((max(part) + more for part, more in parts if part), default=0)


@dataclass
class _Step:
    """The one that a thread is in.

    Attributes:
        shapes: of its batch.
        expected: of its loss; None: what traces assume.
        between: what has come of the outputs of its earlier forwards, in bytes.
        meter: of its latest forward.
    """

    shapes: _Shapes
    expected: LossBytes | None
    between: int = 0
    meter: LossMeter | None = None


def _covers(known: _Shapes, shapes: _Shapes) -> bool:
    return len(known) == len(shapes) and all(map(shape_covers, known, shapes))


def _growth(known: _Shapes, shapes: _Shapes) -> float:
    """How much larger the tensors of a batch are: of those that have grown, the most."""
    if len(known) != len(shapes):
        return 1.0
    pairs = zip(known, shapes, strict=True)
    return max((math.prod(new) / max(math.prod(old), 1) for (old, _), (new, _) in pairs), default=1.0)
