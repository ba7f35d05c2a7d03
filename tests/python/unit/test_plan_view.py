# SPDX-License-Identifier: Apache-2.0
"""`explain()`: what shares a row, what is folded, what is said of the other way round."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from memscale.plans.budget import budget_for
from memscale.plans.plan import Choice, Plan
from memscale.plans.rows import PlanRow, plan_rows
from memscale.plans.text import bound_words, frontier_rows
from memscale.plans.words import kept_words, ranges
from plan_samples import MIB, PEAK, STEP_NS, choice, plan_of


def rows(*choices: Choice, verbose: bool = False) -> list[PlanRow]:
    return plan_rows(plan_of(*choices), verbose)


# ---- what shares a row -----------------------------------------------------------------------------


def test_alike_layers_share_a_row() -> None:
    blocks = [choice(f"h.{index}", "checkpoint", bytes=(100 + index) * MIB) for index in range(6)]
    (row,) = rows(*blocks)
    assert (row.count, row.modules, row.technique) == (6, "h.0-5", "checkpoint")
    assert row.bytes == (100 * MIB, 105 * MIB)
    assert row.choices == tuple(blocks)


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 150 * MIB},
        {"ns": 9_000_000},
        {"type": "Other"},
        {"rule": "smallest"},
        {"techniques": ("selective",)},
        {"calls": 2},
        {"module": "g.1"},
    ],
)
def test_a_difference_that_matters_makes_another_row(change: dict[str, object]) -> None:
    first = choice("h.0", "checkpoint")
    second = dataclasses.replace(first, **{"module": "h.1", **change})  # type: ignore[arg-type]
    assert [row.count for row in rows(first, second)] == [1, 1]


def test_what_lies_inside_is_folded() -> None:
    found = rows(
        choice("h.0", "checkpoint"),
        choice("h.0.attn", rule="covered"),
        choice("h.0.attn.drop", rule="no-saving"),
        choice("h.1", rule="split"),
        choice("h.1.attn", "checkpoint"),
        choice("h.10", rule="not-needed"),
    )
    assert [(row.modules, row.notes) for row in found] == [
        ("h.0", ("2 modules inside follow",)),
        ("h.1.attn", ()),
        ("h.1", ()),
        ("h.10", ()),
    ]


def test_what_lies_inside_each_is_counted() -> None:
    blocks = [choice(f"h.{index}", "checkpoint") for index in range(3)]
    inside = [choice(f"h.{index}.{name}", rule="covered") for index in range(3) for name in "ab"]
    assert rows(*blocks, *inside)[0].notes == ("2 modules inside each follow",)
    assert rows(*blocks, *inside[:-1])[0].notes == ("1 to 2 modules inside each follow",)
    assert rows(*blocks, inside[0], inside[2], inside[4])[0].notes == ("1 module inside each follows",)


def test_one_region_is_one_row() -> None:
    found = rows(
        choice("features.0", "checkpoint", type="Conv2d"),
        choice("features.1", "checkpoint", joined=True, type="ReLU"),
        choice("features.1.inner", rule="covered"),
        choice("features.2", "checkpoint", joined=True, type="Conv2d"),
        choice("features.3", "checkpoint", type="Conv2d"),
    )
    assert [(row.modules, row.technique, row.count) for row in found] == [
        ("features.0-2", "checkpoint as one", 1),
        ("features.3", "checkpoint", 1),
    ]
    assert found[0].bytes == (100 * MIB, 100 * MIB)  # the core gives each the numbers of the whole region
    assert found[0].type == "Conv2d, ReLU"
    assert found[0].notes == ("1 module inside follows",)


def test_what_could_not_be_is_one_row_per_reason() -> None:
    found = rows(
        choice("", rule="root"),
        choice("h.0", "checkpoint"),
        *(choice(f"x.{index}.{name}", rule="no-saving") for index in range(3) for name in "abcdef"),
        choice("cache", rule="not-tensors"),
    )
    barred = [(row.rule, row.count, row.modules) for row in found if row.barred]
    assert barred == [
        ("root", 1, "(model)"),
        ("no-saving", 18, "x.0-2.a, x.0-2.b, x.0-2.c, … x.0-2.f"),
        ("not-tensors", 1, "cache"),
    ]


def test_verbose_has_a_row_for_every_module() -> None:
    choices = [choice(f"h.{index}", "checkpoint") for index in range(3)]
    choices.append(choice("h.2.attn", rule="covered"))
    assert [row.modules for row in rows(*choices, verbose=True)] == ["h.0", "h.1", "h.2", "h.2.attn"]
    text = plan_of(*choices).explain(verbose=True)
    assert all(f" {item.module} " in text and item.reason in text for item in choices)


# ---- what is said ----------------------------------------------------------------------------------


def test_kept_operations_are_counted() -> None:
    assert kept_words(("addmm#0", "addmm#2", "mul#0", "addmm#3")) == "addmm ×3, mul"
    (row,) = rows(choice("h.0", "selective", kept=("addmm#0", "sdpa#0", "addmm#1")))
    assert row.notes == ("keeps addmm ×2, sdpa",)
    assert kept_words(("_scaled_dot_product_efficient_attention#0", "_softmax#0")) == "attention, softmax"
    (bare,) = rows(choice("h.0", "selective"))
    assert bare.notes == ("keeps nothing",)


def test_other_kept_operations_make_another_row() -> None:
    kept = [("addmm#0",), ("addmm#1",), ("addmm#0", "addmm#1")]
    found = rows(*(choice(f"h.{i}", "selective", kept=names) for i, names in enumerate(kept)))
    assert [row.modules for row in found] == ["h.0-1", "h.2"]


@pytest.mark.parametrize(
    ("technique", "peaks", "words"),
    [
        ("checkpoint", (700,), "kept instead: peak 700.00 MiB (higher by 100.00 MiB), step -3.00 ms"),
        ("checkpoint", (590,), "kept instead: peak 590.00 MiB (no higher), step -3.00 ms"),
        (
            "selective",
            (650, 700),
            "kept instead: peak 650.00 MiB – 700.00 MiB (higher by 50.00 MiB – 100.00 MiB), step -3.00 ms",
        ),
        ("", (600,), "checkpointed too: peak 600.00 MiB (no lower), step -3.00 ms"),
        ("", (500,), "checkpointed too: peak 500.00 MiB (lower by 100.00 MiB), step -3.00 ms"),
        (
            "",
            (550, 650),
            "checkpointed too: peak 550.00 MiB – 650.00 MiB (lower by 0 B – 50.00 MiB), step -3.00 ms",
        ),
    ],
)
def test_the_other_way_round(technique: str, peaks: tuple[int, ...], words: str) -> None:
    choices = [
        choice(f"h.{i}", technique, other_peak_bytes=peak * MIB, other_ns=STEP_NS - 3_000_000)
        for i, peak in enumerate(peaks)
    ]
    (row,) = rows(*choices)
    assert row.notes[-1] == words
    assert words in plan_of(*choices).explain()


def test_a_split_module_would_take_the_place_of_its_parts() -> None:
    split = choice("h.0", rule="split", other_peak_bytes=PEAK, other_ns=STEP_NS)
    found = rows(split, choice("h.0.mlp", "checkpoint"))
    assert found[1].notes == ("checkpointed as a whole: peak 600.00 MiB (no lower), step +0.00 ms",)


def test_on_a_card_the_other_peak_is_said_to_be_allocated() -> None:
    plan = plan_of(choice("h.0", "checkpoint", other_peak_bytes=PEAK, other_ns=STEP_NS))
    on_card = dataclasses.replace(plan.predicted, device_used_peak_bytes=2 * PEAK, context_bytes=PEAK)
    (row,) = plan_rows(dataclasses.replace(plan, predicted=on_card))
    assert row.notes == ("kept instead: allocated peak 600.00 MiB (no higher), step +0.00 ms",)


def test_times_the_other_way_round_are_a_range() -> None:
    blocks = [
        choice(f"h.{i}", other_peak_bytes=PEAK, other_ns=STEP_NS + i * 1_000_000, rule="costlier")
        for i in range(1, 3)
    ]
    assert rows(*blocks)[0].notes == ("checkpointed too: peak 600.00 MiB (no lower), step +1.00 to +2.00 ms",)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (21_000, "at most 2.1 % slower than the best possible plan that fits, by the cost model"),
        (21_001, "at most 2.2 % slower than the best possible plan that fits, by the cost model"),
        (1, "at most 0.1 % slower than the best possible plan that fits, by the cost model"),
        (0, "no plan that fits is faster, by the cost model"),
    ],
)
def test_the_bound_in_words(bound: int, words: str) -> None:
    plan = plan_of(choice("h.0", "checkpoint"), bound=bound)
    assert bound_words(plan) == words
    assert f"bound      {words}" in plan.explain().splitlines()


def test_no_bound_where_nothing_fits() -> None:
    plan = plan_of(choice("h.0", "checkpoint", "smallest"), fits=False)
    assert bound_words(plan) == ""
    assert "DOES NOT FIT" in plan.explain()
    assert "bound " not in plan.explain()


def test_the_head_has_pressure_mode_and_kept_operations() -> None:
    plan = plan_of(
        choice("h.0", "selective", kept=("mm#0", "mm#1")), choice("h.1", "selective", kept=("mm#0", "mm#1"))
    )
    assert plan.pressure == 2.0
    lines = plan.explain().splitlines()
    assert "plain      peak 1.37 GiB, memory pressure 200 %" in lines
    assert "plan       selective 2 × Block: h.0-1, keeping mm ×2" in lines
    assert "digest     0123456789abcdef (static profile, balanced)" in lines


@pytest.mark.parametrize(
    ("budget", "said"), [(1, "over 1,000 times the budget"), (2 * MIB, "70000 %"), (0, "over 1,000 times")]
)
def test_a_budget_of_a_few_bytes_has_no_pressure_of_ten_digits(budget: int, said: str) -> None:
    plan = dataclasses.replace(plan_of(choice("h.0", "checkpoint")), budget_bytes=budget)
    assert f"plain      peak 1.37 GiB, memory pressure {said}" in "\n".join(plan.summary_lines())


def test_a_plan_is_one_line_where_it_is_printed() -> None:
    words = repr(plan_of(choice("h.0", "checkpoint"), choice("h.1"), fits=False))
    assert words.startswith("<Plan: 1 of 2 modules; ") and "does not fit" in words and "\n" not in words


def test_the_head_keeps_regions_together() -> None:
    plan = plan_of(
        choice("f.0", "checkpoint", type="Conv"),
        choice("f.1", "checkpoint", type="ReLU", joined=True),
        choice("f.2", "checkpoint", type="Conv"),
        choice("f.3", "checkpoint", type="ReLU", joined=True),
        choice("f.4", "checkpoint", type="Conv"),
    )
    lines = [line for line in plan.summary_lines() if line.startswith("plan ")]
    assert lines == [
        "plan       checkpoint 1 × Conv: f.4",
        "plan       checkpoint as one 2 ×: f.0-1, f.2-3",
    ]


def test_many_places_are_cut_short() -> None:
    plan = plan_of(*(choice(f"h.{index}", "checkpoint") for index in range(0, 100, 2)))
    (line,) = (line for line in plan.summary_lines() if line.startswith("plan "))
    assert line.startswith("plan       checkpoint 50 × Block: h.0, h.2, h.4, ")
    assert line.endswith(", h.20, … h.98")


def test_nothing_to_do_is_said() -> None:
    lines = plan_of(choice("h.0"), bound=0).explain().splitlines()
    assert "plan       nothing to do: the plain step fits" in lines
    assert "bound      no plan that fits is faster, by the cost model" in lines
    assert "0123456789abcdef" in plan_of().explain()


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["h.0", "h.1", "h.2", "h.5"], "h.0-2, h.5"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], "a.0-1.b.0-1"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], "a.0.b.0-1, a.1.b.0"),
        (["", "x", "x.3.y", "x.4.y"], "(model), x, x.3-4.y"),
        (["m.7.m.7"], "m.7.m.7"),
        ([], ""),
    ],
)
def test_ranges(modules: list[str], words: str) -> None:
    assert ranges(modules) == words


# ---- frontier --------------------------------------------------------------------------------------


def test_frontier_rows_hold_their_budget_and_get_slower() -> None:
    found = frontier_rows(plan_of(), 12)
    assert [row[1:] for row in found] == list(plan_of().frontier)
    assert found[0][0] == budget_for(1400 * MIB)
    assert all(budget_for(peak) <= budget for budget, peak, _ in found)
    assert frontier_rows(dataclasses.replace(plan_of(), walk=tuple)) == []
    single = dataclasses.replace(plan_of(), walk=lambda: ((PEAK, 1),))
    assert frontier_rows(single) == [(budget_for(PEAK), PEAK, 1)]


def test_an_offload_says_what_leaves_and_what_shows() -> None:
    moved = {"moved": (0,), "moved_bytes": 3 << 20, "moved_count": 4, "transfer_ns": 1_500_000}
    offloaded = plan_of(
        choice("h.0", "offload", **moved), choice("h.1", "checkpoint", boundary=True, **moved), choice("h.2")
    )
    text = dataclasses.replace(offloaded, away_peak_bytes=6 << 20).explain()
    assert "offload    at most 6.00 MiB off the device at once\n" in text
    staged = dataclasses.replace(
        offloaded, away_peak_bytes=6 << 20, staging_bytes=1 << 20, path_staging_bytes=1 << 19
    )
    assert "at once, 1.50 MiB of the budget for staging buffers and tables\n" in staged.explain()
    assert "offloads what it saves: 4 tensors, 3.00 MiB; 1.50 ms of the copies does not hide" in text
    assert "offloads what it holds for its recompute: 4 tensors" in text
    assert "checkpoint, boundary offloaded 1 × " in text
    assert "off the device" not in plan_of(choice("h.0", "checkpoint")).explain()


def test_json_keeps_what_is_new() -> None:
    plan = plan_of(
        choice("h.0", "selective", kept=("addmm#0",), other_peak_bytes=5, other_ns=7),
        choice("h.1", "checkpoint", joined=True),
        choice("h.2", "offload", moved=(0, 2), moved_bytes=3, moved_count=2, transfer_ns=4, ahead_bytes=9),
    )
    plan = dataclasses.replace(
        plan, away_peak_bytes=5, window_out_bytes=6, window_in_bytes=7, staging_bytes=8
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.choices[0].kept == ("addmm#0",)
    assert again.choices[2].moved == (0, 2) and again.choices[2].ahead_bytes == 9
    assert again.window_in_bytes == 7 and again.staging_bytes == 8
    assert again.frontier == plan.frontier
    data = plan.to_dict()
    with pytest.raises(ValueError, match="plan version is 2; allowed: 7"):
        Plan.from_dict({**data, "version": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "^the plan is not valid JSON: Expecting value"),
        ("", "^the plan is not valid JSON"),
        (b"\xff", "^the plan is not valid JSON"),
        (None, "^the plan is not valid JSON"),
        ("[" * 100_000, "^the plan is not valid JSON"),
        ("{}", "^not a plan: an object without a version; allowed: what Plan.to_dict"),
        ("[1]", "^not a plan: a list; allowed"),
        ('{"version": 7}', "^not a plan: 'frontier' is missing"),
    ],
)
def test_what_is_no_plan_is_refused_in_words(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Plan.from_json(text)
    assert type(caught.value) is ValueError  # the parser's own knows nothing of plans


def test_a_plan_is_copied_and_pickled_as_the_data_it_is() -> None:
    plan = plan_of(choice("h.0", "checkpoint"))
    plan = dataclasses.replace(plan, walk=lambda: ((2, 1),))
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert again == plan and again.frontier == ((2, 1),)
