# SPDX-License-Identifier: Apache-2.0
"""The C simulator against `reference_allocator`: the same requests, the same everything, after each call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_allocator import ReferenceAllocator
from reference_blocks import UNLIMITED, OutOfMemory, Settings

from memscale import _core
from memscale.errors import MemScaleError

MIB = 1 << 20
FAR = 1 << 45  # addresses that callers choose are this far apart

Call = tuple[Any, ...]


def conf_of(given: Settings) -> str:
    """The text of PYTORCH_ALLOC_CONF that says the same."""
    pairs = []
    if given.max_split != UNLIMITED:
        pairs.append(f"max_split_size_mb:{given.max_split // MIB}")
    if given.max_non_split_rounding is not None:
        pairs.append(f"max_non_split_rounding_mb:{given.max_non_split_rounding // MIB}")
    if given.large_segment != 20 * MIB:
        pairs.append(f"large_segment_size_mb:{given.large_segment // MIB}")
    if any(given.roundup):
        pairs.append(
            "roundup_power2_divisions:["
            + ",".join(f"{1 << i}:{d}" for i, d in enumerate(given.roundup))
            + "]"
        )
    if given.gc_threshold:
        pairs.append(f"garbage_collection_threshold:{given.gc_threshold}")
    if given.fraction is not None:
        pairs.append(f"per_process_memory_fraction:{given.fraction}")
    if given.expandable:
        pairs.append("expandable_segments:True")
    return ",".join(pairs)


PLAIN = Settings()
SETTINGS = {
    "default": PLAIN,
    "small device": Settings(capacity_bytes=90 * MIB),
    "tiny device": Settings(capacity_bytes=47 * MIB),
    "max split": Settings(capacity_bytes=160 * MIB, max_split=24 * MIB),
    "max split and rounding": Settings(
        capacity_bytes=130 * MIB, max_split=20 * MIB, max_non_split_rounding=21 * MIB
    ),
    "large segment": Settings(capacity_bytes=110 * MIB, large_segment=12 * MIB, max_split=13 * MIB),
    "roundup": Settings(capacity_bytes=300 * MIB, roundup=[4] * 16),
    "roundup by interval": Settings(
        capacity_bytes=300 * MIB, roundup=[8, 1, 2, 4, 16, 0, 1, 2, 4, 8, 16, 32, 1, 2, 4, 8]
    ),
    "fraction": Settings(capacity_bytes=200 * MIB, device_total_bytes=210 * MIB, fraction=0.4),
    "garbage": Settings(capacity_bytes=200 * MIB, fraction=0.75, gc_threshold=0.6),
    "eager garbage": Settings(capacity_bytes=160 * MIB, fraction=0.9, gc_threshold=0.05),
    "garbage without fraction": Settings(capacity_bytes=120 * MIB, gc_threshold=0.1),
    "garbage and max split": Settings(
        capacity_bytes=150 * MIB, fraction=0.8, gc_threshold=0.5, max_split=20 * MIB
    ),
    "expandable": Settings(expandable=True),
    "expandable, small device": Settings(capacity_bytes=101 * MIB, expandable=True),
    "expandable, tiny device": Settings(
        capacity_bytes=44 * MIB, device_total_bytes=50 * MIB, expandable=True
    ),
    "expandable, large segment": Settings(capacity_bytes=130 * MIB, expandable=True, large_segment=11 * MIB),
    "expandable, fraction": Settings(
        capacity_bytes=200 * MIB, fraction=0.5, gc_threshold=0.5, expandable=True
    ),
    "expandable, max split": Settings(capacity_bytes=140 * MIB, max_split=22 * MIB, expandable=True),
    "expandable, roundup": Settings(capacity_bytes=140 * MIB, roundup=[2] * 16, expandable=True),
}


class Pair:
    """Both allocators, fed with the same calls."""

    def __init__(self, given: Settings) -> None:
        self.given = given
        self.model = ReferenceAllocator(given)
        self.sim = _core.Simulator(
            "cuda",
            conf_of(given),
            given.capacity_bytes,
            device_total_bytes=given.device_total_bytes,
            record_segments=True,
        )
        self.placed = 0

    def allocate(self, *arguments: int) -> None:
        try:
            self.model.alloc(*arguments)
        except OutOfMemory:
            with pytest.raises(MemScaleError) as caught:
                self.sim.alloc(*arguments)
            assert caught.value.status == "EDEVMEM"
        else:
            self.sim.alloc(*arguments)

    def apply(self, call: Call) -> None:
        """Plays a call; one that the present state does not allow is the next one that it does."""
        verb, *arguments = call
        if verb == "toggle":
            id, size, stream, pool, late = arguments
            if id in self.model.awaiting:
                verb, arguments = "free_complete", [id]
            elif id in self.model.ids:
                verb, arguments = ("free_request" if late else "free"), [id]
            else:
                self.allocate(id, size, stream, pool)
                return
        elif verb == "place":
            self.placed += 1
            verb, arguments = "place_next_segment", [FAR * (1000 - self.placed) + 512 * arguments[0]]
        getattr(self.model, verb)(*arguments)
        getattr(self.sim, verb)(*arguments)

    def compare(self) -> None:
        self.sim.validate()
        assert self.sim.stats() == self.model.stats()
        assert self.sim.segments() == self.model.segments()
        assert self.sim.segment_events() == self.model.segment_events()


SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, 700, MIB, MIB + 1, 2 * MIB, 3 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB]),
    st.sampled_from([20 * MIB, 20 * MIB + 1, 22 * MIB, 24 * MIB, 40 * MIB, 44 * MIB + 512, 130 * MIB]),
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(1, 30 * MIB),
)
TOGGLES = st.tuples(
    st.just("toggle"),
    st.integers(0, 11),
    SIZES,
    st.sampled_from([0, 0, 0, 7, 3]),
    st.sampled_from([0, 0, 0, 0, 2, 1]),
    st.booleans(),
)
OTHERS: st.SearchStrategy[Call] = st.one_of(
    st.just(("empty_cache",)),
    st.tuples(st.just("release_pool"), st.integers(1, 2)),
    st.tuples(st.just("set_capturing"), st.booleans()),
    st.just(("reset_peaks",)),
    st.just(("reset_accumulated",)),
    st.tuples(st.just("place"), st.integers(0, 1 << 20)),
)
CALLS = st.lists(st.one_of(TOGGLES, TOGGLES, TOGGLES, TOGGLES, TOGGLES, OTHERS), min_size=1, max_size=60)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=40)
@given(calls=CALLS)
def test_same_as_the_reference(name: str, calls: list[Call]) -> None:
    pair = Pair(SETTINGS[name])
    for call in calls:
        pair.apply(call)
        pair.compare()


def random_settings(source: random.Random) -> Settings:
    """Any combination of options."""
    segment = source.choice([20, 20, 12, 11, 32]) * MIB
    capacity = source.choice([None, source.randint(30, 400) * MIB])
    given = Settings(capacity_bytes=capacity, large_segment=segment, expandable=source.random() < 0.4)
    if source.random() < 0.5:
        given = replace(given, max_split=segment + source.randint(0, 20) * MIB)
    if source.random() < 0.3:
        given = replace(given, max_non_split_rounding=segment + source.randint(0, 30) * MIB)
    if source.random() < 0.4:
        given = replace(given, roundup=[source.choice([0, 1, 2, 4, 8, 64]) for _ in range(16)])
    if capacity is not None and source.random() < 0.5:
        given = replace(
            given, fraction=source.randint(20, 100) / 100, gc_threshold=source.randint(5, 95) / 100
        )
    return given


@pytest.mark.parametrize("seed", range(24))
def test_long_runs_are_the_same(seed: int) -> None:
    source = random.Random(seed)
    pair = Pair(random_settings(source))
    bounds = [2000, 200_000, 2 * MIB, 12 * MIB, 12 * MIB, 45 * MIB]
    for step in range(500):
        bound = source.choice(bounds)
        size = bound // 4 * source.randint(1, 4) if source.random() < 0.4 else source.randint(1, bound)
        kind = source.random()
        if kind < 0.985:
            id = source.randrange(60)
            stream, pool = source.choice([0, 0, 0, 5]), source.choice([0, 0, 0, 0, 1])
            pair.apply(("toggle", id, size, stream, pool, source.random() < 0.15))
        elif kind < 0.99:
            pair.apply(("empty_cache",))
        elif kind < 0.994:
            pair.apply(("release_pool", 1))
        else:
            pair.apply(("place", source.randrange(1 << 20)))
        if step % 10 == 0:
            pair.compare()
    pair.compare()


@pytest.mark.parametrize("seed", range(8))
def test_garbage_of_all_ages_is_the_same(seed: int) -> None:
    """Segments of their own, so that the cache is full of whole blocks freed at different times."""
    source = random.Random(1000 + seed)
    pair = Pair(
        Settings(
            capacity_bytes=source.randint(600, 1200) * MIB,
            fraction=0.95,
            gc_threshold=source.choice([0.6, 0.75, 0.8, 0.9]),
            max_split=source.choice([UNLIMITED, 20 * MIB]),
        )
    )
    for _ in range(400):
        size = source.randint(10, 60) * MIB + 512 * source.randint(0, 3)
        pair.apply(("toggle", source.randrange(40), size, source.choice([0, 0, 4]), 0, False))
        pair.compare()
    assert pair.sim.stats()["num_device_free"] > 20


BOUNDARIES: dict[str, tuple[Settings, list[tuple[int, int]]]] = {
    # (id, size in MiB); the same id again frees it
    "a block of exactly request and rounding": (
        Settings(max_split=20 * MIB),
        [(0, 60), (0, 0), (1, 40), (2, 41), (3, 20)],
    ),
    "oversize blocks that are exactly enough": (
        Settings(capacity_bytes=100 * MIB, max_split=20 * MIB),
        [(0, 20), (1, 30), (2, 50), (0, 0), (1, 0), (2, 0), (3, 80)],
    ),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries_are_the_same(name: str) -> None:
    given, steps = BOUNDARIES[name]
    pair = Pair(given)
    for id, size in steps:
        pair.apply(("toggle", id, size * MIB, 0, 0, False))
        pair.compare()


@settings(max_examples=400)
@given(
    exponent=st.integers(0, 38),
    share=st.sampled_from([0, 1, 2, 40, 63]),  # of 64 on the way to the next power of two
    more=st.integers(-1, 1),
    roundup=st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 1024]), min_size=16, max_size=16),
)
def test_sizes_are_rounded_the_same(exponent: int, share: int, more: int, roundup: list[int]) -> None:
    size = (1 << exponent) + ((share << exponent) >> 6)
    pair = Pair(Settings(roundup=roundup))
    pair.apply(("toggle", 0, max(1, size + more), 0, 0, False))
    pair.compare()
