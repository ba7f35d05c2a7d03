# SPDX-License-Identifier: Apache-2.0
"""`_core.Simulator` and `alloc_conf` as Python sees them; the rules are in `test_allocator_reference`."""

from __future__ import annotations

import re

import pytest
import torch

from core_samples import chain
from memscale import _core
from memscale.errors import MemScaleError

MIB = 1 << 20


def test_statistics_have_the_names_of_torch() -> None:
    described = torch.cuda.memory_stats.__doc__ or ""
    names = set(_core.Simulator("cuda").stats())
    pooled = re.findall(
        r'"(\w+)\.\{all,large_pool,small_pool\}\.\{current,peak,allocated,freed\}"', described
    )
    single = re.findall(r'"(\w+)\.\{current,peak,allocated,freed\}"', described)
    counts = re.findall(r'``"(num_\w+|max_split_size)"``', described)
    assert len(pooled) >= 9 and single and len(counts) >= 6
    pooled = [
        "allocation" if name == "allocated" else name
        for name in pooled
        if name != "reserved_bytes_by_private_pools"
    ]
    for name in pooled:
        for pool in ("all", "small_pool", "large_pool"):
            assert {f"{name}.{pool}.{part}" for part in ("current", "peak", "allocated", "freed")} <= names
    for name in single:
        assert {f"{name}.{part}" for part in ("current", "peak", "allocated", "freed")} <= names
    # Preemptive rejection is the one policy that is refused instead of simulated.
    assert set(counts) - {"num_oom_rejections"} <= names


def test_a_request_shows_everywhere() -> None:
    simulator = _core.Simulator("cuda", capacity_bytes=100 * MIB, record_segments=True)
    simulator.alloc(5, 3 * MIB, stream=2, pool=7)
    (segment,) = simulator.segments()
    assert (segment["stream"], segment["pool"], segment["total_size"]) == (2, 7, 20 * MIB)
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert [block["id"] for block in segment["blocks"]] == [5, -1]
    (event,) = simulator.segment_events()
    assert (event["action"], event["size"], event["stream"], event["pool"]) == (
        "segment_alloc",
        20 * MIB,
        2,
        7,
    )
    simulator.free_request(5)
    assert simulator.segments()[0]["blocks"][0]["state"] == "active_pending_free"
    simulator.reset()
    assert simulator.segments() == [] == simulator.segment_events()


def test_host_counts_live_bytes() -> None:
    simulator = _core.Simulator("host", capacity_bytes=100)
    simulator.alloc(0, 60)
    with pytest.raises(MemScaleError, match="capacity of 100"):
        simulator.alloc(1, 41)
    assert simulator.stats()["reserved_bytes.all.peak"] == 60
    assert simulator.segments() == []
    with pytest.raises(ValueError, match="CUDA"):
        _core.Simulator("host", "max_split_size_mb:40")


def test_allowed_bytes_are_the_fraction() -> None:
    simulator = _core.Simulator("cuda", capacity_bytes=100 * MIB, allowed_bytes=19 * MIB)
    with pytest.raises(MemScaleError, match="memory fraction of 19922944"):
        simulator.alloc(0, 3 * MIB)


def test_replay_reads_the_conf() -> None:
    graph = chain()
    plain = _core.replay(graph, sim={"kind": "cuda"})
    expandable = _core.replay(graph, sim={"kind": "cuda", "alloc_conf": "expandable_segments:True"})
    assert plain["stats"]["segment_peak_count"] > 0 == expandable["stats"]["segment_peak_count"]
    # A field of its own overrides the text, and the fraction is one of the capacity.
    sim = {"kind": "cuda", "alloc_conf": "expandable_segments:True", "expandable_segments": False}
    assert _core.replay(graph, sim=sim)["stats"] == plain["stats"]
    with pytest.raises(MemScaleError, match="memory fraction"):
        sim = {"kind": "cuda", "alloc_conf": "per_process_memory_fraction:0.5", "capacity_bytes": 3 * MIB}
        _core.replay(graph, sim=sim)
    with pytest.raises(TypeError, match="alloc_conf must be a str"):
        _core.replay(graph, sim={"kind": "cuda", "alloc_conf": 3})


TEXTS = [
    "",
    "max_split_size_mb:40",
    "max_split_size_mb: 40 , max_split_size_mb:20,",
    "max_split_size_mb:19",
    "max_split_size_mb:x",
    "max_split_size_mb:40,large_segment_size_mb:41",
    "large_segment_size_mb:12,max_split_size_mb:12,max_non_split_rounding_mb:12",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "expandable_segments:True",
    "expandable_segments:true",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:6",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[255:2]",
    "pinned_use_background_threads:True",
    "pinned_use_background_threads:yes",
]


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="this PyTorch does not show its parser"
)
@pytest.mark.parametrize("text", TEXTS)
def test_torch_accepts_the_same_texts(text: str) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(text)  # type: ignore[attr-defined]
        accepted = True
    except (ValueError, RuntimeError):
        accepted = False
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # type: ignore[attr-defined]
    if accepted:
        _core.Simulator("cuda", text, 10**9)
    else:
        with pytest.raises(ValueError):
            _core.Simulator("cuda", text, 10**9)
