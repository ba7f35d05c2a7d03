# SPDX-License-Identifier: Apache-2.0
"""Limits of the tiers through `wrap`: nothing is taken beyond them at any time, staging included."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.core import planner
from memscale.hardware.detect import Hardware, detect
from memscale.offload import limits
from memscale.offload.engine import Offload, OffloadSettings, why_not
from memscale.offload.limits import STAGING_BYTES, Link, link_for
from patched import use_disk_of, use_disk_with
from soak.samples import Network, batch, config, engine_of, same, step, whole_bytes

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

MB = 10**6
CUDA = torch.device("cuda", 0)


def card(pinned_limit: int | None = None, available: int = 1 << 30) -> Hardware:
    """This machine with a card beside it."""
    return dataclasses.replace(
        detect(torch.device("cpu")),
        device_kind="cuda",
        pinned_limit_bytes=pinned_limit,
        host_available_bytes=available,
    )


def link(tiers: tuple[str, ...], cap_gb: float | None, hardware: Hardware, **more: Any) -> Link:
    """What a configuration allows on a card."""
    wanted = Config(max_cpu_offload_gb=cap_gb, async_config=AsyncOffloadConfig(tiers=tiers, **more))
    found = link_for(wanted.effective(), hardware, CUDA, 1 << 30)
    assert isinstance(found, Link), found
    return found


def gigabytes(size: int) -> float:
    return size / 10**9


def test_host_memory_is_shared_out_and_not_exceeded() -> None:
    cap = 256 * MB
    whole = link(("pinned", "pageable"), gigabytes(cap), card()).settings
    assert (whole.pinned_bytes, whole.host_bytes) == (cap, 0)
    ulimit = link(("pinned", "pageable"), gigabytes(cap), card(pinned_limit=64 * MB)).settings
    assert (ulimit.pinned_bytes, ulimit.host_bytes) == (64 * MB, cap - 64 * MB)
    asked = link(("pinned", "pageable"), gigabytes(cap), card(), pinned_pool_bytes=32 * MB).settings
    assert (asked.pinned_bytes, asked.host_bytes) == (32 * MB, cap - 32 * MB)
    only = link(("pageable",), gigabytes(cap), card()).settings
    assert (only.pinned_bytes, only.host_bytes) == (0, cap)


def test_a_limit_below_the_staging_buffers_is_no_limit_to_work_with() -> None:
    wanted = Config(max_cpu_offload_gb=gigabytes(STAGING_BYTES // 2), async_offload=True)
    assert "less than" in str(link_for(wanted.effective(), card(), CUDA, 1 << 30))


def test_pageable_memory_has_room_for_the_staging_buffers() -> None:
    """They are in it where the driver locks no pages: an engine refuses a limit that is below them."""
    found = link(("pinned", "pageable"), gigabytes(36 * MB), card(), pinned_pool_bytes=32 * MB).settings
    assert (found.pinned_bytes, found.host_bytes) == (32 * MB, 0)


def test_the_staging_buffers_are_not_promised_to_blocks() -> None:
    found = link(("pinned", "pageable"), gigabytes(256 * MB), card())
    assert found.limit_bytes == 256 * MB - STAGING_BYTES


@pytest.mark.parametrize(
    "budget, out, back", [(320 * MB, 10 * MB, 20 * MB), (1 << 44, 64 << 20, 256 << 20), (1, 0, 0)]
)
def test_what_waits_is_a_share_of_the_budget(budget: int, out: int, back: int, tmp_path: Path) -> None:
    """That is how far a step over a file may stay below its prediction."""
    found = link_for(config(tmp_path).effective(), card(), torch.device("cpu"), budget)
    assert isinstance(found, Link)
    assert (found.for_decision.window_out_bytes, found.for_decision.window_in_bytes) == (out, back)
    assert (found.settings.window_bytes, found.settings.prefetch_bytes) == (out, back)


def test_without_prefetch_a_plan_counts_none(tmp_path: Path) -> None:
    wanted = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path), prefetch_depth=0)
    found = link_for(Config(async_config=wanted).effective(), card(), torch.device("cpu"), 320 * MB)
    assert isinstance(found, Link) and found.for_decision.window_in_bytes == 0


def test_an_engine_brings_back_as_many_as_it_can_where_more_are_wanted(tmp_path: Path) -> None:
    wanted = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path), prefetch_depth=10**10)
    found = link_for(Config(async_config=wanted).effective(), card(), torch.device("cpu"), 320 * MB)
    assert isinstance(found, Link) and Offload(found.settings).engine.counters()["block_count"] == 0


@pytest.mark.parametrize(
    "budget, chunk",
    [(1, 64 << 10), (64 << 20, 64 << 10), (200 << 20, 256 << 10), (1 << 30, 1 << 20), (1 << 40, 2 << 20)],
)
def test_staging_is_a_share_of_the_budget(budget: int, chunk: int, tmp_path: Path) -> None:
    """On a CPU host, where it is memory of the budget; and no engine takes more than is counted for it."""
    here = detect(torch.device("cpu"))
    found = link_for(config(tmp_path).effective(), here, torch.device("cpu"), budget)
    assert isinstance(found, Link) and found.settings.chunk_bytes == chunk
    counted = found.for_decision.staging_bytes
    assert counted == found.engine_bytes(here) == found.settings.own_bytes()
    assert found.engine_bytes(card()) == 0  # a card's budget has none of it
    engine = Offload(dataclasses.replace(found.settings, least_bytes=1)).engine
    blocks = [engine.put(torch.ones(5000)) for _ in range(200)]
    counters = engine.counters()
    assert counters["block_count"] == len(blocks) == 200
    assert counters["staging_bytes"] == found.settings.staging_bytes == counters["taken_bytes_host"]
    assert 0 < counters["table_bytes"] <= counted - found.settings.staging_bytes
    blocks += [engine.put(torch.ones(5000)) for _ in range(2000)]
    counters = engine.counters()
    assert counters["staging_bytes"] + counters["table_bytes"] <= found.engine_bytes(here, 2200)
    del blocks
    engine.close()


@pytest.mark.parametrize("count", [1025, 2049, 8193])
def test_no_engine_has_larger_tables_than_are_counted(count: int) -> None:
    """Arrays double, and these counts just exceed what they had room for; the second step has all of them."""
    door = Offload(
        OffloadSettings(torch.device("cpu"), host_bytes=16 << 20, file_bytes=0, least_bytes=1, trace_count=9)
    )
    engine = door.engine
    tensors = [torch.ones(8) for _ in range(count)]
    for _ in range(3):
        saved = [engine.pack(tensor) for tensor in tensors]
        engine.settle()
        assert engine.counters()["block_count"] == count
        while saved:
            engine.unpack(saved.pop())
    assert engine.counters()["table_bytes"] <= door.settings.own_bytes(count) - door.settings.staging_bytes
    engine.close()


def test_the_plan_counts_each_engine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of what modules save and of gradients is the same one."""
    use_disk_of(monkeypatch)
    model, x = Network(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = memscale.plan(model, sample_input=x, optimizer=optimizer).plain.device_used_peak_bytes
    seen = set()
    for percent in (99, 75, 60, 50, 40, 30):
        wanted = config(tmp_path, plain * percent // 100)
        plan = memscale.plan(model, config=wanted, sample_input=x, optimizer=optimizer)
        found = link_for(wanted.effective(), detect(x.device), x.device, plan.budget_bytes)
        assert isinstance(found, Link)
        own, names = found.settings.own_bytes(), {item.technique for item in plan.steps}
        offloads = any(choice.offloads for choice in plan.choices)
        assert plan.staging_bytes == (own if offloads and "gradient_offload" not in names else 0)
        shared = own if "gradient_offload" in names else 0
        assert (plan.path_staging_bytes > shared) == ("state_offload" in names)
        total = plan.staging_bytes + plan.path_staging_bytes
        assert plan.predicted.by_category.get("workspace", 0) == total
        assert ("of the budget for staging buffers and tables" in plan.explain()) == (total > 0)
        seen |= {(offloads, "gradient_offload" in names, "state_offload" in names)}
    assert any(offloads for offloads, _, _ in seen) and any(state for _, _, state in seen)


class Watch:
    """Looks at what an engine has taken, around every module in forward and at every gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.most = {"pinned": 0, "host": 0, "file": 0}
        for module in model.modules():
            module.register_forward_hook(self.look)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.look)

    def look(self, *_: object) -> None:
        for tier in self.most if memscale.executor_of(self.model).in_force.offload else ():
            taken = engine_of(self.model).counters().get(f"taken_bytes_{tier}", 0)
            self.most[tier] = max(self.most[tier], taken)


@pytest.mark.parametrize(
    "tiers, cap, pinned",
    [
        (("pinned", "pageable"), 40 * MB, 24 * MB),
        (("pageable",), 36 * MB, None),
        (("pinned",), 32 * MB, None),
    ],
)
def test_max_cpu_offload_gb_holds(
    tiers: tuple[str, ...], cap: int, pinned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card whose memory is the host's: the plan may move no more, and the engine takes no more."""

    def of_card(effective: Any, hardware: Hardware, device: torch.device, budget: int) -> Link:
        found = link_for(effective, card(), CUDA, budget)
        assert isinstance(found, Link), found
        # Of a card's budget the engine takes nothing; here it is one memory, so its staging is small.
        here = dataclasses.replace(found.settings, device=device, window_bytes=2 * MB, chunk_bytes=64 << 10)
        return dataclasses.replace(found, settings=here)

    model, x = Network(), batch()
    plain = step(model, x)
    budget = whole_bytes(model, x) * 75 // 100
    monkeypatch.setattr(planner, "link_for", of_card)
    wanted = Config(
        memory_budget=budget,
        max_cpu_offload_gb=gigabytes(cap),
        enable_checkpointing=False,
        enable_logging=False,
        async_config=AsyncOffloadConfig(tiers=tiers, pinned_pool_bytes=pinned, debug=True),
    )
    memscale.wrap(model, wanted, sample_input=x)
    watch = Watch(model)
    for _ in range(2):
        assert same(step(model, x), plain)
    plan = memscale.executor_of(model).plan
    assert plan is not None and 0 < plan.away_peak_bytes <= cap - STAGING_BYTES
    assert sum(watch.most.values()) <= cap and watch.most["pinned"] + watch.most["host"] > 0
    assert watch.most["pinned"] <= (pinned or cap)
    assert engine_of(model).counters()["refused_count"] == 0


def test_the_plan_moves_no_more_than_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a third of what would leave."""
    model, x = Network(), batch()
    plain = step(model, x)
    budget = whole_bytes(model, x) * 50 // 100
    room = 16 << 20
    use_disk_with(monkeypatch, room)
    memscale.wrap(model, config(tmp_path, budget), sample_input=x)
    watch = Watch(model)
    for _ in range(2):
        assert same(step(model, x), plain)
    plan = memscale.executor_of(model).plan
    assert plan is not None and not plan.fits and 0 < plan.away_peak_bytes <= room
    assert 0 < watch.most["file"] <= room
    assert engine_of(model).counters()["refused_count"] == 0


def test_plans_made_in_turn_share_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free changes all the time, with the engine's own file to begin with."""
    found = set()
    for free in (100 << 30, (100 << 30) - 12345678, 90 << 30):
        use_disk_with(monkeypatch, free)
        made = link_for(config(tmp_path).effective(), card(), torch.device("cpu"), 1 << 30)
        assert isinstance(made, Link) and made.settings.file_bytes <= free * 8 // 10
        found.add(made.settings)
    assert len(found) == 1


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
28 27 0:25 / /a\\040disk rw - xfs /dev/vdb rw
29 27 0:26 / /twice rw - xfs /dev/vdc rw
30 29 0:27 / /twice rw - ramfs ramfs rw
no line of a mount
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/x/y", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/a disk/x", "xfs"),
        ("/twice/x", "ramfs"),
        ("", ""),
    ],
)
def test_file_systems(path: str, kind: str) -> None:
    assert limits.file_system_of(path, MOUNTS) == kind


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_a_folder_in_memory_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for _ in range(2):
            made = link_for(config(Path(folder)).effective(), card(), torch.device("cpu"), 1 << 30)
            assert isinstance(made, Link)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f"{folder!r} lies in memory (tmpfs)" in said[0]
