# SPDX-License-Identifier: Apache-2.0
"""What one training step will take, as data that can be printed, stored and compared.

    device_used = context + reserved        what nvidia-smi shows
    reserved    = live at the peak + fragmentation
    live        = parameter + buffer + gradient + optimizer_state + input + activation + temporary + workspace

`by_category` has one entry per word of these lines, and their sum is `device_used_peak_bytes` to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from memscale.core.timeline import Timeline
from memscale.core.units import format_bytes

if TYPE_CHECKING:
    from memscale.core.plan import Plan
    from memscale.core.scaling import Scaling

PREDICTION_VERSION = 1

CONTEXT = "context"
FRAGMENTATION = "fragmentation"


@dataclass(frozen=True)
class Peak:
    """The moment of the highest allocated bytes.

    Attributes:
        operation: the operation that was running, such as "addmm"; "" before the first.
        phase: "forward", "backward" or "optimizer".
        module: path of the module it worked for; "" where that is the model itself or nothing known.
        source: "package/file.py:123", the line that ran it; of a backward operation, the line of forward
            that it belongs to; "" if unknown.
        recompute: whether it ran for the second time, inside a checkpointed module.
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
class Prediction:
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
    plan: Plan | None = None
    plain: Prediction | None = None
    training: bool = True
    scaling: Scaling | None = field(default=None, repr=False, compare=False)

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
            ValueError: the batch cannot be told from the sample, the model takes no other, or it cannot be
                traced without data.
        """
        return self._scaling("batch").largest("batch", with_plan)

    def largest_sequence(self, with_plan: bool = True) -> int:
        """The longest sequence that fits the budget; 0 if not even one token does.

        Args:
            with_plan: under the plan for that length; False: without any technique.

        Raises:
            ValueError: the sequence cannot be told from the sample, the model takes no other, or it cannot be
                traced without data.
        """
        return self._scaling("sequence").largest("sequence", with_plan)

    def advise(self) -> tuple[str, ...]:
        """`advice`, and the largest batch and sequence, with and without a plan. Takes some traces."""
        if self.scaling is None:
            return self.advice
        return (*self.advice, *self.scaling.lines())

    def _scaling(self, what: str) -> Scaling:
        if self.scaling is None:
            raise ValueError(f"the largest {what} is known only to a prediction that `memscale.predict` made")
        return self.scaling

    # ---- text and data ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<Prediction: {format_bytes(self.device_used_peak_bytes)} of {format_bytes(self.budget_bytes)}"
            f" on {self.device or 'its device'}, {verdict}>"
        )

    def _repr_html_(self) -> str:
        from memscale.observability.notebook import prediction_html

        return prediction_html(self)

    def __reduce__(self) -> tuple[Callable[[Any], Prediction], tuple[dict[str, Any]]]:
        return Prediction.from_dict, (self.to_dict(),)  # copies and pickles: `scaling` holds the model

    def explain(self, full: bool = False) -> str:
        """The prediction as text, about one screen.

        Args:
            full: with the largest batch and sequence (takes some traces) and every module.
        """
        from memscale.core.prediction_text import explain

        return explain(self, full)

    def save_report(self, path: str | PathLike[str], title: str = "Memory of a training step") -> None:
        """Writes the prediction and its plan as one HTML file that needs nothing else.

        Args:
            path: the file; replaced if it exists.
            title: heading of the page.

        Raises:
            ValueError: this is the prediction inside a plan; save the one that `memscale.predict` returned.
            MemScaleError: Jinja2 is not installed.
            OSError: the file cannot be written.
        """
        from memscale.observability.report import write_report

        write_report(self, path, title=title)

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, with a version. The plan and the plain step are inside."""
        flat = replace(self, plan=None, plain=None, scaling=None)
        data = {"version": PREDICTION_VERSION, **asdict(flat)}
        del data["scaling"]
        data["plan"] = None if self.plan is None else self.plan.to_dict()
        data["plain"] = None if self.plain is None else self.plain.to_dict()
        return data

    def to_json(self, indent: int | None = None) -> str:
        """The prediction as JSON. `from_json` reads it again."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Prediction:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: another version, or not a prediction.
        """
        if not isinstance(data, dict) or data.get("version") != PREDICTION_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"prediction version is {found!r}; allowed: {PREDICTION_VERSION}")
        try:
            return cls(**_values(data))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a prediction: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Prediction:
        """Reads a prediction.

        Raises:
            ValueError: not JSON, another version, or not a prediction.
        """
        return cls.from_dict(json.loads(text))


def _values(data: dict[str, Any]) -> dict[str, Any]:
    from memscale.core.plan import Plan

    known = {item.name for item in fields(Prediction)}
    values = {name: value for name, value in data.items() if name != "version"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise TypeError(f"unknown fields {unknown}")
    low, high = values["error_band_bytes"]
    values["error_band_bytes"] = (low, high)
    values["timeline"] = Timeline(**{name: tuple(rows) for name, rows in values["timeline"].items()})
    values["peak"] = Peak(**values["peak"])
    for name in ("holders", "groups"):
        values[name] = tuple(_holder(item) for item in values[name])
    for name in ("advice", "notes"):
        values[name] = tuple(values[name])
    if values["plan"] is not None:
        values["plan"] = Plan.from_dict(values["plan"])
    if values["plain"] is not None:
        values["plain"] = Prediction.from_dict(values["plain"])
    return values


def _holder(data: dict[str, Any]) -> Holder:
    shape = data["shape"]
    return Holder(**{**data, "shape": None if shape is None else tuple(shape)})
