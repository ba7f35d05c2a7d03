# SPDX-License-Identifier: Apache-2.0
"""`_core.Plan`: building, text, digest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memscale import _core

STAYS = (False, 0, 0, 0, (), 0)
CHOICES: list[Any] = [
    (0, "keep", "root", 1, 0, 0, 0, 0, False, (), *STAYS),
    (1, "checkpoint", "chosen", 2, 2**40, 123_456, 2**41, 99, False, (), *STAYS),
    (2, "checkpoint", "chosen", 2, 2**40, 123_456, 0, 0, True, (), *STAYS),
    (4, "keep", "not-needed", 65535, 5, 0, 7, 2**63 - 1, False, (), *STAYS),
    (5, "selective", "chosen", 1, 5, 0, 0, 0, False, (0, 3, 2**32 - 2), *STAYS),
    (6, "selective", "chosen", 1, 5, 0, 0, 0, False, (), *STAYS),
    (7, "offload", "chosen", 3, 9, 8, 0, 0, False, (), False, 2**40, 2**32 - 1, 8, (0, 1, 2**32 - 2), 2**41),
    (8, "selective", "chosen", 1, 9, 8, 0, 0, False, (4,), True, 2**30, 1, 3, (0,), 0),
]
SUMMARY: dict[str, Any] = {
    "budget_bytes": 1000,
    "plain_peak_bytes": 2000,
    "peak_bytes": 900,
    "smallest_peak_bytes": 700,
    "plain_step_ns": 10**9,
    "step_ns": 2 * 10**9,
    "time_bound_ppm": 1234,
    "peak_op": 17,
    "peak_in_recompute": True,
    "fits": True,
    "graph_digest": "0123456789abcdef",
    "window_out_bytes": 2**26,
    "window_in_bytes": 2**27,
    "away_peak_bytes": 2**40,
    "staging_bytes": 2**20,
}


def test_parts_are_read_back_as_given() -> None:
    plan = _core.Plan.build(CHOICES, SUMMARY)
    assert plan.choices == CHOICES
    assert plan.summary == SUMMARY
    assert plan.summary["fits"] is True
    assert list(plan.summary) == list(SUMMARY)
    assert re.fullmatch("[0-9a-f]{16}", plan.digest)


def test_a_choice_may_be_given_short() -> None:
    plan = _core.Plan.build([choice[:6] for choice in CHOICES], SUMMARY)
    assert plan.choices == [(*choice[:6], 0, 0, False, (), *STAYS) for choice in CHOICES]
    plan = _core.Plan.build([choice[:10] for choice in CHOICES], SUMMARY)
    assert plan.choices == [(*choice[:10], *STAYS) for choice in CHOICES]


def test_lists_may_be_any_iterable() -> None:
    want = _core.Plan.build(CHOICES, SUMMARY).digest
    choices = [
        (*choice[:9], iter(choice[9]), *choice[10:14], iter(choice[14]), choice[15]) for choice in CHOICES
    ]
    assert _core.Plan.build(choices, SUMMARY).digest == want


def test_choices_may_be_any_iterable_of_sequences() -> None:
    want = _core.Plan.build(CHOICES, SUMMARY).digest
    assert _core.Plan.build([list(choice) for choice in CHOICES], SUMMARY).digest == want
    assert _core.Plan.build((choice for choice in CHOICES), SUMMARY).digest == want


def test_text_keeps_everything() -> None:
    plan = _core.Plan.build(CHOICES, SUMMARY)
    for copy in (_core.Plan.parse(plan.to_text()), _core.Plan.parse(plan.to_text().encode())):
        assert copy.digest == plan.digest
        assert copy.choices == CHOICES
        assert copy.summary == SUMMARY


def test_what_is_left_out_of_the_summary_is_zero() -> None:
    summary = _core.Plan.build([], {"budget_bytes": 5, "fits": True}).summary
    assert summary["budget_bytes"] == 5
    assert summary["graph_digest"] == "0" * 16
    assert summary["peak_in_recompute"] is False


def test_every_difference_shows_in_the_digest() -> None:
    digests = {_core.Plan.build(CHOICES, SUMMARY).digest}
    digests.add(_core.Plan.build(CHOICES[:2], SUMMARY).digest)
    selective = CHOICES[4]
    for changed in (
        (*selective[:9], (0, 3)),
        (*selective[:6], 1, *selective[7:]),
        (*selective[:7], 1, *selective[8:]),
    ):
        digests.add(_core.Plan.build([*CHOICES[:4], changed, CHOICES[5]], SUMMARY).digest)
    digests.add(_core.Plan.build([(*CHOICES[1][:8], True, ())], SUMMARY).digest)
    digests.add(_core.Plan.build([*CHOICES[:-1], (*CHOICES[-1][:-1], 1)], SUMMARY).digest)
    for key, value in SUMMARY.items():
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "f" * 16
        digests.add(_core.Plan.build(CHOICES, {**SUMMARY, key: other}).digest)
    assert len(digests) == len(SUMMARY) + 7


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ((0, "drop", "chosen", 1, 1, 1), "action"),
        ((0, "keep", "because", 1, 1, 1), "rule"),
        ((0, "keep", "chosen", 65536, 1, 1), "call_count"),
        ((0, "keep", "chosen", 1, -1, 1), "saved_bytes"),
        ((0, "keep", "chosen", 1, 1, 2**63), "cost_ns"),
        ((0, "keep", "chosen"), "6, 10 or 16 elements, not 3"),
        ((0, "keep", "chosen", 1, 1, 1, -1, 0, False, ()), "other_peak_bytes"),
        ((0, "keep", "chosen", 1, 1, 1, 0, -1, False, ()), "module 0: the step time the other way round"),
        ((0, "keep", "chosen", 1, 1, 1, 0, 0, True, ()), "only a checkpoint can be joined"),
        ((0, "checkpoint", "chosen", 1, 1, 1, 0, 0, False, (1,)), "the action checkpoint keeps no operation"),
        ((0, "selective", "chosen", 1, 1, 1, 0, 0, False, (2, 1)), "offsets must rise"),
        ((0, "selective", "chosen", 1, 1, 1, 0, 0, False, (-1,)), "a kept offset"),
        ((0, "keep", "chosen", 1, 1, 1, 0, 0, False, (), False, 1, 0, 0, (), 0), "nothing is offloaded"),
        (
            (0, "keep", "chosen", 1, 1, 1, 0, 0, False, (), True, 0, 0, 0, (), 0),
            "the action keep has no boundary",
        ),
        ((0, "checkpoint", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 0, 0, (1,), 0), "moves nothing"),
        ((0, "offload", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 0, 0, (1, 1), 0), "ordinals must rise"),
        ((0, "offload", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 0, 0, (-1,), 0), "a moved ordinal"),
        ((0, "offload", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 2**32, 0, (), 0), "moved_count"),
        ((0, "offload", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 0, -1, (), 0), "transfers is negative"),
        ((0, "offload", "chosen", 1, 1, 1, 0, 0, False, (), False, 0, 0, 0, (), -1), "ahead_bytes"),
        ((2**32 - 1, "keep", "chosen", 1, 1, 1), "module"),
    ],
)
def test_a_bad_choice_is_named(choice: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Plan.build([choice], SUMMARY)


def test_module_ids_must_rise() -> None:
    with pytest.raises(ValueError):
        _core.Plan.build([CHOICES[1], CHOICES[0]], SUMMARY)
    with pytest.raises(ValueError):
        _core.Plan.build([CHOICES[0], CHOICES[0]], SUMMARY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 1}, "'budget'"),
        ({"peak_op": 2**32}, "peak_op"),
        ({"graph_digest": "xyz"}, "graph_digest"),
        ({"graph_digest": "0123456789ABCDEF"}, "graph_digest"),
        ({"graph_digest": "0123456789abcdef0"}, "graph_digest"),
    ],
)
def test_a_bad_summary_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Plan.build(CHOICES, {**SUMMARY, **change})


def test_wrong_types_are_type_errors() -> None:
    with pytest.raises(TypeError, match="fits must be a bool"):
        _core.Plan.build(CHOICES, {**SUMMARY, "fits": 1})
    with pytest.raises(TypeError):
        _core.Plan.build(7, SUMMARY)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.Plan.build([7], SUMMARY)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="joined must be a bool"):
        _core.Plan.build([(*CHOICES[1][:8], 1, ())], SUMMARY)
    with pytest.raises(TypeError):
        _core.Plan.build([(*CHOICES[4][:9], 7)], SUMMARY)
    with pytest.raises(TypeError, match="kept offset"):
        _core.Plan.build([(*CHOICES[4][:9], ("addmm#0",))], SUMMARY)
    with pytest.raises(TypeError, match="summary must be a dict"):
        _core.Plan.build(CHOICES, [])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.Plan()


def test_an_exception_inside_the_iterable_passes_through() -> None:
    def choices() -> Any:
        yield CHOICES[0]
        raise LookupError("stop")

    with pytest.raises(LookupError, match="stop"):
        _core.Plan.build(choices(), SUMMARY)


def test_rules_have_texts() -> None:
    assert _core.rule_text("not-needed") == "the budget is met without it"
    with pytest.raises(ValueError, match="'none'"):
        _core.rule_text("none")


def test_repr_says_what_it_does() -> None:
    assert (
        repr(_core.Plan.build(CHOICES, SUMMARY)) == "<Plan: 6 of 8 modules checkpointed or offloaded, fits>"
    )
    assert "does not fit" in repr(_core.Plan.build([], {}))
