# SPDX-License-Identifier: Apache-2.0
"""`DistributedDataParallel` and FSDP2 in two processes over loopback: the bits of the run without."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_memory import SLACK
from distributed_runs import Outcome, Scenario, work

from amounts import also

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="PyTorch without gloo",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="loopback is called otherwise"),
]

WORLD = 2
SECONDS = 280
"""Most that all scenarios may take; then both processes are ended, by their ids."""

_WAYS = list(itertools.product(("before", "inside", "after"), (True, False)))
_SHARD_WAYS = list(itertools.product(("before", "after"), (True, False)))

DDP = [
    *(Scenario("ddp", when=when, sample=sample) for when, sample in _WAYS),
    *(Scenario("ddp", "sometimes", when, False, "unused") for when in ("before", "after")),
    *(Scenario("ddp", option=option, when=when) for option, when in
      (("static", "before"), ("views", "after"), ("buckets", "before"),
       *also(("static", "after"), ("views", "before"), ("buckets", "after")))),
    *(Scenario("ddp", name, when, sample) for name, when, sample in
      (("convnet", "before", False), ("gpt2", "after", True),
       *also(("convnet", "after", True), ("gpt2", "before", False)))),
    *(Scenario("ddp", "data", when, False) for when in ("before", "after")),  # planned from a real step
    *(Scenario("ddp", when=when, detach=True) for when in ("before", "after")),
    *(Scenario("ddp", when=when, sample=False, optimizer="SGD") for when in ("before", "after")),
    *(Scenario("ddp", when=when, verify=True) for when in ("before", "after")),
    Scenario("ddp", "offload", "before", offload=True),
    Scenario("ddp", "offload", "after", False, offload=True),
]  # fmt: skip

MEMORY = [
    Scenario("ddp", "steps", "before", False, memory=True),
    Scenario("ddp", "steps", "after", False, "views", memory=True),
    Scenario("ddp", "steps", "before", False, "unused", memory=True),
    Scenario("ddp", "accumulated", "after", False, "views", memory=True),
]

FSDP = [
    *(Scenario("fsdp", when=when, sample=sample) for when, sample in _SHARD_WAYS),
    *(Scenario("fsdp", when=when, sample=sample, option=option) for option, when, sample in
      (("mixed", "before", True), ("mixed", "after", False),
       ("inner", "before", False), ("inner", "after", True),
       *also(("mixed", "before", False), ("mixed", "after", True),
             ("inner", "before", True), ("inner", "after", False)))),
    *(Scenario("fsdp", when=when, option=option) for option in ("root", "kept")
      for when in ("before", "after")),
    Scenario("fsdp", "gpt2", "before", False),
    Scenario("fsdp", "gpt2", "after", False, "inner"),
    *also(Scenario("fsdp", "gpt2", "after", True), Scenario("fsdp", "gpt2", "before", True, "inner")),
    *(Scenario("fsdp", when=when, detach=True) for when in ("before", "after")),
    Scenario("fsdp", when="before", verify=True),
    Scenario("fsdp", when="after", option="mixed", verify=True),
    Scenario("fsdp", "deceives", "after", verify=True),
]  # fmt: skip


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    """Runs all scenarios in two processes, which import everything once; per rank, outcomes by scenario."""
    scenarios = [*DDP, *MEMORY, *FSDP]
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(work, args=(WORLD, folder, scenarios), nprocs=WORLD, join=False)
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end and not context.join(timeout=1.0):
                pass
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        files = [Path(folder, f"{rank}.json") for rank in range(WORLD)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def of_both_ranks(scenario: Scenario) -> list[Outcome]:
    found = [rank.get(scenario.key) for rank in outcomes()]
    assert all(outcome is not None for outcome in found), f"it did not end within {SECONDS} s"
    return [Outcome(**outcome) for outcome in found if outcome is not None]


def check(scenario: Scenario) -> list[Outcome]:
    both = of_both_ranks(scenario)
    for outcome in both:
        assert not outcome.error
        assert outcome.compared > 0 and not outcome.different
        assert outcome.active, "the run was a test of nothing"
    assert both[0].digest == both[1].digest
    return both


@pytest.mark.long
@pytest.mark.parametrize("scenario", DDP, ids=str)
def test_ddp(scenario: Scenario) -> None:
    both = check(scenario)
    check_report(scenario, both)
    for outcome in both:
        assert (outcome.saves_moved > 0) is scenario.offload


def check_report(scenario: Scenario, both: list[Outcome]) -> None:
    for outcome in both:
        assert bool(outcome.verified) is scenario.verify
        if scenario.verify:
            assert outcome.verified.startswith("verified: loss, 18 gradients"), outcome.verified
            assert " with 0 modules" not in outcome.verified


@pytest.mark.parametrize("scenario", MEMORY, ids=str)
def test_peaks_under_ddp_are_predicted(scenario: Scenario) -> None:
    """Buckets, copies of outputs, gradients of other processes: all in the plan, and not more."""
    for outcome in of_both_ranks(scenario):
        assert not outcome.error
        for what, (measured, predicted) in outcome.peaks.items():
            assert measured - SLACK <= predicted <= 1.02 * measured, (what, measured, predicted)


@pytest.mark.long
@pytest.mark.parametrize("scenario", FSDP, ids=str)
def test_fsdp2(scenario: Scenario) -> None:
    if scenario.case == "deceives":
        for outcome in of_both_ranks(scenario):  # by the recompute itself, or by the comparison of gradients
            found = outcome.error.startswith("RecomputeError") or (
                outcome.verified.startswith("NOT EQUAL: gradient")
            )
            assert found, outcome
        return
    both = check(scenario)
    check_report(scenario, both)
    if scenario.when == "after" or not scenario.sample:
        assert any("fully_shard" in note for note in both[0].notes)
