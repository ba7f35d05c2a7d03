# SPDX-License-Identifier: Apache-2.0
"""What a plan saves: signs, sums, the card that a plain run needs, prices, and what is said about it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from calls import beside, failing
from cli_samples import Net, Runner
from memscale.core.devices import resolve_device
from memscale.core.savings_build import Asked, Terms, savings_of
from memscale.plans.savings import TrainingRun, compared, with_rates

MIB = 1 << 20
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def rates_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_CALIBRATION", "off")


def sample(batch: int = 64, sequence: int = 64) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long, device="meta")


def net(blocks: int = 3, width: int = 64) -> nn.Module:
    with torch.device("meta"):
        return Net(blocks, width)


def saved(budget: str | None = None, device: str = "cpu", **more: Any) -> memscale.Savings:
    config = memscale.Config(memory_budget=budget) if budget else None
    return memscale.estimate_savings(net(), None, config, sample, device, **more)


def run(batch: int | None, step_s: float, price: float | None = None, fits: bool = True) -> TrainingRun:
    step_ns = round(step_s * SECOND)
    return TrainingRun("card", 10 * MIB, False, batch, fits, 7 * MIB, 8 * MIB, step_ns, price_per_hour=price)


# ---- by hand ---------------------------------------------------------------------------------------


def test_rates_hours_and_cost_by_hand() -> None:
    # Half a second a step with 16 samples, 36,000 steps of 8 samples: 18,000 own steps are 2.5 hours.
    rated = with_rates(run(16, 0.5, price=2.0), batch=8, steps=36_000)
    assert rated.steps_per_hour == 7200
    assert rated.samples_per_hour == 115_200
    assert rated.hours == 2.5
    assert rated.cost == 5.0


def test_slower_with_the_same_batch_costs_time_and_money() -> None:
    found = compared(run(8, 1.0, price=3.6), run(8, 1.25, price=3.6), batch=8, steps=7200)
    assert found.saved_ns_per_step == -SECOND // 4
    assert found.saved_share == -0.25
    assert found.saved_cost_per_step == pytest.approx(-0.00025)
    assert found.saved_hours == -0.5
    assert found.saved_cost == pytest.approx(-1.8)


def test_a_larger_batch_can_make_up_for_it() -> None:
    # 8 samples in 1 s, 32 in 3 s: the work of 8 samples takes 0.75 s.
    found = compared(run(8, 1.0), run(32, 3.0), batch=8, steps=None)
    assert found.saved_ns_per_step == SECOND // 4
    assert found.saved_share == 0.25
    assert found.saved_bytes is None
    assert found.saved_hours is None and found.saved_cost is None and found.saved_cost_per_step is None


def test_a_cheaper_slower_card_can_save_money_and_cost_time() -> None:
    found = compared(run(8, 1.0, price=4.0), run(8, 2.0, price=1.0), batch=8, steps=3600)
    assert found.saved_hours == -1.0
    assert found.saved_cost == pytest.approx(4.0 * 1.0 - 1.0 * 2.0)


def test_a_run_that_does_not_fit_has_no_rates_and_saves_no_time() -> None:
    lacking = with_rates(run(8, 1.0, price=1.0, fits=False), batch=8, steps=10)
    assert lacking.steps_per_hour is None and lacking.hours is None and lacking.cost is None
    found = compared(lacking, run(8, 1.5, price=1.0), batch=8, steps=10)
    assert found.saved_bytes == 0
    assert found.saved_share is None and found.saved_hours is None and found.saved_cost is None


# ---- of a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight() -> memscale.Savings:
    """Of a step that fits with a plan only."""
    return saved("50MiB", steps=1000, price_per_hour=1.5)


@pytest.fixture(scope="module")
def on_a_card() -> memscale.Savings:
    """Of a step that needs more than an RTX 2060 has, against what it needs; both have a price."""
    prices = {"rtx2060": 0.1, "RTX 3080 10GB": 0.2}
    return memscale.estimate_savings(
        net(3, 256), None, None, large, "RTX 2060", compare="needed", price_per_hour=prices, steps=1000
    )


def large(batch: int = 1700) -> Tensor:
    return sample(batch)


def test_a_plain_run_that_fits_saves_nothing_and_says_so() -> None:
    found = saved("4GiB", steps=100, price_per_hour=1.0)
    plain = found.same_batch.plain
    assert plain is not None and plain.fits
    assert found.same_batch.saved_bytes == 0
    assert found.same_batch.saved_share == 0 and found.same_batch.saved_cost == 0
    assert found.plan == "" and "saves nothing" in found.explain()
    assert found.needed_device == plain.device


def test_bytes_saved_are_those_of_the_prediction(tight: memscale.Savings) -> None:
    predicted = memscale.predict(net(), None, memscale.Config(memory_budget="50MiB"), sample, "cpu")
    assert predicted.plain is not None and predicted.plan is not None and predicted.plan.active
    plain, planned = tight.same_batch.plain, tight.same_batch.planned
    assert plain is not None and planned is not None and planned.fits and not plain.fits
    assert plain.peak_bytes == predicted.plain.device_used_peak_bytes
    assert planned.peak_bytes == predicted.device_used_peak_bytes
    assert tight.same_batch.saved_bytes == plain.peak_bytes - planned.peak_bytes > 0
    assert planned.step_time_ns == predicted.step_time_ns > predicted.plain.step_time_ns
    assert tight.same_batch.saved_share is None, "there is no plain run to save time over"
    assert tight.largest_batch is not None
    sizes = [run.batch for run in (tight.largest_batch.plain, tight.largest_batch.planned) if run]
    assert sizes == [predicted.largest_batch(with_plan=False), predicted.largest_batch()]


def test_less_memory_saves_more_bytes_at_more_time() -> None:
    found = [at_budget(budget).same_batch for budget in ("400MiB", "60MiB", "50MiB", "42MiB")]
    sizes = [item.saved_bytes for item in found if item.saved_bytes is not None]
    times = [item.planned.step_time_ns for item in found if item.planned is not None and item.planned.fits]
    assert len(sizes) == len(times) == 4
    assert sizes[0] == 0 and sizes == sorted(set(sizes))
    assert times == sorted(set(times))


def at_budget(budget: str) -> memscale.Savings:
    """Of one batch size alone."""
    config, host = memscale.Config(memory_budget=budget), resolve_device("cpu")
    prediction = replace(memscale.predict(net(), None, config, sample(), "cpu"), scaling=None)
    return savings_of(Asked(host, config, prediction, prediction, lambda *_: prediction), Terms())


def test_a_plan_on_the_same_card_says_what_it_costs(tight: memscale.Savings) -> None:
    largest = tight.largest_batch
    assert largest is not None and largest.plain is not None and largest.planned is not None
    assert largest.plain.batch < 64 < largest.planned.batch  # type: ignore[operator]
    # In this model every sample costs the same, so that nothing makes up for what runs twice.
    assert largest.saved_share is not None and largest.saved_share < 0
    assert largest.saved_hours is not None and largest.saved_hours < 0
    assert largest.saved_cost == pytest.approx(1.5 * largest.saved_hours)
    assert largest.saved_hours == pytest.approx(largest.plain.hours - largest.planned.hours)  # type: ignore[operator]
    assert "does not make up for what the plan costs" in tight.explain()
    assert "which this device has; it was given 50.00 MiB" in tight.explain()


def test_work_of_another_batch_is_told_in_samples(tight: memscale.Savings) -> None:
    """The largest batch takes the samples of so many steps in fewer of its own."""
    same, largest = tight.explain().split("largest batch", 1)
    assert "hours for 1,000 steps" in same and "samples  " not in same
    assert "hours for 64,000 samples" in largest and "1,000 steps" not in largest
    priced = replace(tight, steps=None).explain().split("largest batch", 1)
    assert "price of 1,000 steps" in priced[0]
    assert "price of 64,000 samples" in priced[1] and "1,000 steps" not in priced[1]


def test_what_does_not_fit_names_the_card_that_it_needs(on_a_card: memscale.Savings) -> None:
    plain, planned = on_a_card.same_batch.plain, on_a_card.same_batch.planned
    assert plain is not None and planned is not None
    assert planned.device == "NVIDIA GeForce RTX 2060" and planned.fits and planned.with_plan
    assert plain.device == on_a_card.needed_device == "NVIDIA GeForce RTX 3080 10GB"
    assert plain.fits and not plain.with_plan
    there = resolve_device("RTX 3080 10GB").total_bytes
    assert on_a_card.needed_device_bytes == there
    assert planned.budget_bytes < on_a_card.needed_bytes <= there * 85 // 100
    assert "RTX 3080 10GB" in on_a_card.explain()


def test_the_larger_card_is_faster_and_dearer(on_a_card: memscale.Savings) -> None:
    same = on_a_card.same_batch
    assert same.plain is not None and same.planned is not None
    assert same.saved_hours is not None and same.saved_hours < 0
    assert same.plain.price_per_hour == 0.2 and same.planned.price_per_hour == 0.1
    expected = 0.2 * 1000 / same.plain.steps_per_hour - 0.1 * 1000 / same.planned.steps_per_hour  # type: ignore[operator]
    assert same.saved_cost == pytest.approx(expected)


def test_a_step_that_no_card_holds() -> None:
    with torch.device("meta"):
        model = nn.Linear(300_000, 300_000)  # 335 GiB of weights
    found = memscale.estimate_savings(model, None, None, torch.empty(1, 300_000, device="meta"), "B300")
    assert found.needed_device is None and found.needed_device_bytes is None
    assert found.largest_batch is not None
    assert found.largest_batch.plain is None and found.largest_batch.planned is None
    assert "no card of the table holds it" in found.explain()


class Positions(nn.Module):
    """Takes 8 samples and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table).square()


