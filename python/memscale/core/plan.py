# SPDX-License-Identifier: Apache-2.0
"""A plan and a prediction, as Python objects.

The core decides; these are its answers with module paths, words and a timeline. Both are plain data: they
can be printed, written as JSON, read again and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from memscale.core.prediction import Prediction
from memscale.core.timeline import PHASES, Timeline
from memscale.core.units import format_bytes

__all__ = ["PHASES", "Choice", "Frontier", "Plan", "Prediction", "Timeline"]

PLAN_VERSION = 2
Frontier = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Choice:
    """What is done with one module, and why.

    Attributes:
        module: qualified name, "" for the model itself.
        type: class name.
        techniques: names of the techniques applied; empty when the module runs as it is.
        rule: stable key of the rule behind the choice.
        reason: the rule in words.
        calls: executions of the module in one step.
        bytes: what its checkpoint frees between forward and backward, or would free.
        ns: recompute time that it costs, or would cost, by the cost model.
    """

    module: str
    type: str
    techniques: tuple[str, ...]
    rule: str
    reason: str
    calls: int
    bytes: int
    ns: int


@dataclass(frozen=True)
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
    def slowdown(self) -> float:
        """Expected step time over that of the plain step."""
        return self.predicted.step_time_ns / max(self.plain.step_time_ns, 1)

    def summary_lines(self) -> list[str]:
        """The plan in a few lines, as the log shows it."""
        peak = self.predicted.device_used_peak_bytes
        lines = [
            f"budget     {format_bytes(self.budget_bytes)} ({self.budget_source})",
            f"plain      peak {format_bytes(self.plain.device_used_peak_bytes)}",
            f"planned    peak {format_bytes(peak)}, {'fits' if self.fits else 'DOES NOT FIT'}; step time "
            f"× {self.slowdown:.2f} expected (at most {self.time_bound_ppm / 10_000:.1f} % above the best)",
        ]
        if not self.active:
            why = "the plain step fits" if self.fits else "nothing here can be checkpointed"
            return [*lines, f"plan       nothing to do: {why}"]
        groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for choice in self.active:
            groups.setdefault((choice.type, choice.techniques), []).append(choice.module)
        for (kind, techniques), modules in groups.items():
            lines.append(f"plan       {' + '.join(techniques)} {len(modules)} × {kind}: {_ranges(modules)}")
        return lines

    def explain(self) -> str:
        """Every choice with its rule, the bytes it frees and the time it costs, as text."""
        from memscale.observability.logs import table

        rows = [
            (
                choice.module or "(model)",
                choice.type,
                "+".join(choice.techniques) or "keep",
                format_bytes(choice.bytes),
                f"{choice.ns / 1e6:.2f} ms",
                choice.reason,
            )
            for choice in self.choices
        ]
        at_peak = sorted(self.predicted.by_category.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in at_peak if size)
        lines = [
            *self.summary_lines(),
            f"at peak    {parts}",
            f"smallest   peak {format_bytes(self.smallest_peak_bytes)} is the lowest that any plan reaches",
            f"digest     {self.digest} ({self.profile} profile)",
            *(f"advice     {line}" for line in self.advice),
            "",
            table(rows, ("module", "type", "technique", "bytes", "time", "why")),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, with a version."""
        choices = [asdict(choice) for choice in self.choices]
        names = [item.name for item in fields(self) if item.name not in ("choices", "walk")]
        data = {name: getattr(self, name) for name in names}
        data |= {"predicted": self.predicted.to_dict(), "plain": self.plain.to_dict()}
        return {"version": PLAN_VERSION, "choices": choices, **data, "frontier": self.frontier}

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON. `from_json` reads it again."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan.

        Raises:
            ValueError: not JSON, another version, or not a plan.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: another version, or not a plan.
        """
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"plan version is {found!r}; allowed: {PLAN_VERSION}")
        try:
            values = {name: value for name, value in data.items() if name != "version"}
            frontier = tuple((peak, ns) for peak, ns in values.pop("frontier"))
            values["choices"] = tuple(
                Choice(**{**item, "techniques": tuple(item["techniques"])}) for item in values["choices"]
            )
            for name in ("predicted", "plain"):
                values[name] = Prediction.from_dict(values[name])
            for name in ("advice", "notes"):
                values[name] = tuple(values[name])
            return cls(**values, walk=lambda: frontier)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error}") from error


def _ranges(modules: Iterable[str]) -> str:
    """`h.0 h.1 h.2 h.5` as `h.0-2, h.5`."""
    parts: list[str] = []
    run: list[tuple[str, int, str]] = []

    def close() -> None:
        if run:
            (head, first, tail), last = run[0], run[-1][1]
            parts.append(f"{head}{first}{'' if first == last else f'-{last}'}{tail}")
            run.clear()

    for module in modules:
        split = _numbered(module)
        if split is None:
            close()
            parts.append(module or "(model)")
            continue
        if run and (run[-1][0], run[-1][1] + 1, run[-1][2]) != split:
            close()
        run.append(split)
    close()
    return ", ".join(parts)


def _numbered(module: str) -> tuple[str, int, str] | None:
    """Splits at the last numeric component: ("transformer.h.", 3, ".mlp")."""
    parts = module.split(".")
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].isdigit():
            head, tail = ".".join(parts[:index]), ".".join(parts[index + 1 :])
            return (head and head + "."), int(parts[index]), (tail and "." + tail)
    return None
