# SPDX-License-Identifier: Apache-2.0
"""Parts of `reference_allocator`: settings, figures, blocks and their pools, and the device.

All but `Driver` follow ``c10/cuda/CUDACachingAllocator.cpp``. The driver is ours: a device that hands out
addresses and runs out of memory, by the rules that the header of the simulator states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER = 2 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20
UNLIMITED = (1 << 64) - 1
NO_LIMIT = (1 << 62) - 1  # most that the simulated device can have


@dataclass
class Settings:
    """What PYTORCH_ALLOC_CONF and its surroundings say.

    Attributes:
        capacity_bytes: Most that the driver gives; None: no limit.
        device_total_bytes: Memory of the device; None: as the capacity.
        fraction: Memory fraction; None: not set.
        roundup: Divisions per interval, 16 of them.
    """

    capacity_bytes: int | None = None
    device_total_bytes: int | None = None
    fraction: float | None = None
    max_split: int = UNLIMITED
    max_non_split_rounding: int | None = None
    large_segment: int = 20 << 20
    roundup: list[int] = field(default_factory=lambda: [0] * 16)
    gc_threshold: float = 0.0
    expandable: bool = False


class Stat:
    """One figure: present value, peak, sums of increases and of decreases."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.current, self.peak)
        self.allocated += amount

    def decrease(self, amount: int) -> None:
        self.current -= amount
        assert self.current >= 0
        self.freed += amount


class StatArray:
    """A figure for everything and for each of the two pools."""

    def __init__(self) -> None:
        self.parts = {"all": Stat(), "small_pool": Stat(), "large_pool": Stat()}

    def of(self, pool: Pool) -> Iterator[Stat]:
        yield self.parts["all"]
        yield self.parts["small_pool" if pool.is_small else "large_pool"]

    def increase(self, pool: Pool, amount: int) -> None:
        for stat in self.of(pool):
            stat.increase(amount)

    def decrease(self, pool: Pool, amount: int) -> None:
        for stat in self.of(pool):
            stat.decrease(amount)


class Pool:
    """Free blocks of one size class, ordered by stream, size and address; and unmapped ranges."""

    def __init__(self, is_small: bool, private: PrivatePool) -> None:
        self.is_small = is_small
        self.private = private
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        self.get_free_blocks_call_count = 0

    def insert(self, block: Block) -> None:
        block.gc_count_base = self.get_free_blocks_call_count
        self.blocks.append(block)
        self.blocks.sort(key=lambda b: (b.stream, b.size, b.ptr))

    def insert_unmapped(self, block: Block) -> None:
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda b: (b.stream, b.ptr))

    def lower_bound(self, stream: int, size: int) -> int:
        """Index of the first free block that is not below (stream, size)."""
        for i, block in enumerate(self.blocks):
            if (block.stream, block.size) >= (stream, size):
                return i
        return len(self.blocks)


class PrivatePool:
    """A pair of pools; number 0 is the default one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.freeable = False
        self.small = Pool(True, self)
        self.large = Pool(False, self)


@dataclass(eq=False)
class ExpandableSegment:
    """A range of addresses, mapped page by page."""

    ptr: int
    size: int
    page: int

    def map(self, ptr: int, size: int) -> tuple[int, int]:
        """The whole pages from `ptr`, which is at a border, that hold `size`."""
        offset = ptr - self.ptr
        assert offset % self.page == 0
        end = -(-(offset + size) // self.page) * self.page
        return ptr, end - offset

    def unmap(self, ptr: int, size: int) -> tuple[int, int]:
        """The whole pages strictly inside a range."""
        offset = ptr - self.ptr
        begin = -(-offset // self.page) * self.page
        end = (offset + size) // self.page * self.page
        return (self.ptr + begin, end - begin) if begin < end else (ptr, 0)


@dataclass(eq=False)
class Block:
    """A piece of a segment, linked with its neighbours."""

    stream: int
    size: int
    pool: Pool
    ptr: int
    requested_size: int = 0
    id: int = -1
    allocated: bool = False
    event_count: int = 0
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None
    gc_count_base: int = 0
    segment: ExpandableSegment | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def gc_count(self) -> int:
        return self.pool.get_free_blocks_call_count - self.gc_count_base

    def splice(self, before: Block | None, after: Block | None) -> None:
        if before is not None:
            assert before.next is after
            before.next = self
        self.prev = before
        if after is not None:
            assert after.prev is before
            after.prev = self
        self.next = after


class OutOfMemory(Exception):
    """The device has no room."""


class Driver:
    """The device: addresses that fall until nothing is left, and a limit."""

    def __init__(self, settings: Settings) -> None:
        capacity = settings.capacity_bytes
        self.capacity = NO_LIMIT if capacity is None else capacity
        total = settings.device_total_bytes
        self.total = self.capacity if total is None else total
        self.used = 0
        self.ranges = 0
        self.lowest = 0
        self.placed = 0

    def place(self, size: int, unit: int) -> int:
        end = self.lowest or (1 << 64) - (2 << 20)
        start = self.placed or (end - size) // unit * unit
        self.placed = 0
        self.lowest = min(end, start)
        self.ranges += 1
        return start

    def forget(self) -> None:
        self.ranges -= 1
        if self.ranges == 0:
            self.lowest = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.capacity:
            return False
        self.used += size
        return True

    def address_space(self, page: int, request: int) -> int:
        space = self.total + self.total // 8 if self.total < 1 << 42 else 1 << 42
        return -(-max(space, request) // page) * page
