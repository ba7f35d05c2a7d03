# SPDX-License-Identifier: Apache-2.0
"""`step_events`: the events of a step, against the replay of the same step."""

from __future__ import annotations

from array import array

import pytest

from core_samples import chain
from memscale import _core

ALLOC, FREE, OP, AGAIN = range(4)


def columns(plan: _core.Plan | None) -> tuple[bytes, bytes, list[int], list[int], dict[str, bytes]]:
    found = _core.step_events(chain(), plan)
    ids, sizes = array("I"), array("Q")
    ids.frombytes(found["id"])
    sizes.frombytes(found["size"])
    return found["kind"], found["category"], ids.tolist(), sizes.tolist(), dict(found)


def checkpointed() -> _core.Plan:
    graph = chain()
    plan = _core.decide(graph, 1, force=True)
    assert any(action == "checkpoint" for _, action, *_ in plan.choices)
    return plan


@pytest.mark.parametrize("planned", [False, True])
def test_events_add_up_to_the_replay(planned: bool) -> None:
    plan = checkpointed() if planned else None
    kinds, categories, ids, sizes, _ = columns(plan)
    replay = _core.replay(chain(), plan)
    live, highest, at_peak = [0] * len(_core.CATEGORY_NAMES), 0, {}
    for kind, category, size in zip(kinds, categories, sizes, strict=True):
        live[category] += {ALLOC: size, FREE: -size}.get(kind, 0)
        if sum(live) > highest:
            highest, at_peak = sum(live), dict(zip(_core.CATEGORY_NAMES, live, strict=True))
    assert highest == replay["peak_bytes"]
    assert at_peak == replay["category_peak_bytes"]
    ran = array("I")
    ran.frombytes(replay["ops"])
    assert [number for kind, number in zip(kinds, ids, strict=True) if kind >= OP] == ran.tolist()
    assert (AGAIN in kinds) == planned
    assert bytes(kind - OP for kind in kinds if kind >= OP) == replay["recompute"]


def test_every_id_is_an_instance() -> None:
    kinds, _, ids, sizes, found = columns(checkpointed())
    buffers, ops = array("I"), array("I")
    buffers.frombytes(found["instance_buffer"])
    ops.frombytes(found["instance_op"])
    assert len(buffers) == len(ops) == len(found["instance_recomputed"])
    assert any(found["instance_recomputed"])
    graph = chain()
    known = graph.buffers()
    for kind, number, size in zip(kinds, ids, sizes, strict=True):
        if kind != ALLOC:
            continue
        assert ops[number] <= graph.op_count
        if buffers[number] != 2**32 - 1:
            assert known[buffers[number]][0] == size


def test_refusals() -> None:
    with pytest.raises(RuntimeError):
        _core.step_events(_core.Graph())
    with pytest.raises(TypeError):
        _core.step_events("graph")  # type: ignore[arg-type]
    foreign = _core.Plan.build([(99, "checkpoint", "chosen", 1, 1, 1)], {})
    with pytest.raises(ValueError, match="99"):
        _core.step_events(chain(), foreign)
