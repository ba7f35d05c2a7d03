# SPDX-License-Identifier: Apache-2.0
"""A plan and a prediction, as Python objects.

The core decides; these are its answers with module paths, words and a timeline. Both are plain data: they
can be printed, written as JSON, read again and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from memscale.core.prediction import Prediction
from memscale.core.timeline import PHASES, Timeline
from memscale.core.units import format_bytes

__all__ = ["PHASES", "Amount", "Choice", "Frontier", "Plan", "Prediction", "StepChoice", "Timeline"]

PLAN_VERSION = 7
Frontier = tuple[tuple[int, int], ...]


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
            of each call of the module. They are not run again.
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

    Compared with the best plan without it; everything else is decided anew there.

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


@dataclass(frozen=True, repr=False)
class Plan:
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
    predicted: Prediction
    plain: Prediction
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

    def __repr__(self) -> str:
        steps = "".join(f", {step.technique}" for step in self.steps)
        return (
            f"<Plan: {len(self.active)} of {len(self.choices)} modules{steps};"
            f" {format_bytes(self.predicted.device_used_peak_bytes)} of {format_bytes(self.budget_bytes)},"
            f" {'fits' if self.fits else 'does not fit'}; `explain()` tells more>"
        )

    def _repr_html_(self) -> str:
        from memscale.observability.notebook import plan_html

        return plan_html(self)

    def __reduce__(self) -> tuple[Callable[[Any], Plan], tuple[dict[str, Any]]]:
        return Plan.from_dict, (self.to_dict(),)  # copies and pickles: `walk` holds the core's graph

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

    def summary_lines(self) -> list[str]:
        """The plan in a few lines, as the log shows it."""
        from memscale.observability.plan_view import summary_lines

        return summary_lines(self)

    def explain(self, verbose: bool = False) -> str:
        """The plan as text: what is applied where, by which rule, what it frees and costs, what was rejected.

        Args:
            verbose: a row for every module; False: layers that differ in nothing but small numbers share one.
        """
        from memscale.observability.plan_view import explain

        return explain(self, verbose)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, with a version."""
        choices = [asdict(choice) for choice in self.choices]
        steps = [asdict(step) for step in self.steps]
        names = [item.name for item in fields(self) if item.name not in ("choices", "steps", "walk")]
        data = {name: getattr(self, name) for name in names}
        data |= {"predicted": self.predicted.to_dict(), "plain": self.plain.to_dict()}
        return {
            "version": PLAN_VERSION,
            "choices": choices,
            "steps": steps,
            **data,
            "frontier": self.frontier,
        }

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON. `from_json` reads it again."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan.

        Raises:
            ValueError: not JSON, another version, or not a plan.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the plan is not valid JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: another version, or not a plan.
        """
        if not isinstance(data, dict) or "version" not in data:
            found = "an object without a version" if isinstance(data, dict) else f"a {type(data).__name__}"
            raise ValueError(f"not a plan: {found}; allowed: what Plan.to_dict or Plan.to_json has made")
        if data["version"] != PLAN_VERSION:
            raise ValueError(f"plan version is {data['version']!r}; allowed: {PLAN_VERSION}")
        try:
            values = {name: value for name, value in data.items() if name != "version"}
            frontier = tuple((peak, ns) for peak, ns in values.pop("frontier"))
            lists = ("techniques", "kept", "moved")
            values["choices"] = tuple(
                Choice(**item | {name: tuple(item[name]) for name in lists}) for item in values["choices"]
            )
            values["steps"] = tuple(
                StepChoice(
                    **item
                    | {name: tuple(item[name]) for name in ("modules", "types")}
                    | {"amounts": tuple(Amount(**row) for row in item["amounts"])}
                )
                for item in values["steps"]
            )
            for name in ("predicted", "plain"):
                values[name] = Prediction.from_dict(values[name])
            for name in ("advice", "notes"):
                values[name] = tuple(values[name])
            return cls(**values, walk=lambda: frontier)
        except KeyError as error:
            raise ValueError(f"not a plan: {error} is missing") from error
        except TypeError as error:
            raise ValueError(f"not a plan: {error}") from error
