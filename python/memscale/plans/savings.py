# SPDX-License-Identifier: Apache-2.0
"""What a plan saves in bytes, time and money, as data that can be printed and stored.

Two runs are put side by side, plain and planned, for the same work: the samples of the batch that was given.
Saved is plain less planned. A plan that recomputes is slower on the same card, so what it saves in time and
money is below 0 there, unless the larger batch that fits with it makes up for that; both are shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from memscale.log import table
from memscale.units import format_bytes

__all__ = ["COMPARISONS", "Comparison", "Savings", "TrainingRun"]

SAVINGS_VERSION: Final = 1

COMPARISONS: Final = ("same", "needed")
"""The plain run is on the same device, or on the smallest card that holds it."""

_NONE = "-"

_NS_PER_HOUR: Final = 3_600_000_000_000


@dataclass(frozen=True)
class TrainingRun:
    """One way to train: with or without a plan, on a device, with a batch.

    Attributes:
        device: name, and `device_bytes` its memory.
        with_plan: under the plan for this batch; else without any technique.
        batch: None where it cannot be derived from the sample.
        fits: within `budget_bytes`, with the reserve.
        peak_bytes: device-used peak; on a CPU, of tensors.
        step_time_ns: by the cost model; of a run that does not fit, what a step would take if it did.
        steps_per_hour: None for a run that does not fit.
        samples_per_hour: None for that, and where the batch is not known.
        price_per_hour: of the device, as it was given.
        hours: for the samples that the whole run sees; None without a number of steps.
        cost: price of those hours.
    """

    device: str
    device_bytes: int
    with_plan: bool
    batch: int | None
    fits: bool
    peak_bytes: int
    budget_bytes: int
    step_time_ns: int
    steps_per_hour: float | None = None
    samples_per_hour: float | None = None
    price_per_hour: float | None = None
    hours: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A plain and a planned run, and what the second saves over the first.

    A step's work is that of the batch that was given: a run with twice the batch does two of them in one of
    its own steps.

    Attributes:
        plain: None where no batch fits without a plan.
        planned: None where no batch fits with one.
        saved_bytes: plain peak less planned peak; None between different batches, which both fill the budget.
        saved_ns_per_step: time, for one step's work. Below 0: the plan is slower.
        saved_share: the same as a share of the plain run's time.
        saved_cost_per_step: money, for one step's work.
        saved_hours: over all steps.
        saved_cost: over all steps.

    Times and money are None where one of the runs does not fit, or a number they need was not given.
    """

    plain: TrainingRun | None
    planned: TrainingRun | None
    saved_bytes: int | None = None
    saved_ns_per_step: int | None = None
    saved_share: float | None = None
    saved_cost_per_step: float | None = None
    saved_hours: float | None = None
    saved_cost: float | None = None