class ByValue(nn.Module):
    """Decides by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        tallies.add(len(ids))
        x = self.words(ids)
        return x * 2 if x.sum() > 0 else x


def test_a_model_that_takes_one_batch_has_no_largest() -> None:
    model, x = Positions(), torch.zeros(8, 4)
    found = memscale.estimate_savings(model, sample_input=x, device="cpu")
    assert found.largest_batch is None and "no largest batch" in found.explain()
    predicted = memscale.predict(model, sample_input=x, device="cpu")
    with pytest.raises(ValueError, match="largest batch is unknown: with"):
        predicted.largest_batch()
    assert predicted.advise() == predicted.advice


@pytest.mark.parametrize("device", ["cpu", "24GiB"])
def test_no_other_size_is_run_for_real(device: str) -> None:
    tallies.clear()
    model, ids = ByValue(), torch.zeros(8, 2, dtype=torch.long)
    predicted = memscale.predict(model, sample_input=ids, device=device)
    assert predicted.method == "empirical"
    with pytest.raises(ValueError, match="without data"):
        predicted.largest_batch()
    predicted.explain(full=True)
    found = memscale.estimate_savings(model, sample_input=ids, device=device)
    assert found.largest_batch is None and tallies.keys() == {"8"}


def test_a_batch_that_cannot_be_told_leaves_the_largest_out() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (layer(x).sum() + layer(y).sum()).square()

    layer = nn.Linear(4, 4)
    model = Two()
    model.layer = layer
    found = memscale.estimate_savings(
        model, None, None, (torch.randn(3, 4), torch.randn(5, 4)), "cpu", steps=5
    )
    assert found.largest_batch is None and "no largest batch" in found.explain()
    run = found.same_batch.planned
    assert run is not None and run.batch is None and run.samples_per_hour is None
    assert run.hours == pytest.approx(5 / run.steps_per_hour)  # type: ignore[operator]


def test_8bit_state_counts_as_saved() -> None:
    """AdamW's moments of 32 MiB of weights take 64 MiB, in 8 bits some 16; its temporaries go, too."""
    model = nn.Linear(2896, 2896)
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(use_8bit_optimizer=True, memory_budget="4GiB", exact=False)
    found = memscale.estimate_savings(model, optimizer, config, torch.randn(2, 2896), "cpu")
    assert found.same_batch.saved_bytes is not None
    assert found.same_batch.saved_bytes > 40 * MIB
    assert "8-bit optimizer state" in found.plan and "saves nothing" not in found.explain()
    assert type(optimizer).__module__.startswith("torch.optim"), "the optimizer was only counted"
    assert not optimizer.state


