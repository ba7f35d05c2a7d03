# SPDX-License-Identifier: Apache-2.0
"""`decide`, `frontier`, `replay` and `op_times_ns` through the extension."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable

import pytest

from core_samples import chain
from memscale import _core


def test_a_budget_that_holds_the_plain_step_keeps_every_module() -> None:
    g = chain(4)
    peak = _core.replay(g)["peak_bytes"]
    plan = _core.decide(g, peak)
    assert plan.summary["fits"]
    assert plan.summary["peak_bytes"] == plan.summary["plain_peak_bytes"] == peak
    assert {action for _, action, *_ in plan.choices} == {"keep"}
    assert plan.summary["graph_digest"] == g.digest
    assert plan.summary["budget_bytes"] == peak


def test_a_lower_budget_checkpoints_and_the_replayed_peak_is_the_promised_one() -> None:
    g = chain(4)
    plain = _core.replay(g)["peak_bytes"]
    plan = _core.decide(g, plain - 1)
    assert plan.summary["fits"]
    assert any(action == "checkpoint" for _, action, *_ in plan.choices)
    replayed = _core.replay(g, plan)
    assert replayed["peak_bytes"] == plan.summary["peak_bytes"] < plain
    assert replayed["peak_op"] == plan.summary["peak_op"]
    assert replayed["peak_in_recompute"] == plan.summary["peak_in_recompute"]


def test_a_budget_of_nothing_gives_the_smallest_plan() -> None:
    g = chain(4)
    plan = _core.decide(g, 0)
    assert not plan.summary["fits"]
    assert plan.summary["peak_bytes"] == plan.summary["smallest_peak_bytes"]


def test_switches_reach_the_core() -> None:
    g = chain(4)
    off = _core.decide(g, 0, allow_checkpoint=False)
    assert {(action, rule) for _, action, rule, *_ in off.choices} <= {("keep", "disabled"), ("keep", "root")}
    plain = _core.replay(g)["peak_bytes"]
    forced = _core.decide(g, plain, force=True)
    assert forced.summary["peak_bytes"] < plain


def test_offloads_leave_the_device_and_the_replay_counts_them() -> None:
    g = chain(4)
    plain = _core.replay(g)
    fast = {"out_bytes_per_us": 10**6, "in_bytes_per_us": 10**6, "offload_ns": 1, "least_bytes": 1}
    plan = _core.decide(g, plain["peak_bytes"] - 1, offload=fast)
    (gone,) = {choice[11:14] for choice in plan.choices if choice[1] == "offload"}
    assert gone[0] > 0 and gone[1] > 0
    replayed = _core.replay(g, plan)
    assert replayed["peak_bytes"] == plan.summary["peak_bytes"] < plain["peak_bytes"]
    assert replayed["away_peak_bytes"] == plan.summary["away_peak_bytes"] > 0
    assert replayed["moved_count"] == sum(choice[12] for choice in plan.choices)
    assert (plain["away_peak_bytes"], plain["moved_bytes"]) == (0, 0)
    kinds = set(_core.step_events(g, plan)["kind"])
    assert {4, 5} <= kinds and not {4, 5} & set(_core.step_events(g)["kind"])
    assert _core.frontier(g, offload=fast)[-1][0] <= _core.frontier(g)[-1][0]
    none = _core.decide(g, plain["peak_bytes"] - 1, offload={**fast, "limit_bytes": 0})
    assert none.choices == _core.decide(g, plain["peak_bytes"] - 1).choices
    assert _core.decide(g, 0, offload={"limit_bytes": None}).summary["away_peak_bytes"] == 0  # all too small
    with pytest.raises(ValueError, match="out_bytes_per_us"):
        _core.decide(g, 0, offload={"out_bytes_per_us": 0})
    with pytest.raises(ValueError, match="'rate'"):
        _core.decide(g, 0, offload={"rate": 1})


def test_the_frontier_holds_what_decide_chooses() -> None:
    g = chain(4)
    points = _core.frontier(g)
    peaks = [peak for peak, _ in points]
    times = [time for _, time in points]
    assert len(points) > 1
    assert peaks == sorted(set(peaks), reverse=True)
    assert times == sorted(set(times))
    for peak, time in points:
        summary = _core.decide(g, peak).summary
        assert (summary["peak_bytes"], summary["step_ns"]) == (peak, time)


def test_rates_change_times_and_nothing_else() -> None:
    g = chain(4)
    slow = _core.decide(g, 0, rates={"flops_per_us": 1, "launch_ns": 10**6}).summary
    fast = _core.decide(g, 0).summary
    assert slow["plain_step_ns"] > fast["plain_step_ns"]
    assert slow["plain_peak_bytes"] == fast["plain_peak_bytes"]


def test_replay_series_have_one_entry_per_operation() -> None:
    g = chain(3)
    result = _core.replay(g)
    live, ops = array("Q", result["live"]), array("I", result["ops"])
    assert ops.tolist() == list(range(g.op_count))
    assert result["recompute"] == bytes(g.op_count)
    assert result["event_count"] == g.op_count == len(live)
    assert max(live) == result["peak_bytes"] == result["stats"]["allocated_peak_bytes"]
    assert live[result["peak_op"]] == result["peak_bytes"]
    assert sum(result["category_peak_bytes"].values()) == result["peak_bytes"]
    assert tuple(result["category_peak_bytes"]) == _core.CATEGORY_NAMES


def test_replay_marks_what_is_recomputed() -> None:
    g = chain(3)
    plan = _core.Plan.build([(2, "checkpoint", "chosen", 1, 0, 0)], {})
    result = _core.replay(g, plan)
    ops, recompute = array("I", result["ops"]), result["recompute"]
    assert len(ops) == len(recompute) == result["event_count"] > g.op_count
    assert [op for op, again in zip(ops, recompute, strict=True) if not again] == list(range(g.op_count))
    names = [op[0] for op in g.ops()]
    repeated = [names[op] for op, again in zip(ops, recompute, strict=True) if again]
    assert repeated in (["aten::mm"], ["aten::mm", "aten::gelu"])  # gelu gives nothing that backward needs


def test_the_cuda_allocator_rounds_up() -> None:
    g = chain(2)
    host = _core.replay(g, sim={"kind": "host"})
    cuda = _core.replay(g, None, sim={"capacity_bytes": None, "kind": "cuda"})
    assert host["stats"]["reserved_peak_bytes"] == host["stats"]["allocated_peak_bytes"]
    assert cuda["stats"]["allocated_peak_bytes"] % 512 == 0
    assert cuda["stats"]["allocated_peak_bytes"] >= host["stats"]["allocated_peak_bytes"]
    assert cuda["peak_bytes"] == cuda["stats"]["reserved_peak_bytes"] == 2 << 20
    assert _core.replay(g) == host


def test_a_plan_for_more_modules_is_refused() -> None:
    plan = _core.Plan.build([(50, "checkpoint", "chosen", 1, 1, 1)], {})
    with pytest.raises(ValueError):
        _core.replay(chain(2), plan)


def test_operation_times_follow_the_rates() -> None:
    g = chain(2)
    rates = {"flops_per_us": 1000, "moved_bytes_per_us": 1000, "launch_ns": 5, "recompute_ns": 1}
    times = array("q", _core.op_times_ns(g, rates)).tolist()
    want = [5 + max(op[4] * 1000 // 1000, op[5] * 1000 // 1000) for op in g.ops()]
    assert len(times) == g.op_count
    assert all(abs(got - expected) <= 1 for got, expected in zip(times, want, strict=True))
    assert array("q", _core.op_times_ns(g, {**rates, "flops_per_us": {"other": 1000}})).tolist() == times
    assert _core.op_times_ns(_core.Graph()) == b""


def test_equal_questions_have_equal_answers_from_any_thread() -> None:
    g = chain(6)
    want = _core.decide(g, 0).digest
    got: list[str] = []

    def work() -> None:
        for _ in range(5):
            got.append(_core.decide(g, 0).digest)
            got.append(_core.decide(chain(6), 0).digest)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 40


@pytest.mark.parametrize("function", [lambda g: _core.decide(g, 0), _core.frontier, _core.replay])
def test_other_threads_run_meanwhile(function: Callable[[_core.Graph], object]) -> None:
    g = chain(200)
    rounds = 0
    total = 500

    def work() -> None:
        nonlocal rounds
        while rounds < total:
            function(g)
            rounds += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread now gives the interpreter up of its own will or not at all
    try:
        worker = threading.Thread(target=work)
        worker.start()
        seen = rounds
        rounds = total
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen < total


def test_version_is_the_packages() -> None:
    assert _core.version() == "0.1.0"


def test_every_kind_of_operation_has_its_rates() -> None:
    g = _core.Graph()
    for work in range(_core.WORK_COUNT):
        for flags in (0, _core.OP_HALF):
            g.add_op("op", 10**6, 0, flags=flags, work=work)
            g.add_op("op", 0, 10**6, flags=flags, work=work)
    flops = {name: 100 + i for i, name in enumerate(_core.RATE_NAMES)}
    moved = {name: 1000 + i for i, name in enumerate(_core.RATE_NAMES)}
    times = array("q", _core.op_times_ns(g, {"flops_per_us": flops, "moved_bytes_per_us": moved})).tolist()
    kinds = [work + half * _core.WORK_COUNT for work in range(_core.WORK_COUNT) for half in (0, 1)]
    want = [5000 + 10**9 // rate for kind in kinds for rate in (100 + kind, 1000 + kind)]
    assert times == want


def test_large_buffers_are_fresh() -> None:
    g = _core.Graph()
    g.add_op("op", 0, 0, scratch_bytes=100)
    g.add_buffer(1000, _core.CATEGORY_TEMPORARY)
    g.add_buffer(99, _core.CATEGORY_TEMPORARY)
    fresh = {"fresh_from_bytes": 100, "fresh_bytes_per_us": 10}
    assert array("q", _core.op_times_ns(g, fresh)).tolist() == [5000 + 100_000 + 10_000]
