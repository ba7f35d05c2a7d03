# SPDX-License-Identifier: Apache-2.0
"""`Plan` and `Prediction`, as users have them: printed, explained, written as JSON, read again, compared.

The core decides; these are its answers with module paths, words and a timeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from typing import Any

from memscale.plans.data import (
    Amount,
    Choice,
    Frontier,
    Holder,
    Peak,
    PlanData,
    PredictionData,
    StepChoice,
)
from memscale.plans.notebook import plan_html, prediction_html
from memscale.plans.prediction_text import explain as explain_prediction
from memscale.plans.text import explain as explain_plan
from memscale.plans.text import summary_lines
from memscale.plans.timeline import PHASES, Timeline
from memscale.units import format_bytes

__all__ = [
    "PHASES",
    "Amount",
    "Choice",
    "Frontier",
    "Holder",
    "Peak",
    "Plan",
    "Prediction",
    "StepChoice",
    "Timeline",
]

PLAN_VERSION = 7
PREDICTION_VERSION = 1


@dataclass(frozen=True)
class Prediction(PredictionData):
    """What one training step will take; see `PredictionData` for its fields."""

    plan: Plan | None = None
    plain: Prediction | None = None

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<Prediction: {format_bytes(self.device_used_peak_bytes)} of {format_bytes(self.budget_bytes)}"
            f" on {self.device or 'its device'}, {verdict}>"
        )

    def _repr_html_(self) -> str:
        return prediction_html(self)

    def __reduce__(self) -> tuple[Callable[[Any], Prediction], tuple[dict[str, Any]]]:
        return Prediction.from_dict, (self.to_dict(),)  # copies and pickles: `scaling` holds the model

    def explain(self, full: bool = False) -> str:
        """The prediction as text, about one screen.

        Args:
            full: with the largest batch and sequence (takes some traces) and every module.
        """
        return explain_prediction(self, full)

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


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """What is done with each module under a budget, and what that brings; see `PlanData` for its fields."""

    predicted: Prediction
    plain: Prediction

    def __repr__(self) -> str:
        steps = "".join(f", {step.technique}" for step in self.steps)
        return (
            f"<Plan: {len(self.active)} of {len(self.choices)} modules{steps};"
            f" {format_bytes(self.predicted.device_used_peak_bytes)} of {format_bytes(self.budget_bytes)},"
            f" {'fits' if self.fits else 'does not fit'}; `explain()` tells more>"
        )

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __reduce__(self) -> tuple[Callable[[Any], Plan], tuple[dict[str, Any]]]:
        return Plan.from_dict, (self.to_dict(),)  # copies and pickles: `walk` holds the core's graph

    def summary_lines(self) -> list[str]:
        """The plan in a few lines, as the log shows it."""
        return summary_lines(self)

    def explain(self, verbose: bool = False) -> str:
        """The plan as text: what is applied where, by which rule, what it frees and costs, what was rejected.

        Args:
            verbose: a row for every module; False: layers that differ in nothing but small numbers share one.
        """
        return explain_plan(self, verbose)

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


def _values(data: dict[str, Any]) -> dict[str, Any]:
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