@dataclass(frozen=True)
class Savings:
    """What a plan saves.

    Attributes:
        compare: "same": both runs on one device; "needed": the plain run on `needed_device`.
        same_batch: both with the batch that was given.
        largest_batch: each with the largest batch that fits; None where the batch is unknown.
        needed_bytes: budget that the plain run needs for the batch that was given.
        needed_device: smallest device that holds it, or the cheapest of those with a price; this one if it
            does; None if none of those tried does.
        needed_device_bytes: its memory.
        plan: what the plan does, in words; "" for nothing.
        steps: of the run; None: not given.
        notes: what to know about the numbers, a line each.
    """

    compare: str
    same_batch: Comparison
    largest_batch: Comparison | None
    needed_bytes: int
    needed_device: str | None
    needed_device_bytes: int | None
    plan: str
    steps: int | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        saved = self.same_batch.saved_bytes or 0
        share = self.same_batch.saved_share
        time = "" if share is None else f", {100 * share:+.1f} % of the time"
        return f"<Savings: {format_bytes(saved)}{time}>"

    def explain(self) -> str:
        """The savings as text: a table of both runs, and what to know about it."""
        return _explain(self)

    def to_dict(self) -> dict[str, Any]:
        """The savings as plain data, with a version."""
        return {"version": SAVINGS_VERSION, **asdict(self)}

    def to_json(self, indent: int | None = None) -> str:
        """The savings as JSON. `from_json` reads it again."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Savings:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: another version, or no savings.
        """
        if not isinstance(data, dict) or data.get("version") != SAVINGS_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"savings version is {found!r}; allowed: {SAVINGS_VERSION}")
        try:
            values = {name: value for name, value in data.items() if name != "version"}
            for name in ("same_batch", "largest_batch"):
                values[name] = None if values[name] is None else _comparison(values[name])
            values["notes"] = tuple(values["notes"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not savings: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Savings:
        """Reads savings.

        Raises:
            ValueError: not JSON, another version, or no savings.
        """
        return cls.from_dict(json.loads(text))


def compared(
    plain: TrainingRun | None, planned: TrainingRun | None, batch: int | None, steps: int | None
) -> Comparison:
    """What a planned run saves over a plain one, if there are both.

    Args:
        plain: the run without a plan.
        planned: the run with one.
        batch: samples of one step's work; None: both have the batch that was given, whatever it is.
        steps: of the whole run.
    """
    if plain is None or planned is None:
        return Comparison(plain, planned)
    same = plain.batch == planned.batch
    made = Comparison(plain, planned, plain.peak_bytes - planned.peak_bytes if same else None)
    if not (plain.fits and planned.fits):
        return made
    plain_ns, planned_ns = (_work_ns(run, batch) for run in (plain, planned))
    cost = None
    if plain.price_per_hour is not None and planned.price_per_hour is not None:
        cost = (plain.price_per_hour * plain_ns - planned.price_per_hour * planned_ns) / _NS_PER_HOUR
    return replace(
        made,
        saved_ns_per_step=round(plain_ns - planned_ns),
        saved_share=(plain_ns - planned_ns) / max(plain_ns, 1),
        saved_cost_per_step=cost,
        saved_hours=None if steps is None else (plain_ns - planned_ns) * steps / _NS_PER_HOUR,
        saved_cost=None if steps is None or cost is None else cost * steps,
    )


def with_rates(run: TrainingRun, batch: int | None, steps: int | None) -> TrainingRun:
    """A run with the figures that follow from the others, if it can run at all.

    Args:
        run: device, batch, peak, step time and price.
        batch: samples of one step's work; None: what this run does in one step.
        steps: of the whole run.
    """
    if not run.fits or run.step_time_ns <= 0:
        return run
    per_hour = _NS_PER_HOUR / run.step_time_ns
    hours = None if steps is None else steps * _work_ns(run, batch) / _NS_PER_HOUR
    return replace(
        run,
        steps_per_hour=per_hour,
        samples_per_hour=None if run.batch is None else per_hour * run.batch,
        hours=hours,
        cost=None if hours is None or run.price_per_hour is None else hours * run.price_per_hour,
    )


def _work_ns(run: TrainingRun, batch: int | None) -> float:
    """Time that a run takes for the work of one step of a batch."""
    own_steps = 1.0 if batch is None or not run.batch else batch / run.batch
    return run.step_time_ns * own_steps


def _comparison(data: dict[str, Any]) -> Comparison:
    runs = {name: None if data[name] is None else TrainingRun(**data[name]) for name in ("plain", "planned")}
    return Comparison(**{**data, **runs})


# ---- text ----


def _explain(savings: Savings) -> str:
    """The text."""
    run = savings.same_batch.planned
    assert run is not None
    plain = savings.same_batch.plain
    lines = [
        f"device   {run.device}, {format_bytes(run.device_bytes)}; budget {format_bytes(run.budget_bytes)}"
    ]
    if plain is not None and plain.device != run.device:
        lines.append(f"against  {plain.device}, {format_bytes(plain.device_bytes)}, without a plan")
    lines.append(f"plan     {savings.plan or 'nothing to do'}")
    blocks = ["\n".join(lines), *_tables(savings)]
    if savings.notes:
        blocks.append("\n".join(f"note     {note}" for note in savings.notes))
    return "\n\n".join(blocks)


def _tables(savings: Savings) -> Iterator[str]:
    same, largest = savings.same_batch, savings.largest_batch
    batch = None if same.planned is None else same.planned.batch
    what = "this batch" if batch is None else f"batch {batch}"
    yield table(list(_rows(savings, same, batch)), (what, "plain", "planned", "saved"))
    if largest is not None:
        plain, planned = (0 if run is None else run.batch for run in (largest.plain, largest.planned))
        heads = ("largest batch", f"plain: {plain}", f"planned: {planned}", "saved")
        yield table(list(_rows(savings, largest, batch, batch)), heads)


def _rows(
    savings: Savings, found: Comparison, batch: int | None, samples: int | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """The rows of a table.

    Args:
        savings: the comparison belongs to them.
        found: the two runs.
        batch: the one that was given.
        samples: of one of its steps, where the runs take them in steps of another size.
    """
    runs = (found.plain, found.planned)

    def work(steps: int) -> str:
        return f"{steps:,} steps" if samples is None else f"{steps * samples:,} samples"

    def row(name: str, of: Callable[[TrainingRun], str], saved: str = "") -> tuple[str, str, str, str]:
        plain, planned = (_NONE if run is None else of(run) for run in runs)
        return name, plain, planned, saved

    yield row("peak", _peak, "" if found.saved_bytes is None else format_bytes(found.saved_bytes))
    yield row("step", lambda run: f"{run.step_time_ns / 1e6:.1f} ms" if run.fits else _NONE)
    yield row("steps an hour", lambda run: _number(run.steps_per_hour))
    yield row("samples an hour", lambda run: _number(run.samples_per_hour))
    if found.saved_share is not None:
        share = found.saved_share
        yield "time for the same work", "× 1.00", f"× {1 - share:.2f}", f"{100 * share:.1f} %"
    if savings.steps is not None:
        hours = f"hours for {work(savings.steps)}"
        yield row(hours, lambda run: _number(run.hours), _number(found.saved_hours))
    if any(run is not None and run.price_per_hour is not None for run in runs):
        yield row("price of an hour", lambda run: _number(run.price_per_hour))
        if savings.steps is not None:
            yield row("price of the run", lambda run: _number(run.cost), _number(found.saved_cost))
        else:
            saved = None if found.saved_cost_per_step is None else 1000 * found.saved_cost_per_step
            price = f"price of {work(1000)}"
            yield row(price, lambda run: _number(_price_of_1000(run, batch)), _number(saved))


def _price_of_1000(run: TrainingRun, batch: int | None) -> float | None:
    """Price of the samples of 1,000 steps of the batch that was given."""
    if run.price_per_hour is None or run.steps_per_hour is None:
        return None
    if run.samples_per_hour is None or batch is None:
        return 1000 * run.price_per_hour / run.steps_per_hour
    return 1000 * batch * run.price_per_hour / run.samples_per_hour


def _peak(run: TrainingRun) -> str:
    return format_bytes(run.peak_bytes) + ("" if run.fits else ", does not fit")


def _number(value: float | None) -> str:
    """Three digits that matter, with a mark at each thousand."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
