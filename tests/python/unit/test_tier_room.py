# SPDX-License-Identifier: Apache-2.0
"""What a plan counts as room for offloaded tensors is room in which the engine places every one of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memscale import _core
from memscale.offload.link import OffloadLink
from memscale.offload.tier_room import TierRoom, placeable_bytes

MIB = 1 << 20
CHUNK, STAGING_COUNT = 64 << 10, 4


def test_several_tiers_are_no_single_one() -> None:
    """Two tiers of 100 MiB hold two blocks of 60 MiB, and not three."""
    file = TierRoom(100 * MIB, has_slabs=False)
    assert placeable_bytes([file, file], {60 * MIB}) < 180 * MIB
    assert placeable_bytes([file, file], {60 * MIB}) >= 120 * MIB
    assert placeable_bytes([file, file], {150 * MIB}) <= 100 * MIB


def test_a_tier_that_is_small_is_no_loss() -> None:
    file, little = TierRoom(100 * MIB, has_slabs=False), TierRoom(MIB, has_slabs=False)
    assert placeable_bytes([file, little], {60 * MIB}) == placeable_bytes([file], {60 * MIB})
    assert placeable_bytes([], {MIB}) == 0


def test_slabs_are_not_filled_to_the_end() -> None:
    host = TierRoom(1024 * MIB, has_slabs=True)
    assert 890 * MIB < placeable_bytes([host], {20 * MIB}) <= 896 * MIB
    assert 830 * MIB < placeable_bytes([host], {MIB, 100 * MIB}) <= 832 * MIB
    assert placeable_bytes([host], ()) == 1024 * MIB


def test_a_link_counts_what_can_be_placed() -> None:
    tiers = (TierRoom(100 * MIB, has_slabs=False),) * 2
    counted = OffloadLink(1, 1, limit_bytes=200 * MIB, tiers=tiers).limit_for({60 * MIB})
    assert counted is not None and counted < 180 * MIB
    assert OffloadLink(1, 1, limit_bytes=50 * MIB, tiers=tiers).limit_for({60 * MIB}) == 50 * MIB
    assert OffloadLink(1, 1, limit_bytes=200 * MIB).limit_for({60 * MIB}) == 200 * MIB


SHAPES = {
    "large": (9 * MIB, 40 * MIB),
    "small": (MIB // 2, 8 * MIB),
    "both": (MIB, 30 * MIB),
    "equal": (17 * MIB,) * 2,
}


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_places_what_a_plan_counts(seed: int, tmp_path: Path) -> None:
    """Step after step with shapes of another kind, in one engine."""
    draw = random.Random(seed)
    rooms = {"pinned": 150 * MIB, "host": 110 * MIB, "file": 90 * MIB}
    options = {f"{name}_bytes": size for name, size in rooms.items()}
    options["host_bytes"] += 2 * STAGING_COUNT * CHUNK
    door = _core.OffloadEngine(
        Tensor, nn.Parameter, str(tmp_path), {**options, "chunk_bytes": CHUNK, "staging_count": STAGING_COUNT}
    )
    tiers = [TierRoom(size, has_slabs=name != "file") for name, size in rooms.items()]
    memory = torch.zeros(40 * MIB, dtype=torch.uint8)
    for _ in range(6):
        least, most = draw.choice(list(SHAPES.values()))
        sizes = [draw.randint(least, most) for _ in range(1000)]
        room, blocks = placeable_bytes(tiers, {*sizes}), []
        for size in sizes:
            if size > room:
                break
            room -= size
            block = door.put(memory[:size])
            assert block is not None, (least, most, size, door.counters())
            blocks.append(block)
        assert blocks
        for block in blocks:
            block.drop()
        door.step()
    door.close()