def test_the_largest_batch_of_a_prediction_counts_8bit_state() -> None:
    """4 MiB of weights: plain AdamW's state and temporaries alone are above this budget."""
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    config = memscale.Config(use_8bit_optimizer=True, memory_budget="16MiB", exact=False)
    predicted = memscale.predict(model, optimizer, config, torch.randn(2, 1024), "cpu")
    assert predicted.fits and predicted.largest_batch() > 2
    config = config.replace(use_8bit_optimizer=False)
    assert memscale.predict(model, optimizer, config, torch.randn(2, 1024), "cpu").largest_batch() == 0


# ---- as data ---------------------------------------------------------------------------------------


def test_json_comes_back_the_same(tight: memscale.Savings) -> None:
    again = memscale.Savings.from_json(tight.to_json())
    assert again == tight
    assert json.loads(tight.to_json())["same_batch"]["saved_bytes"] == tight.same_batch.saved_bytes
    with pytest.raises(ValueError, match="savings version is 7; allowed: 1"):
        memscale.Savings.from_dict({**tight.to_dict(), "version": 7})
    with pytest.raises(ValueError, match="not savings"):
        memscale.Savings.from_dict({"version": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compare": "cheapest"}, "compare='cheapest' is not allowed: give 'same' or 'needed'"),
        ({"steps": 0}, "steps=0 is not allowed"),
        ({"steps": 1.5}, "steps=1.5 is not allowed"),
        ({"price_per_hour": -1}, "price_per_hour=-1 is not allowed"),
        ({"price_per_hour": float("nan")}, "price_per_hour=nan is not allowed"),
        ({"price_per_hour": "3"}, "price_per_hour='3' is not allowed"),
        ({"price_per_hour": {"RTX 3090": None}}, "an hour of 'RTX 3090'"),
        ({"price_per_hour": {"RTX 9090": 1}}, "price_per_hour='RTX 9090' is not allowed.*RTX"),
        ({"price_per_hour": {3: 1}}, "price_per_hour=3 is not allowed"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(memscale.errors.ConfigError, match=message):
        saved("50MiB", **given)


def test_prices_are_found_by_name_size_and_kind() -> None:
    card, sized, host = (resolve_device(name) for name in ("RTX 3090", "24GiB", "cpu"))
    terms = Terms(price_per_hour={"3090": 1, "24GiB": 2, "cpu": 3})
    assert [terms.price(item, asked=False) for item in (card, sized)] == [1, 2]
    assert terms.price(host, asked=True) == 3
    alone = Terms(price_per_hour=4)
    assert alone.price(card, asked=True) == 4
    assert alone.price(card, asked=False) is None, "the price of one card says nothing of another"


def test_a_price_of_a_card_that_does_not_hold_it_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first card tried, the only one with a price, misses by a hair."""
    config = memscale.Config(memory_budget="50MiB")
    fitting = memscale.predict(net(), None, None, sample(), "cpu")
    tight = memscale.predict(net(), None, config, sample, "RTX 2060")
    assert tight.plain is not None and fitting.plain is not None
    tight = replace(tight, plain=replace(tight.plain, device_used_peak_bytes=9 << 30))
    seen: list[str] = []

    def on(hardware: Any, _: Any) -> Any:
        seen.append(hardware.name)
        return tight if "3090" in hardware.name or holds_none else fitting

    asked = Asked(resolve_device("RTX 2060"), config, tight, tight, on)
    terms = Terms(price_per_hour={"RTX 3090": 1})
    for holds_none in (False, True):
        seen.clear()
        found = savings_of(asked, terms)
        assert seen[0] == "NVIDIA GeForce RTX 3090" and len(seen) == (4 if holds_none else 2)
        assert (found.needed_device is None) == holds_none
    assert "none of the 4 that were tried holds it" in found.explain()


# ---- command line ----------------------------------------------------------------------------------


def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    program = Runner(capsys)
    words = (
        "estimate",
        "cli_samples:sized",
        "--batch",
        64,
        "--seq",
        64,
        "--device",
        "cpu",
        "--budget",
        "50MiB",
    )
    said = program(*words, "--savings", "--steps", 1000, "--price", "1.5", "--json")
    assert said.code == 0
    found = memscale.Savings.from_dict(said.document["savings"])
    assert said.document["format"] == "memscale-savings" and found.steps == 1000
    assert found.same_batch.saved_bytes is not None and found.same_batch.saved_bytes > 0
    assert found.same_batch.planned is not None
    assert found.same_batch.planned.cost == pytest.approx(1.5 * found.same_batch.planned.hours)  # type: ignore[operator]


def test_the_command_line_refuses_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    program = Runner(capsys)
    program("estimate", "cli_samples:sized", "--savings", "--batch", "1,2").refused("one case")
    program("estimate", "cli_samples:sized", "--steps", 3).refused("--savings")
    program("estimate", "cli_samples:sized", "--savings", "--price", "much").refused("is no price")
    program("estimate", "cli_samples:sized", "--savings", "--price", "banana=1").refused(
        "price_per_hour='banana'"
    )


@pytest.mark.parametrize("ours", [False, True])
def test_only_what_the_model_raises_is_a_step_of_another_size(
    ours: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ours:
        monkeypatch.setattr("memscale.core.savings_build._plan_at", None)
    words = ("--batch", 64, "--seq", 64, "--device", "cpu", "--budget", "50MiB", "--savings")
    fails = nullcontext() if ours else beside({savings_of: failing(IndexError("of the model"))})
    with fails:
        said = Runner(capsys)("estimate", "cli_samples:sized", *words)
    assert said.code == 2
    assert ("a step of another size" in said.err) == (not ours)
    assert ("--debug shows where" in said.err) == ours
