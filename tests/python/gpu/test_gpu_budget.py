# SPDX-License-Identifier: Apache-2.0
"""A byte budget on CUDA: it holds, the prediction is true, and planning takes nothing from the card."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_training import cases, config_for, context_bytes, make, train

import memscale
from memscale import _core

LARGE = cases(4)
SHARES = (90, 75, 60, 50)


def empty() -> None:
    """An empty device, with fresh counters."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "convnet"])
def test_budget_holds(name: str, bf16: bool, record: Callable[..., None]) -> None:
    """What this process takes from the card stays within every budget that the plan calls met."""
    plain = train(LARGE[name], steps=3, bf16=bf16, keep=False)
    context = context_bytes()
    broken, peaks = [], []
    for share in SHARES:
        empty()
        budget = context + plain.reserved_peak * share // 100
        run = train(LARGE[name], budget, steps=3, bf16=bf16, keep=False)
        predicted = run.plan.predicted
        record(
            "budget",
            model=name,
            precision="bf16" if bf16 else "fp32",
            share_pct=share,
            budget_bytes=budget,
            context_bytes=context,
            allocated_bytes=run.allocated_peak,
            reserved_bytes=run.reserved_peak,
            predicted_allocated_bytes=predicted.allocated_peak_bytes,
            predicted_reserved_bytes=predicted.reserved_peak_bytes,
            retries=run.retries + plain.retries,
            fits=run.plan.fits,
            checkpointed=len(run.plan.active),
            profile=run.plan.profile,
            plain_allocated_bytes=plain.allocated_peak,
            plain_reserved_bytes=plain.reserved_peak,
            plain_predicted_allocated_bytes=run.plan.plain.allocated_peak_bytes,
            plain_predicted_reserved_bytes=run.plan.plain.reserved_peak_bytes,
        )
        peaks.append(run.reserved_peak)
        if run.plan.fits and run.reserved_peak + context > budget:
            broken.append(f"{share} %: {run.reserved_peak + context - budget} bytes above {budget}")
    assert not broken, "; ".join(broken)
    assert peaks == sorted(peaks, reverse=True), f"a lower budget raised the peak: {peaks}"


def test_hard_limit() -> None:
    """With the allocator capped at the budget the plain run dies, and the wrapped one trains."""
    total = torch.cuda.mem_get_info()[1]
    plain = train(LARGE["gpt2"], steps=2, keep=False)
    empty()
    allowed = plain.reserved_peak * 60 // 100
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(LARGE["gpt2"], steps=2, keep=False)
        empty()
        run = train(LARGE["gpt2"], context_bytes() + allowed, steps=3, keep=False)
        assert run.plan.fits
        assert run.reserved_peak <= allowed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_budget_of_side_stream() -> None:
    plain = train(LARGE["gpt2"], steps=2, keep=False)
    empty()
    budget = context_bytes() + plain.reserved_peak * 60 // 100
    with torch.cuda.stream(torch.cuda.Stream()):
        run = train(LARGE["gpt2"], budget, steps=3, keep=False)
    assert not run.plan.fits or run.reserved_peak + context_bytes() <= budget


CUDNN = ("convnet",)
"""Models whose convolutions are measured when they are planned: each runs once, by itself."""


@pytest.mark.parametrize("name", LARGE)
def test_planning_takes_next_to_no_device_memory(name: str) -> None:
    """The static trace runs on fakes; only small integer tensors (ids, masks) are computed, for a moment."""
    empty()
    model, batch = make(LARGE[name])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    plan = memscale.plan(model, config=config_for(context_bytes() + (256 << 20)), sample_input=batch)
    assert plan.profile == "static", plan.notes
    assert torch.cuda.memory_allocated() == allocated
    most = plan.smallest_peak_bytes if name in CUDNN else allocated + (16 << 20)
    assert torch.cuda.max_memory_allocated() <= most
    assert torch.cuda.memory_reserved() - reserved <= 20 << 20


@pytest.mark.alone
def test_context_is_within_what_the_plan_assumes(record: Callable[..., None]) -> None:
    """Driver and library memory outside the allocator, by what the card says. Needs a card of one's own."""
    train(LARGE["gpt2"], steps=1, bf16=True, keep=False)
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    record("context", measured_bytes=outside, assumed_bytes=context_bytes())
    assert outside <= context_bytes()


def recorded(step: Callable[[], object]) -> tuple[list[dict[str, Any]], int]:
    """The allocator's own history of a run, and its peak of reserved bytes."""
    empty()
    torch.cuda.memory._record_memory_history(max_entries=4_000_000)
    try:
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return history, peak


EVENT = ("action", "addr", "size", "stream")


def replayed(history: list[dict[str, Any]]) -> tuple[str, int]:
    """Where the simulator's reserved bytes part from the allocator's, in words, and its peak."""
    simulator, ids, reserved, parted = _core.Simulator("cuda"), {}, 0, ""
    for index, event in enumerate(history):
        action, address, size, stream = (event[word] for word in EVENT)
        if action == "segment_alloc":
            reserved += size
        elif action == "segment_free":
            reserved -= size
        elif action == "alloc":
            ids[address] = index
            simulator.alloc(index, size, stream)
        elif action == "free_completed" and address in ids:
            simulator.free(ids.pop(address))
        now = simulator.stats()["reserved_bytes.all.current"]
        if action in ("alloc", "free_completed") and now != reserved and not parted:
            parted = f"event {index}, {action} of {size} bytes: {reserved} reserved, simulated {now}"
    return parted, simulator.stats()["reserved_bytes.all.peak"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt2", "convnet", "lstm"])
def test_simulator_repeats_the_allocator(name: str, record: Callable[..., None]) -> None:
    """Each allocation and release of a real run, played into the simulator: reserved bytes always agree.

    Nothing of the prediction takes part; this is the simulator against PyTorch's allocator.
    """
    for share in (100, 50):
        plain = train(LARGE[name], steps=2, keep=False).reserved_peak if share < 100 else 0
        budget = context_bytes() + plain * share // 100 if share < 100 else None
        empty()
        base = torch.cuda.memory_reserved()
        history, peak = recorded(lambda: train(LARGE[name], budget, steps=2, keep=False))  # noqa: B023
        parted, simulated = replayed(history)
        if parted and os.environ.get("MEMSCALE_GPU_RESULTS"):
            path = Path(os.environ["MEMSCALE_GPU_RESULTS"]) / f"simulator-{name}-{share}.json"
            path.write_text(json.dumps([[event.get(word) for word in EVENT] for event in history]))
        record(
            "simulator",
            model=name,
            share_pct=share,
            events=len(history),
            parted_at=parted,
            reserved_before_bytes=base,
            reserved_bytes=peak,
            simulated_reserved_bytes=simulated,
        )
        assert not base, "the device was not empty at the start"
        assert not parted and simulated == peak, parted
