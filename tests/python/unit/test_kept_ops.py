# SPDX-License-Identifier: Apache-2.0
"""Operations by offset and by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from core_samples import chain
from memscale import _core
from memscale.observability.step_view import core_plan
from memscale.plans.kept_ops import KeptOps, operation_of
from plan_samples import choice, plan_of

NAMES = ["embed", "mm", "view", "mm", "add", "mm (phase 2)", "mm", "embed"]


def some() -> KeptOps:
    ops: list[tuple[Any, ...]] = [(name, 0) for name in NAMES]
    return KeptOps(ops, [(0, -1, 0, 8), (4, 0, 1, 7), (4, 0, 7, 8)])


def test_names_count_from_the_begin_of_the_first_call() -> None:
    assert some().names(4, (0, 2, 5)) == ("mm#0", "mm#1", "mm#2")
    assert some().names(4, (4,)) == ("mm (phase 2)#0",)
    assert some().names(0, (7,)) == ("embed#1",)
    assert some().names(9, ()) == ()


def test_offsets_are_names_the_other_way() -> None:
    for offsets in ((), (0,), (1, 3), tuple(range(6))):
        assert some().offsets(4, some().names(4, offsets)) == offsets
    assert some().offsets(4, ["mm#1", "mm#0"]) == (0, 2)


def test_what_the_call_does_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="operation 6 of a call of 6"):
        some().names(4, (1, 6))
    with pytest.raises(ValueError, match="'mm#3'"):
        some().offsets(4, ["mm#3"])
    with pytest.raises(ValueError, match="operation 0 of a call of 0"):
        some().names(9, (0,))


def test_operation_of() -> None:
    assert operation_of("addmm#12") == "addmm"
    assert operation_of("odd#name#0") == "odd#name"


def test_a_plan_goes_back_to_the_core() -> None:
    graph = chain(3)
    blocks = [choice(f"blocks.{index}", "checkpoint", joined=index == 1) for index in range(2)]
    kept = choice("blocks.2", "selective", kept=("aten::mm#0",), other_peak_bytes=5, other_ns=6)
    found = core_plan(plan_of(*blocks, kept), graph)
    assert [item[1:3] for item in found.choices] == [("checkpoint", "chosen")] * 2 + [("selective", "chosen")]
    assert [item[6:10] for item in found.choices] == [
        (0, 0, False, ()),
        (0, 0, True, ()),
        (5, 6, False, (0,)),
    ]
    assert [item[10:] for item in found.choices] == [(False, 0, 0, 0, (), 0)] * 3
    moved = {"moved_bytes": 3, "moved_count": 2, "transfer_ns": 4}
    gone = plan_of(
        choice("blocks.0", "offload", moved=(0, 2), **moved), choice("blocks.1", "checkpoint", boundary=True)
    )
    found = core_plan(dataclasses.replace(gone, window_out_bytes=5, window_in_bytes=6), graph)
    assert [item[10:] for item in found.choices] == [(False, 3, 2, 4, (0, 2), 0), (True, 0, 0, 0, (), 0)]
    assert (found.summary["window_out_bytes"], found.summary["window_in_bytes"]) == (5, 6)
    with pytest.raises(ValueError, match="'aten::mm#1'"):
        core_plan(plan_of(choice("blocks.0", "selective", kept=("aten::mm#1",))), graph)
    with pytest.raises(ValueError, match="'nowhere'"):
        core_plan(plan_of(choice("nowhere", "checkpoint")), graph)
    assert isinstance(found, _core.Plan)
