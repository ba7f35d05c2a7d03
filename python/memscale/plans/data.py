# SPDX-License-Identifier: Apache-2.0
"""A plan and a prediction as data: what their text, pages and charts are made from.

    device_used = context + reserved        what nvidia-smi shows
    reserved    = live at the peak + fragmentation
    live        = parameter + buffer + gradient + optimizer_state + input + activation + temporary + workspace

`by_category` has one entry per word of these lines, and their sum is `device_used_peak_bytes` to the byte.
`plans/plan.py` adds text and JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from memscale.plans.timeline import Timeline

CONTEXT = "context"
FRAGMENTATION = "fragmentation"

Frontier = tuple[tuple[int, int], ...]


class Sizes(Protocol):
    """Finds the largest batch or sequence that fits, by tracing steps of other sizes."""

    def largest(self, what: str, with_plan: bool) -> int:
        """Of "batch" or "sequence"."""

    def lines(self) -> tuple[str, ...]:
        """All answers that can be derived, in words."""


@dataclass(frozen=True)
class Choice:
    """What is done with one module, and why.

    The two `other` fields say what if this one choice were the other way round and the rest of the plan
    stayed: an applied technique left out, or a module that runs as it is checkpointed in place of what
    overlaps it.

    Attributes:
        module: qualified name, "" for the model itself.
        type: class name.
        techniques: names of the techniques applied, ("checkpoint",), ("selective",) or ("offload",); empty
            when the module runs as it is.
        rule: stable key of the rule behind the choice.
        reason: the rule in words.
        calls: executions of the module in one step.
        bytes: what the choice frees at the moment of the plain step's peak; for a module that runs as it is,
            what its checkpoint would free, or, where it cannot run twice, its offload.
        ns: time that it adds to the step, or that this would add, by the cost model.
        kept: operations of a selective checkpoint whose outputs are kept, such as "addmm#0": the first addmm
            of each call of the module. They are not recomputed.
        joined: checkpointed as one with the choice before it, its sibling, so that what passes between the
            two is not kept. Bytes and times of each choice of such a region are those of the whole region.
        other_peak_bytes: peak the other way round, in allocated bytes: on a card neither what the allocator
            holds beyond them nor the context is counted, as in `Prediction.allocated_peak_bytes`. 0: there is
            no other way.
        other_ns: step time the other way round.
        boundary: what the checkpoint holds for its recompute is offloaded; at the first choice of a region.
        moved: what is offloaded, rising. Of "offload": numbers of saved tensors within each call of the
            module, from 0, in the order in which autograd packs them; those that the profile has no save of
            (parameters, views of them, layouts that are not strided) are not counted. All saves on one
            storage are named, or none. Of a boundary: numbers of the call's inputs, storages, as the profile
            lists them: the tensors among the arguments, each storage once, in the order of `tree_leaves`,
            then what is read from elsewhere.
        moved_bytes: bytes that leave the device in a step, over all calls.
        moved_count: storages that do.
        transfer_ns: what of `ns` is for moving them: the copies' time that compute does not hide, and their
            fixed cost.
        ahead_bytes: once backward uses what it moved, so many bytes of what it uses next, of another module,
            may come back early.
    """

    module: str
    type: str
    techniques: tuple[str, ...]
    rule: str
    reason: str
    calls: int
    bytes: int
    ns: int
    kept: tuple[str, ...] = ()
    joined: bool = False
    other_peak_bytes: int = 0
    other_ns: int = 0
    boundary: bool = False
    moved: tuple[int, ...] = ()
    moved_bytes: int = 0
    moved_count: int = 0
    transfer_ns: int = 0
    ahead_bytes: int = 0

    @property
    def offloads(self) -> bool:
        """Whether tensors leave the device."""
        return self.boundary or "offload" in self.techniques


@dataclass(frozen=True)
class Amount:
    """How much of a technique is used for one parameter group.

    Attributes:
        group: its number.
        rule: stable key: "leaves", "in_part" or "stays".
        reason: the rule in words.
        leaving: parts that leave, such as the state of so many parameters.
        leaving_bytes: of these.
        staying: parts that could leave, and do not.
        staying_bytes: of these.
        ns: time that copies of what leaves take.
    """

    group: int
    rule: str
    reason: str
    leaving: int
    leaving_bytes: int
    staying: int
    staying_bytes: int
    ns: int


@dataclass(frozen=True)
class StepChoice:
    """A technique that changes how the step computes, and what it brings.

    Compared with the best plan without it; everything else is decided again there.

    Attributes:
        technique: name, such as "loss_tile".
        modules: qualified names of the modules that it changes, "" for the model.
        types: their class names, each once.
        exact: loss and gradients keep every bit of plain PyTorch at the same precision.
        reason: what it does, in words.
        bytes: device-used bytes that it takes off the peak.
        ns: time that it adds to the step; below 0: the step is faster with it.
        other_fits: the plan without it is within the budget too.
        amounts: how much of it is used, of a technique that may be used in part.
    """

    technique: str
    modules: tuple[str, ...]
    types: tuple[str, ...]
    exact: bool
    reason: str
    bytes: int
    ns: int
    other_fits: bool
    amounts: tuple[Amount, ...] = ()


@dataclass(frozen=True)
class Peak:
    """The moment of the highest allocated bytes.

    Attributes:
        operation: the operation that was running, such as "addmm"; "" before the first.
        phase: "forward", "backward" or "optimizer".
        module: path of the module it worked for; "" where that is the model itself or nothing known.
        source: "package/file.py:123", the line that ran it; of a backward operation, the line of forward
            that it belongs to; "" if unknown.
        recompute: whether it is of a recompute, inside a checkpointed module.
        index: number of the operation in the traced step; the number of operations, before the first.
    """

    operation: str = ""
    phase: str = "forward"
    module: str = ""
    source: str = ""
    recompute: bool = False
    index: int = 0


@dataclass(frozen=True)
class Holder:
    """Something that is alive at the peak: one buffer, or several that are alike.

    Attributes:
        bytes: its size; of several, the sum.
        category: what it is for, a key of `by_category`.
        module: path of the module that made or owns it; of several, with `*` for the number of a layer.
        operation: what made it; "" for what was there before the step.
        source: "package/file.py:123" of that operation, "" if unknown.
        shape: sizes of the tensor that it was made for; None for a workspace inside an operation.
        dtype: such as "float32"; "" if unknown.
        name: of the parameter or buffer that it is, or is the gradient or optimizer state of; else "".
        recompute: made by a recompute of its module.
        count: how many are alike.
    """

    bytes: int
    category: str
    module: str
    operation: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str
    name: str = ""
    recompute: bool = False
    count: int = 1

    def what(self) -> str:
        """Shape, dtype and name in a few words."""
        form = "" if self.shape is None else f"{self.dtype}{list(self.shape)}"
        return " ".join(word for word in (self.name, form) if word)


@dataclass(frozen=True)
class PredictionData:
    """What one training step will take.

    Attributes:
        allocated_peak_bytes: most bytes of live tensors at one moment, as
            `torch.cuda.max_memory_allocated` counts them.
        reserved_peak_bytes: most bytes held by PyTorch's allocator; on a CPU equal to allocated.
        device_used_peak_bytes: reserved bytes and context: what `nvidia-smi` shows.
        context_bytes: what the process takes from a card outside the allocator; 0 on a CPU.
        by_category: bytes at the moment of the peak by what they are for. "fragmentation" is what the
            allocator holds beyond the live bytes, its rounding included. The sum is
            `device_used_peak_bytes`.
        timeline: memory over the step.
        step_time_ns: duration of the step by the cost model.
        error_band_bytes: device-used bytes are expected between these two.
        fits: whether `device_used_peak_bytes` and the reserve are within the budget.
        budget_bytes: the budget.
        by_module: module path → live bytes at the peak that were made in it or belong to it, those of its
            children not counted. "" is the model itself and what belongs to no module. The sum is that of
            the live categories.
        peak: the moment of the peak.
        holders: the largest buffers alive at the peak, largest first.
        groups: all that is alive at the peak, alike buffers put together, largest first; the smallest
            groups are left out.
        smallest_peak_bytes: smallest device-used peak that any plan reaches.
        advice: what would make it fit, or how much room is left, a line each.
        notes: what the trace says about itself.
        device: name of the device, and `device_bytes` its memory.
        budget_source: where the budget comes from, in words.
        method: how the step was traced: "static" or "empirical".
        plan: the plan that this is the prediction of; None inside the plan itself.
        plain: the step without any technique; None for a prediction that is plain.
        training: whether it is of a training step; False: of a forward without gradients.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    device_used_peak_bytes: int
    context_bytes: int
    by_category: dict[str, int]
    timeline: Timeline
    step_time_ns: int
    error_band_bytes: tuple[int, int]
    fits: bool
    budget_bytes: int
    by_module: dict[str, int] = field(default_factory=dict)
    peak: Peak = field(default_factory=Peak)
    holders: tuple[Holder, ...] = ()
    groups: tuple[Holder, ...] = ()
    smallest_peak_bytes: int = 0
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    device: str = ""
    device_bytes: int = 0
    budget_source: str = ""
    method: str = "static"
    plan: PlanData | None = None
    plain: PredictionData | None = None
    training: bool = True
    scaling: Sizes | None = field(default=None, repr=False, compare=False)

    # ---- views -----------------------------------------------------------------------------------

    @cached_property
    def by_module_rolled_up(self) -> dict[str, int]:
        """Module path → live bytes at the peak of the module and all below it; "" is everything."""
        total: dict[str, int] = {}
        for path, size in self.by_module.items():
            while True:
                total[path] = total.get(path, 0) + size
                if not path:
                    break
                path = path.rpartition(".")[0]
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    # ---- what would fit --------------------------------------------------------------------------

    def largest_batch(self, with_plan: bool = True) -> int:
        """The largest batch that fits the budget; 0 if not even one sample does.

        Traces a few steps with other batch sizes, without computing anything; kept for the next call.

        Args:
            with_plan: under the plan for that batch; False: without any technique.

        Raises:
            ValueError: the batch cannot be derived from the sample, the model takes no other, or it cannot be
                traced without data.
        """
        return self._scaling("batch").largest("batch", with_plan)

    def largest_sequence(self, with_plan: bool = True) -> int:
        """The longest sequence that fits the budget; 0 if not even one token does.

        Args:
            with_plan: under the plan for that length; False: without any technique.

        Raises:
            ValueError: the sequence cannot be derived from the sample, the model takes no other, or it cannot
                be traced without data.
        """
        return self._scaling("sequence").largest("sequence", with_plan)

    def advise(self) -> tuple[str, ...]:
        """`advice`, and the largest batch and sequence, with and without a plan. Takes some traces."""
        if self.scaling is None:
            return self.advice
        return (*self.advice, *self.scaling.lines())

    def _scaling(self, what: str) -> Sizes:
        if self.scaling is None:
            raise ValueError(f"the largest {what} is known only to a prediction that `memscale.predict` made")
        return self.scaling


