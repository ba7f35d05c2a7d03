# SPDX-License-Identifier: Apache-2.0
"""Builds savings from predictions: the runs that are compared, the card that a plain run needs, prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from memscale.config.checks import check_int, refuse
from memscale.core.devices import closest_names, find_card
from memscale.hardware.cards import CARDS, GIB, Card
from memscale.hardware.detect import Hardware, budget_bytes, card_hardware
from memscale.plans.budget import budget_for
from memscale.plans.plan import Plan
from memscale.plans.savings import COMPARISONS, Comparison, Savings, TrainingRun, compared, with_rates
from memscale.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memscale.config.config import Config
    from memscale.plans.data import Sizes
    from memscale.plans.plan import Prediction

_MOST_TRIED: Final = 3
"""Cards that are tried for a plain run, of those with a price and of the others. What a step takes differs
little from card to card, so that the first one is right unless it holds the run by a hair."""

_MOST_STEPS: Final = 10**15
_HIGHEST_PRICE: Final = 10**12
"""With more, products are infinite, which JSON cannot say."""


@dataclass(frozen=True)
class Terms:
    """What is asked of a comparison; checked on creation.

    Attributes:
        compare: one of `COMPARISONS`.
        price_per_hour: of the device that is asked about, or by name of a card, in about any spelling.
        steps: of the whole run.

    Raises:
        ConfigError: one of them is not allowed.
    """

    compare: str = "same"
    price_per_hour: float | Mapping[str, float] | None = None
    steps: int | None = None
    prices: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise refuse("compare", self.compare, "give 'same' or 'needed'")
        check_int(1, _MOST_STEPS, optional=True)("steps", self.steps)
        given = self.price_per_hour
        by_name = given if isinstance(given, Mapping) else {} if given is None else {"": given}
        prices = {_device_name(name): _price(name, price) for name, price in by_name.items()}
        object.__setattr__(self, "prices", prices)

    def price(self, hardware: Hardware, asked: bool) -> float | None:
        """Price of an hour of a device.

        Args:
            hardware: the device.
            asked: whether it is the one that the user asked about: a price without a name is its.
        """
        names = (
            hardware.name,
            f"{hardware.total_bytes} bytes",
            *((hardware.device_kind, "") if asked else ()),
        )
        return next((self.prices[name] for name in names if name in self.prices), None)


@dataclass(frozen=True)
class Asked:
    """The step whose savings are computed.

    Attributes:
        hardware: what it is to run on.
        config: of the plan.
        plain: a prediction whose plain step and batches count.
        planned: one whose plan and batches count; the same, unless optimizer state differs.
        on: predicts the step on another device under another configuration.
    """

    hardware: Hardware
    config: Config
    plain: Prediction
    planned: Prediction
    on: Callable[[Hardware, Config], Prediction]


def savings_of(asked: Asked, terms: Terms) -> Savings:
    """What the plan of a step saves.

    Raises:
        MemScaleError: a step of another batch cannot be traced.
    """
    assert asked.plain.plain is not None and asked.planned.plan is not None
    plain = asked.plain.plain
    needed_bytes = budget_for(plain.device_used_peak_bytes)
    needed, tried = _needed(asked, terms, needed_bytes)
    hardware, reference = needed if terms.compare == "needed" and needed else (asked.hardware, asked.plain)
    assert reference.plain is not None
    batch, why_not = _batch_of(asked.planned)
    sides = _Sides(asked, terms, hardware, reference, batch)
    same = sides.compared(reference.plain, batch, asked.planned.plan.predicted, batch)
    largest = None
    if batch is not None:
        try:
            largest = sides.largest()
        except ValueError as error:
            why_not = str(error)
    return Savings(
        compare=terms.compare,
        same_batch=same,
        largest_batch=largest,
        needed_bytes=needed_bytes,
        needed_device=None if needed is None else needed[0].name,
        needed_device_bytes=None if needed is None else needed[0].total_bytes,
        plan=_words(asked),
        steps=terms.steps,
        notes=tuple(_notes(asked, terms, (same, largest), why_not, needed, tried)),
    )


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """Makes runs of both sides: plain on its device, planned on the one that was asked about."""

    asked: Asked
    terms: Terms
    hardware: Hardware
    reference: Prediction
    batch: int | None

    def compared(
        self, plain: Prediction | None, plain_batch: int | None, planned: Prediction | None, batch: int | None
    ) -> Comparison:
        runs = (
            self._run(plain, plain_batch, self.hardware, with_plan=False),
            self._run(planned, batch, self.asked.hardware, with_plan=True),
        )
        return compared(*runs, self.batch, self.terms.steps)

    def largest(self) -> Comparison:
        plain_batch = self.reference.largest_batch(with_plan=False)
        plain = _plan_at(self.reference.scaling, plain_batch)
        batch = self.asked.planned.largest_batch()
        planned = _plan_at(self.asked.planned.scaling, batch)
        return self.compared(
            None if plain is None else plain.plain,
            plain_batch,
            None if planned is None else planned.predicted,
            batch,
        )

    def _run(
        self, step: Prediction | None, batch: int | None, hardware: Hardware, with_plan: bool
    ) -> TrainingRun | None:
        if step is None:
            return None
        run = TrainingRun(
            device=hardware.name,
            device_bytes=hardware.total_bytes,
            with_plan=with_plan,
            batch=batch,
            fits=step.fits,
            peak_bytes=step.device_used_peak_bytes,
            budget_bytes=step.budget_bytes,
            step_time_ns=step.step_time_ns,
            price_per_hour=self.terms.price(hardware, hardware is self.asked.hardware),
        )
        return with_rates(run, self.batch, self.terms.steps)


def _batch_of(prediction: Prediction) -> tuple[int | None, str]:
    """The batch of the sample, or why it cannot be derived."""
    from memscale.core.scaling import Scaling, size_of

    scaling = prediction.scaling
    if not isinstance(scaling, Scaling):
        return None, "this step has one size"
    try:
        return size_of(scaling.sample, scaling.batch, "batch"), ""
    except ValueError as error:
        return None, str(error)


def _plan_at(scaling: Sizes | None, batch: int) -> Plan | None:
    """The plan for a batch of another size, with the plain step in it; None for no batch."""
    from memscale.core.scaling import Scaling

    if not isinstance(scaling, Scaling) or batch == 0:
        return None
    with scaling.bare():
        return scaling.planner.plan_and_plain(*scaling.sample_of("batch", batch)).plan


# ---- the device that the plain run needs -------------------------------------------------------------


def _needed(asked: Asked, terms: Terms, needed_bytes: int) -> tuple[tuple[Hardware, Prediction] | None, int]:
    """The smallest device that holds the plain run, and the prediction on it; None if there is none.

    Beside it: how many were tried.
    """
    plain, tried = asked.plain, 0
    assert plain.plain is not None
    if plain.plain.fits:
        return (asked.hardware, plain), tried
    config = asked.config.replace(memory_budget=None, force_optimize=False, strict_budget=False)
    for hardware in _candidates(asked, terms, config, needed_bytes):
        prediction, tried = asked.on(hardware, config), tried + 1
        if prediction.plain is not None and prediction.plain.fits:
            return (hardware, prediction), tried
    return None, tried


def _candidates(asked: Asked, terms: Terms, config: Config, needed_bytes: int) -> Iterator[Hardware]:
    """Devices that a plain run may fit on, the best first.

    The device itself with a larger budget, if it has the memory. Else cards that compute all that it does: of
    its capability or a later one. The smallest first, of equal ones the older; where the user gave prices of
    some that would do, the cheapest of those before the others.
    """
    here = asked.hardware
    if here.total_bytes > 0 and budget_bytes(config, here).bytes >= needed_bytes:
        yield here
        return
    if here.compute_capability is None:
        share_ppm = max(1, round(config.target_gpu_utilization * 1_000_000))
        total = -(-needed_bytes * 1_000_000 // share_ppm)
        yield replace(here, name=f"{here.name}, with {format_bytes(total)}", total_bytes=total)
        return
    known = [
        card for card in CARDS if card.capability >= here.compute_capability and "Laptop" not in card.name
    ]
    cards = [card for card in known if budget_bytes(config, _hardware(card)).bytes >= needed_bytes]
    cards.sort(key=lambda card: (-(-card.total_bytes // GIB), card.capability, card.name))
    priced = [card for card in cards if card.name in terms.prices]
    priced.sort(key=lambda card: terms.prices[card.name])
    rest = [card for card in cards if card.name not in terms.prices]
    yield from map(_hardware, [*priced[:_MOST_TRIED], *rest[:_MOST_TRIED]])


def _hardware(card: Card) -> Hardware:
    return card_hardware(card.name, card.capability, card.total_bytes)


# ---- prices ----------------------------------------------------------------------------------------


def _device_name(name: Any) -> str:
    """What a price's name stands for: a card's name in the table, "cpu", "cuda", or its bytes."""
    text = name.strip() if isinstance(name, str) else None
    if text is not None and text.lower() in ("", "cpu", "cuda"):
        return text.lower()
    card = None if text is None else find_card(text)
    if card is not None:
        return card.name
    try:
        return f"{parse_bytes(name)} bytes"
    except ValueError:
        close = "" if text is None else f", such as {', '.join(map(repr, closest_names(text, 3)))}"
        raise refuse(
            "price_per_hour", name, f"its names are cards{close}, '24GiB', 'cuda' or 'cpu'"
        ) from None


def _price(name: Any, price: Any) -> float:
    of = f" of {name!r}" if name else ""
    is_number = isinstance(price, Real) and not isinstance(price, bool)
    if not is_number or not bool(0 <= price <= _HIGHEST_PRICE):
        allowed = f"give a number from 0 to {_HIGHEST_PRICE:,} for an hour{of}, or None"
        raise refuse("price_per_hour", price, allowed)
    return float(price)


# ---- words -----------------------------------------------------------------------------------------


def _words(asked: Asked) -> str:
    """What a plan does, in a line; "" for nothing."""
    plan = asked.planned.plan
    assert plan is not None
    words = [] if asked.plain is asked.planned else ["8-bit optimizer state"]
    if plan.does_something:
        lines = (line for line in plan.summary_lines() if line.startswith("plan "))
        words += [line.removeprefix("plan").strip() for line in lines]
    elif plan.predicted.device_used_peak_bytes < plan.plain.device_used_peak_bytes:
        words.append("key/value cache off")  # nothing else changes a step without being a technique
    return "; ".join(words)


def _notes(
    asked: Asked,
    terms: Terms,
    found: tuple[Comparison, Comparison | None],
    why_not: str,
    needed: tuple[Hardware, Prediction] | None,
    tried: int,
) -> Iterator[str]:
    """What to know about the numbers."""
    planned, (same, largest) = asked.planned.plan, found
    assert planned is not None and same.plain is not None
    yield from _verdict(asked, terms, needed, tried)
    if not planned.predicted.fits:
        yield f"no plan makes it fit, the smallest is shown; what would: {'; '.join(planned.advice)}"
    if largest is not None:
        yield from _outcome(largest)
    if same.plain.device != asked.hardware.name:
        yield "the runs are on different cards, whose speed and price are in what is saved"
    if terms.prices and same.plain.price_per_hour is None:
        yield f"no price was given for an hour of {same.plain.device}: no costs"
    if why_not:
        yield f"no largest batch: {why_not}"
    if asked.config.use_8bit_optimizer and asked.plain is asked.planned:
        yield "8-bit optimizer state is not counted: memscale.apply_all_optimizations makes it"
    yield "times are those of the cost model: good for comparing, not for scheduling"


def _verdict(
    asked: Asked, terms: Terms, needed: tuple[Hardware, Prediction] | None, tried: int
) -> Iterator[str]:
    """Whether a plan is needed at all, and what a run without one would need."""
    plain, planned = asked.plain.plain, asked.planned.plan
    assert plain is not None and planned is not None
    need = f"without a plan it needs a budget of {format_bytes(budget_for(plain.device_used_peak_bytes))}"
    if plain.fits:
        if not _words(asked):
            yield "the plain run fits: the plan does nothing with this batch, and saves nothing"
        else:
            yield "the plain run fits too; the plan was asked for"
    elif needed is None:
        none = f"none of the {tried} that were tried holds it" if tried else "no card of the table holds it"
        yield f"{need}: {none}"
    elif needed[0] is asked.hardware:
        yield f"{need}, which this device has; it was given {format_bytes(plain.budget_bytes)}"
    else:
        kind = "cheapest priced one" if needed[0].name in terms.prices else "smallest"
        yield f"{need}; the {kind} that holds it: {needed[0].name} ({format_bytes(needed[0].total_bytes)})"


def _outcome(largest: Comparison) -> Iterator[str]:
    """Whether a larger batch makes up for what the plan costs."""
    plain, planned, share = largest.plain, largest.planned, largest.saved_share
    if plain is None and planned is not None:
        yield "without a plan not even one sample fits"
    elif plain is not None and planned is not None and share is not None and planned.batch != plain.batch:
        rate = 100 * (1 / (1 - share) - 1)
        words = f"{abs(rate):.1f} % {'more' if rate > 0 else 'fewer'} samples an hour"
        why = ": the batch does not make up for what the plan costs"
        why = why if rate <= 0 and plain.device == planned.device else ""
        sizes = f"{planned.batch} with a plan and {plain.batch} without"
        yield f"each with its largest batch, {sizes}: {words}{why}"
