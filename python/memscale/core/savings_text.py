# SPDX-License-Identifier: Apache-2.0
"""Savings as text: plain and planned side by side, then what to know about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memscale.core.units import format_bytes

if TYPE_CHECKING:
    from memscale.core.savings import Comparison, Savings, TrainingRun

_NONE = "-"


def explain(savings: Savings) -> str:
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
    from memscale.observability.logs import table

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
        savings: of which this is a part.
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