@dataclass(frozen=True, repr=False)
class PlanData:
    """What is done with each module under a budget, and what that brings.

    Attributes:
        choices: one per module that was considered, in module order.
        fits: the predicted peak is within the budget.
        budget_bytes: the budget, and `budget_source` says where it comes from.
        predicted: the step under this plan.
        plain: the step without any technique.
        smallest_peak_bytes: smallest peak that any plan reaches.
        time_bound_ppm: this plan is at most so much slower than the fastest plan that fits, in millionths.
        walk: finds `frontier` when it is asked for; no part of the plan itself.
        digest: 16 hexadecimal digits; equal for equal plans, on any machine.
        profile: "static" or "empirical".
        advice: what would make it fit, where it does not.
        notes: remarks for the log.
        mode: value of the `OptimizationMode` that it was made under; "" if unknown.
        steps: techniques that change how the step computes, in the order in which they are attached.
        away_peak_bytes: most bytes that are off the device at once.
        window_out_bytes: of one call, most bytes that wait on the device for their copy out; 0 where nothing
            is offloaded.
        window_in_bytes: of one call, most bytes that come back ahead of their use; likewise.
        staging_bytes: part of the peak. On a CPU host what the engine takes for itself, staging buffers above
            all, where a choice offloads; on a card what a library takes for a recompute.
        path_staging_bytes: likewise, of the engines for gradients and optimizer state.
    """

    choices: tuple[Choice, ...]
    fits: bool
    budget_bytes: int
    budget_source: str
    predicted: PredictionData
    plain: PredictionData
    smallest_peak_bytes: int
    time_bound_ppm: int
    digest: str
    profile: str
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    mode: str = ""
    steps: tuple[StepChoice, ...] = ()
    away_peak_bytes: int = 0
    window_out_bytes: int = 0
    window_in_bytes: int = 0
    staging_bytes: int = 0
    path_staging_bytes: int = 0
    walk: Callable[[], Frontier] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def frontier(self) -> Frontier:
        """(peak bytes, step ns) of every plan there was to choose from, fastest first."""
        return self.walk()

    @property
    def active(self) -> tuple[Choice, ...]:
        """The choices that apply a technique."""
        return tuple(choice for choice in self.choices if choice.techniques)

    @property
    def does_something(self) -> bool:
        """Whether the model is touched at all."""
        return bool(self.active or self.steps)

    @property
    def exact(self) -> bool:
        """Loss and gradients of a step keep every bit of plain PyTorch at the same precision.

        With 8-bit optimizer state those of the next steps are of other weights.
        """
        return all(step.exact for step in self.steps)

    @property
    def slowdown(self) -> float:
        """Expected step time over that of the plain step."""
        return self.predicted.step_time_ns / max(self.plain.step_time_ns, 1)

    @property
    def pressure(self) -> float:
        """Memory pressure: the plain step's device-used peak over the budget. Above 1 it does not fit."""
        return self.plain.device_used_peak_bytes / max(self.budget_bytes, 1)
