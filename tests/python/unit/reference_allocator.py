# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CUDA caching allocator once more: slow, plain, and close to the words of its source.

It exists to be compared with `memscale._core.Simulator`. Nothing is shared with it: this model was written
from the rules of ``c10/cuda/CUDACachingAllocator.cpp`` alone, in the order of that file, with one Python
object per block and one sorted list per pool. It favours being checkable against that source over speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference_blocks import (
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    UNLIMITED,
    Block,
    Driver,
    ExpandableSegment,
    OutOfMemory,
    Pool,
    PrivatePool,
    Settings,
    Stat,
    StatArray,
)


class ReferenceAllocator:
    """The allocator of one device, with the methods of `memscale._core.Simulator`."""

    METRICS = (
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rounding = settings.max_non_split_rounding or settings.large_segment
        self.driver = Driver(settings)
        self.allowed: int | None = None
        if settings.fraction is not None and settings.fraction < 1:
            self.allowed = int(settings.fraction * float(self.driver.total))
        self.array = {name: StatArray() for name in self.METRICS}
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.counts = dict.fromkeys(
            ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms", "num_sync_all_streams"),
            0,
        )
        self.pools: dict[int, PrivatePool] = {0: PrivatePool(0)}
        self.capturing = False
        self.ids: dict[int, Block | None] = {}
        self.awaiting: dict[int, Block | None] = {}  # in order of request
        self.events: list[dict[str, Any]] = []
        self.calls = 0

    # sizes

    def divisions(self, size: int) -> int:
        index = max(0, (size.bit_length() - 1) - 20)
        return self.settings.roundup[min(index, 15)]

    def round_size(self, size: int) -> int:
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.divisions(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return self.roundup_power2_next_division(size, divisions)
        return MIN_BLOCK * ((size + MIN_BLOCK - 1) // MIN_BLOCK)

    @staticmethod
    def roundup_power2_next_division(size: int, divisions: int) -> int:
        if size & (size - 1) == 0:
            return size
        floor = 1 << (size.bit_length() - 1)
        division = floor >> (divisions.bit_length() - 1)
        if division == 0:
            return floor << 1
        rounded = size & ~(division - 1)
        return size if rounded == size else rounded + division

    def allocation_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.settings.large_segment
        return ROUND_LARGE * ((size + ROUND_LARGE - 1) // ROUND_LARGE)

    # requests

    def alloc(self, id: int, size_bytes: int, stream: int = 0, pool: int = 0) -> None:
        """Serves a request; raises `OutOfMemory`."""
        assert id not in self.ids and id not in self.awaiting
        self.calls += 1
        self.ids[id] = None
        if size_bytes == 0:
            return
        try:
            self.ids[id] = self.malloc(size_bytes, stream, pool)
        except OutOfMemory:
            del self.ids[id]
            raise
        block = self.ids[id]
        assert block is not None
        block.id = id

    def malloc(self, orig_size: int, stream: int, pool_number: int) -> Block:
        size = self.round_size(orig_size)
        private = self.pools.setdefault(pool_number, PrivatePool(pool_number))
        private.freeable = False
        pool = private.small if size <= SMALL_SIZE else private.large
        alloc_size = self.allocation_size(size)
        block = self.get_free_block(pool, stream, size)
        if block is None:
            if self.allowed is not None and self.settings.gc_threshold > 0:
                self.garbage_collect_cached_blocks()
            block = self.alloc_block(pool, stream, size, alloc_size, False)
            if block is None and self.release_available_cached_blocks(pool, stream, size):
                block = self.alloc_block(pool, stream, size, alloc_size, False)
            if block is None and not self.capturing:
                self.release_cached_blocks()
                block = self.alloc_block(pool, stream, size, alloc_size, True)
        if block is None:
            self.counts["num_ooms"] += 1
            raise OutOfMemory
        return self.alloc_found_block(block, size, orig_size, self.should_split(block, size))

    def alloc_found_block(self, block: Block, size: int, orig_size: int, split: bool) -> Block:
        pool = block.pool
        already_split = block.is_split
        expandable = block.segment is not None
        if split:
            remaining = block
            block = Block(remaining.stream, size, pool, remaining.ptr, segment=remaining.segment)
            block.prev = remaining.prev
            if block.prev is not None:
                block.prev.next = block
            block.next = remaining
            remaining.prev = block
            remaining.ptr += size
            remaining.size -= size
            pool.insert(remaining)
            if already_split and not expandable:
                self.array["inactive_split_bytes"].decrease(pool, block.size)
            elif not expandable:
                self.array["inactive_split_bytes"].increase(pool, remaining.size)
                self.array["inactive_split"].increase(pool, 1)
        elif already_split and not expandable:
            self.array["inactive_split_bytes"].decrease(pool, block.size)
            self.array["inactive_split"].decrease(pool, 1)
        block.allocated = True
        block.requested_size = orig_size
        self.array["allocation"].increase(pool, 1)
        self.array["allocated_bytes"].increase(pool, block.size)
        self.array["active"].increase(pool, 1)
        self.array["active_bytes"].increase(pool, block.size)
        self.array["requested_bytes"].increase(pool, orig_size)
        if block.size >= self.settings.max_split:
            self.oversize_allocations.increase(1)
        return block

    # frees

    def free(self, id: int) -> None:
        self.calls += 1
        block = self.ids.pop(id)
        if block is not None:
            self.stop_allocating(block)
            self.free_block(block)

    def free_request(self, id: int) -> None:
        self.calls += 1
        block = self.ids.pop(id)
        self.awaiting[id] = block
        if block is not None:
            self.stop_allocating(block)
            block.event_count = 1

    def free_complete(self, id: int) -> None:
        self.calls += 1
        block = self.awaiting.pop(id)
        if block is not None:
            block.event_count = 0
            self.free_block(block)

    def stop_allocating(self, block: Block) -> None:
        block.allocated = False
        self.array["allocation"].decrease(block.pool, 1)
        self.array["allocated_bytes"].decrease(block.pool, block.size)
        if block.size >= self.settings.max_split:
            self.oversize_allocations.decrease(1)

    def free_block(self, block: Block) -> None:
        pool = block.pool
        original_size = block.size
        net_blocks = net_size = 0
        for neighbour in (block.prev, block.next):
            subsumed = self.try_merge_blocks(block, neighbour)
            if subsumed > 0:
                net_blocks -= 1
                net_size -= subsumed
        pool.insert(block)
        if block.is_split:
            net_blocks += 1
            net_size += block.size
        if block.segment is None:
            self.change("inactive_split", pool, net_blocks)
            self.change("inactive_split_bytes", pool, net_size)
        self.array["active"].decrease(pool, 1)
        self.array["active_bytes"].decrease(pool, original_size)
        self.array["requested_bytes"].decrease(pool, block.requested_size)
        block.requested_size = 0

    def change(self, name: str, pool: Pool, net: int) -> None:
        if net > 0:
            self.array[name].increase(pool, net)
        elif net < 0:
            self.array[name].decrease(pool, -net)

    def try_merge_blocks(self, dst: Block, src: Block | None) -> int:
        if src is None or src.allocated or src.event_count > 0 or dst.mapped != src.mapped:
            return 0
        if dst.prev is src:
            dst.ptr = src.ptr
            dst.prev = src.prev
            if dst.prev is not None:
                dst.prev.next = dst
        else:
            dst.next = src.next
            if dst.next is not None:
                dst.next.prev = dst
        dst.size += src.size
        (src.pool.blocks if src.mapped else src.pool.unmapped).remove(src)
        return src.size

    # finding a block

    def should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.settings.expandable:
            return remaining >= MIN_BLOCK
        return size < self.settings.max_split and remaining > SMALL_SIZE

    def get_free_block(self, pool: Pool, stream: int, size: int) -> Block | None:
        if self.allowed is not None and self.settings.gc_threshold > 0:
            pool.get_free_blocks_call_count += 1
        blocks = pool.blocks
        it = pool.lower_bound(stream, size)
        if it == len(blocks) or blocks[it].stream != stream:
            return None
        if self.settings.expandable:

            def expandable_size(block: Block) -> int:
                after = block.next
                return block.size + (after.size if after is not None and not after.mapped else 0)

            following = it + 1
            while (
                following < len(blocks)
                and blocks[following].stream == stream
                and expandable_size(blocks[following]) < expandable_size(blocks[it])
            ):
                it, following = following, following + 1
        if size < self.settings.max_split <= blocks[it].size:
            return None
        if size >= self.settings.max_split and blocks[it].size >= size + self.rounding:
            return None
        return blocks.pop(it)

    def alloc_block(
        self, pool: Pool, stream: int, size: int, alloc_size: int, is_retry: bool
    ) -> Block | None:
        if is_retry:
            self.counts["num_alloc_retries"] += 1
        if self.allowed is not None and self.driver.used + alloc_size > self.allowed:
            return None
        if self.settings.expandable:
            return self.try_allocate_expandable_block(pool, stream, size)
        if not self.driver.take(alloc_size):
            return None
        block = Block(stream, alloc_size, pool, self.driver.place(alloc_size, 1))
        self.array["segment"].increase(pool, 1)
        self.array["reserved_bytes"].increase(pool, alloc_size)
        if alloc_size >= self.settings.max_split:
            self.oversize_segments.increase(1)
        self.counts["num_device_alloc"] += 1
        self.record("segment_alloc", block.ptr, alloc_size, block)
        return block

    def record(self, action: str, addr: int, size: int, block: Block) -> None:
        self.events.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": block.stream,
                "pool": block.pool.private.number,
                "segment_type": "small" if block.pool.is_small else "large",
                "call": self.calls - 1,
            }
        )

    # expandable segments

    def find_expandable_block(self, pool: Pool, stream: int, size: int) -> Block:
        def allocatable(block: Block | None) -> bool:
            return block is not None and not block.allocated and block.event_count == 0

        for candidate in [b for b in pool.unmapped if b.stream == stream]:
            start = candidate.prev if allocatable(candidate.prev) else candidate
            found, block = 0, start
            while found < size and allocatable(block):
                assert block is not None
                found += block.size
                block = block.next
            if found >= size:
                assert start is not None
                return start
        page = SMALL_BUFFER if pool.is_small else self.settings.large_segment
        space = self.driver.address_space(page, size)
        segment = ExpandableSegment(self.driver.place(space, page), space, page)
        block = Block(stream, space, pool, segment.ptr, mapped=False, segment=segment)
        pool.insert_unmapped(block)
        return block

    def map_block(self, block: Block, size: int) -> bool:
        assert block.segment is not None and not block.mapped
        ptr, mapped = block.segment.map(block.ptr, size)
        if not self.driver.take(mapped):
            return False
        pool = block.pool
        pool.unmapped.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.stream, block.size - mapped, pool, block.ptr + mapped, mapped=False)
            rest.segment = block.segment
            rest.splice(block, block.next)
            pool.insert_unmapped(rest)
            block.size = mapped
        self.try_merge_blocks(block, block.prev)
        self.try_merge_blocks(block, block.next)
        pool.insert(block)
        self.array["reserved_bytes"].increase(pool, mapped)
        self.counts["num_device_alloc"] += 1
        self.record("segment_map", ptr, mapped, block)
        return True

    def try_allocate_expandable_block(self, pool: Pool, stream: int, size: int) -> Block | None:
        if size > self.driver.capacity:
            return None  # the simulated driver has no addresses for it
        candidate = self.find_expandable_block(pool, stream, size)
        if not candidate.mapped and not self.map_block(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            following = candidate.next
            assert following is not None
            if not self.map_block(following, min(size - candidate.size, following.size)):
                return None
            candidate = following
        pool.blocks.remove(candidate)
        return candidate

    def unmap_block(self, block: Block) -> None:
        assert block.segment is not None
        ptr, size = block.segment.unmap(block.ptr, block.size)
        if size == 0:
            return
        pool = block.pool
        pool.blocks.remove(block)
        before_size = ptr - block.ptr
        if before_size > 0:
            before = Block(block.stream, before_size, pool, block.ptr, segment=block.segment)
            before.splice(block.prev, block)
            pool.insert(before)
        after_size = block.size - (before_size + size)
        if after_size > 0:
            after = Block(block.stream, after_size, pool, ptr + size, segment=block.segment)
            after.splice(block, block.next)
            pool.insert(after)
        block.ptr = ptr
        block.size = size
        block.mapped = False
        self.try_merge_blocks(block, block.prev)
        self.try_merge_blocks(block, block.next)
        pool.insert_unmapped(block)
        self.driver.used -= size
        self.array["reserved_bytes"].decrease(pool, size)
        self.counts["num_device_free"] += 1
        self.record("segment_unmap", ptr, size, block)

    # giving memory back

    def release_block(self, block: Block) -> None:
        pool = block.pool
        self.counts["num_device_free"] += 1
        self.record("segment_free", block.ptr, block.size, block)
        self.driver.used -= block.size
        self.driver.forget()
        self.array["segment"].decrease(pool, 1)
        self.array["reserved_bytes"].decrease(pool, block.size)
        if block.size >= self.settings.max_split:
            self.oversize_segments.decrease(1)
        pool.blocks.remove(block)

    def release_blocks(self, pool: Pool) -> None:
        to_unmap = []
        for block in list(pool.blocks):
            if block.segment is not None:
                to_unmap.append(block)
            elif not block.is_split:
                self.release_block(block)
        for block in to_unmap:
            self.unmap_block(block)
            if not block.is_split:
                pool.unmapped.remove(block)
                self.driver.forget()

    def release_cached_blocks(self) -> None:
        if not self.capturing:
            self.synchronize_and_free_events()
            self.release_blocks(self.pools[0].large)
            self.release_blocks(self.pools[0].small)
        for _, private in sorted(self.pools.items()):
            if private.freeable:
                self.release_blocks(private.small)
                self.release_blocks(private.large)

    def synchronize_and_free_events(self) -> None:
        self.counts["num_sync_all_streams"] += 1
        for id, block in self.awaiting.items():
            if block is not None:
                block.event_count = 0
                self.free_block(block)
                self.awaiting[id] = None

    def release_available_cached_blocks(self, pool: Pool, stream: int, size: int) -> bool:
        limit = self.settings.max_split
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        blocks = pool.blocks
        it = pool.lower_bound(stream, wanted)
        if it < len(blocks) and blocks[it].stream == stream and blocks[it].segment is None:
            self.release_block(blocks[it])
            return True
        released = 0
        for block in reversed(blocks[:it]):
            if released >= wanted or block.size < limit or block.stream != stream:
                break
            if block.segment is None:
                released += block.size
                self.release_block(block)
        return released >= wanted

    def garbage_collect_cached_blocks(self) -> None:
        assert self.allowed is not None
        threshold = int(self.settings.gc_threshold * float(self.allowed))
        if self.driver.used <= threshold:
            return
        target = self.driver.used - threshold
        large = self.pools[0].large
        freeable = [b for b in large.blocks if not b.is_split]
        total_age, count, reclaimed = sum(b.gc_count for b in freeable), len(freeable), 0
        freed = True
        while reclaimed < target and freed and count > 0:
            age_threshold = total_age / count
            freed = False
            for block in list(large.blocks):
                if not block.is_split and block.segment is None and block.gc_count >= age_threshold:
                    freed = True
                    reclaimed += block.size
                    total_age -= block.gc_count
                    count -= 1
                    self.release_block(block)

    # the rest of the simulator's methods

    def empty_cache(self) -> None:
        self.calls += 1
        self.release_cached_blocks()

    def release_pool(self, pool: int) -> None:
        if pool in self.pools:
            self.pools[pool].freeable = True

    def set_capturing(self, capturing: bool) -> None:
        self.capturing = capturing

    def place_next_segment(self, address: int) -> None:
        self.driver.placed = address

    def each_stat(self, call: Callable[[Stat], None]) -> None:
        for array in self.array.values():
            for stat in array.parts.values():
                call(stat)
        call(self.oversize_allocations)
        call(self.oversize_segments)

    def reset_peaks(self) -> None:
        def reset(stat: Stat) -> None:
            stat.peak = stat.current

        self.each_stat(reset)

    def reset_accumulated(self) -> None:
        def reset(stat: Stat) -> None:
            stat.allocated = stat.freed = 0

        self.each_stat(reset)
        self.counts = dict.fromkeys(self.counts, 0)

    def stats(self) -> dict[str, int]:
        result: dict[str, int] = dict(self.counts)
        result["max_split_size"] = -1 if self.settings.max_split == UNLIMITED else self.settings.max_split
        named = [
            (f"{name}.{part}", stat) for name in self.METRICS for part, stat in self.array[name].parts.items()
        ]
        named += [
            ("oversize_allocations", self.oversize_allocations),
            ("oversize_segments", self.oversize_segments),
        ]
        for name, stat in named:
            result[f"{name}.current"] = stat.current
            result[f"{name}.peak"] = stat.peak
            result[f"{name}.allocated"] = stat.allocated
            result[f"{name}.freed"] = stat.freed
        return result

    def segment_events(self) -> list[dict[str, Any]]:
        return self.events

    def all_blocks(self) -> list[Block]:
        blocks = [b for b in [*self.ids.values(), *self.awaiting.values()] if b is not None]
        for private in self.pools.values():
            blocks += private.small.blocks + private.large.blocks
        return blocks

    def segments(self) -> list[dict[str, Any]]:
        result = []
        for head in self.all_blocks():
            if head.prev is not None and head.prev.mapped:
                continue
            blocks = []
            block: Block | None = head
            while block is not None and block.mapped:
                blocks.append(block)
                block = block.next
            active = [b for b in blocks if b.allocated or b.event_count > 0]
            result.append(
                {
                    "address": head.ptr,
                    "total_size": sum(b.size for b in blocks),
                    "allocated_size": sum(b.size for b in blocks if b.allocated),
                    "active_size": sum(b.size for b in active),
                    "requested_size": sum(b.requested_size for b in active),
                    "stream": head.stream,
                    "pool": head.pool.private.number,
                    "segment_type": "small" if head.pool.is_small else "large",
                    "is_expandable": head.segment is not None,
                    "blocks": [self.describe(b) for b in blocks],
                }
            )
        return sorted(result, key=lambda segment: segment["address"])

    @staticmethod
    def describe(block: Block) -> dict[str, Any]:
        active = block.allocated or block.event_count > 0
        pending = "active_pending_free" if active else "inactive"
        return {
            "address": block.ptr,
            "size": block.size,
            "requested_size": block.requested_size if active else 0,
            "state": "active_allocated" if block.allocated else pending,
            "id": block.id if active else -1,
        }
