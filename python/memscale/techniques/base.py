# SPDX-License-Identifier: Apache-2.0
"""The interface of a technique to the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut

if TYPE_CHECKING:
    import torch

    from memscale.config.config import EffectiveConfig
    from memscale.hardware.detect import Hardware
    from memscale.offload.engine import Offload
    from memscale.offload.limits import Link
    from memscale.plans.plan import Choice
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn


class Attachment(Protocol):
    """One reversible change to a model.

    The executor attaches in order and undoes in reverse. `attach` either succeeds or leaves the model as
    it was; `undo` never fails on something that was attached. After `undo`, `attach` may be called again.
    """

    name: str

    def attach(self) -> None:
        """Makes the change."""

    def undo(self) -> None:
        """Takes it back, bit for bit."""


class StepAttachment(Attachment, Protocol):
    """A change to how the step computes. It is there when the step is traced, so the trace sees what it does.

    Attributes:
        path: qualified name of the module that it changes, "" for the model.
        beneath: the executor's watch over the model's forward. What changes the model itself goes beneath,
            so that the executor goes on seeing the batches; None for every other module.
    """

    path: str
    beneath: StandIn | None

    @property
    def used(self) -> bool:
        """It has done its work since it was attached last; False: it stood aside, and the step is plain."""

    @property
    def reason(self) -> str:
        """Why it stood aside, "" if it did not."""


@runtime_checkable
class PathAttachment(StepAttachment, Protocol):
    """A change to what happens between a gradient and its weight, to the model's data or the optimizer.

    A trace gets its effect from `traced`. `attach` and `undo` are for the executor, which leaves it attached
    while it plans, and in the next plan where that has it too.

    Attributes:
        stays: once a forward has run with it, later plans have it too: taking it off in the middle would cost
            more than it saves, or disturb a graph that waits for its backward.
        apart_from: names of optimizer-side techniques in front of it that may come and go while it stays as
            it is. It is taken off and attached again when any other one does.
    """

    stays: bool
    apart_from: frozenset[str]

    def traced(self, step: StepFacts) -> StepFacts:
        """The step as it is to be traced, with this technique in its `path`. Afterwards `used` holds."""


@runtime_checkable
class ForwardAttachment(PathAttachment, Protocol):
    """An optimizer-side technique that sees the model's forwards whose output is to be differentiated."""

    def about_to_run(self) -> None:
        """One is about to run, and nothing has been done for it. What this raises is the caller's."""

    def has_run(self, output: Any) -> None:
        """One has run, and returned this."""


@runtime_checkable
class PartialAttachment(PathAttachment, Protocol):
    """An optimizer-side technique that may leave parts as they are: it is used as far as the budget demands.

    Attributes:
        resident: names of parts that it leaves as they are.
    """

    resident: frozenset[str]

    def parts(self) -> Sequence[Part]:
        """All that could be resident, and what that brings, in a fixed order. Cheap; after `traced`."""

    def become(self, other: PathAttachment) -> None:
        """It is in force, and from now on spares what another one of its kind does.

        What is to leave does so before anything comes back.
        """


@runtime_checkable
class SettlingAttachment(PathAttachment, Protocol):
    """An optimizer-side technique whose trace depends on what the resulting plan recomputes."""

    def settles(self, choices: Sequence[Choice]) -> bool:
        """Whether the last trace has what these choices need. If not, a later one has, of a few."""


@dataclass(frozen=True)
class Surroundings:
    """What a step technique may ask beside the model, to see where it could attach.

    Attributes:
        hardware: what the step is to run on; the model need not lie there.
        config: in force.
        optimizer: the one that the caller has named, and that may be changed; None: not known.
        link: how tensors may leave the device, or why they may not; "" where nobody asked for it.
        offload: the executor's engine over that link, which is made when it is asked for; None in a trace.
        resident: technique → names of the parts that it is to leave as they are.
        way: names of the techniques that are looked for together.
        left_out: modules and parameters to leave alone.
        known: what techniques have found out about the model's modules, for other looks of the same plan.
    """

    hardware: Hardware
    config: EffectiveConfig
    optimizer: torch.optim.Optimizer | None = None
    link: Link | str = ""
    offload: Callable[[], Offload] | None = None
    resident: Mapping[str, frozenset[str]] = field(default_factory=dict)
    way: frozenset[str] = frozenset()
    left_out: LeftOut = NOTHING_LEFT_OUT
    known: dict[Any, Any] = field(default_factory=dict)


class Part(NamedTuple):
    """What an optimizer-side technique may leave as it is.

    Attributes:
        technique: name.
        name: of the part: a parameter's, or a block's path.
        bytes: that it has in memory then, all through the step.
        ns: what it saves: the time of its copies.
        group: number of its parameter group, where it has one.
    """

    technique: str
    name: str
    bytes: int
    ns: int
    group: int = 0
