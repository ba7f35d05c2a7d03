# SPDX-License-Identifier: Apache-2.0
"""`_core.Block`: bytes that a caller puts, fetches and drops itself."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memscale import _core
from memscale.errors import MemScaleError

TIERS = ("pinned", "host", "file")
SLOW = {"fault_delay_most_ns": 2_000_000, "fault_split_ppm": 500_000}
GONE = "this block is dropped, or its engine is closed"


def engine(tier: str = "host", folder: Path | None = None, **options: int) -> _core.OffloadEngine:
    given = {f"{tier}_bytes": 64 << 20, "debug": True, **options}
    return _core.OffloadEngine(Tensor, nn.Parameter, None if folder is None else str(folder), given)


def put(door: _core.OffloadEngine, tensor: Tensor) -> _core.Block:
    block = door.put(tensor)
    assert block is not None
    return block


def back(block: _core.Block, like: Tensor) -> Tensor:
    into = torch.empty_like(like)
    block.get(into)
    block.arrive()
    return into


@pytest.mark.parametrize("faults", [{}, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize("tier", TIERS)
def test_bytes_come_back(tier: str, faults: dict[str, int], tmp_path: Path) -> None:
    door = engine(tier, tmp_path, **faults)
    torch.manual_seed(0)
    whole = torch.randn(700, 1003)
    tensors = [
        whole,
        whole.t(),  # another order of dimensions
        whole.view(-1)[1000:50001],  # a part, not aligned
        whole[3, 5],  # one number
        whole.to(torch.bfloat16),
        torch.arange(77, dtype=torch.uint8),
        nn.Parameter(whole[:2]).detach(),
    ]
    blocks = [put(door, tensor) for tensor in tensors]
    assert [block.nbytes for block in blocks] == [tensor.nbytes for tensor in tensors]
    for block, tensor in zip(blocks, tensors, strict=True):
        block.settle()
        assert block.settled()
        for _ in range(2):
            assert torch.equal(back(block, tensor), tensor)
        block.drop()
    assert door.counters()["block_count"] == 0


def test_a_block_is_asked_for_before_it_is_stored() -> None:
    door = engine(**SLOW)
    tensor = torch.randn(1 << 16)
    block = put(door, tensor)
    assert torch.equal(back(block, tensor), tensor)


def ticks_while(wait: Callable[[], object]) -> int:
    """How often another thread of Python comes along meanwhile."""
    count, over = 0, threading.Event()

    def tick() -> None:
        nonlocal count
        while not over.wait(0.001):
            count += 1

    thread = threading.Thread(target=tick)
    thread.start()
    wait()
    over.set()
    thread.join()
    return count


def test_other_threads_run_while_memory_is_pinned() -> None:
    door = engine("pinned", fault_pin_delay_us=300_000)
    assert ticks_while(lambda: put(door, torch.randn(1 << 10))) >= 20
    door = engine("pinned", fault_pin_delay_us=300_000, least_bytes=1)
    with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
        assert ticks_while(torch.randn(1 << 10, requires_grad=True).exp) >= 20


def test_an_engine_is_closed_while_memory_is_pinned() -> None:
    door = engine("pinned", fault_pin_delay_us=300_000)
    closing = threading.Timer(0.1, door.close)
    closing.start()
    with pytest.raises(ValueError, match="this engine is closed"):
        door.put(torch.randn(1 << 10))
    closing.join()
    door = engine("pinned", fault_pin_delay_us=300_000, least_bytes=1)
    closing = threading.Timer(0.1, door.close)
    closing.start()
    tensor = torch.randn(1 << 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
        loss = tensor.exp().sum()
    closing.join()
    loss.backward()  # it stayed on the device
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, tensor.detach().exp())


def test_tensors_are_held_as_long_as_they_are_touched() -> None:
    door = engine(fault_delay_most_ns=20_000_000)
    source = torch.ones(1 << 16)
    held = weakref.ref(source)
    block = put(door, source)
    del source
    assert held() is not None
    block.settle()
    assert held() is None
    into = torch.empty(1 << 16)
    held = weakref.ref(into)
    block.get(into)
    del into
    assert held() is not None
    block.arrive()
    assert held() is None


@pytest.mark.parametrize("end", ["drop", "forget", "close"])
def test_ending_in_the_middle_of_a_copy(end: str) -> None:
    door = engine(fault_delay_most_ns=5_000_000)
    for _ in range(20):
        block: _core.Block | None = put(door, torch.ones(1 << 12))
        assert block is not None
        block.get(torch.empty(1 << 12))
        if end == "drop":
            block.drop()
        elif end == "forget":
            del block
    if end == "close":
        assert block is not None
        door.close()
        with pytest.raises(RuntimeError, match=GONE):
            block.settle()
        block.drop()
    else:
        block = None
        gc.collect()
        assert door.counters()["block_count"] == 0


def test_what_is_refused() -> None:
    door = engine()
    whole = torch.ones(8, 8)
    for gaps in (whole[:, :4], whole[0].expand(3, 8), torch.empty(0), torch.empty(3, device="meta")):
        with pytest.raises((ValueError, TypeError), match="dense memory"):
            door.put(gaps)
    for other in (7, torch.eye(3).to_sparse()):
        with pytest.raises(TypeError, match="dense memory"):
            door.put(other)
    block = put(door, whole)
    with pytest.raises(ValueError, match="tensor has 12 bytes, the block has 256"):
        block.get(torch.ones(3))
    with pytest.raises(RuntimeError, match="get comes before arrive"):
        block.arrive()
    block.drop()
    block.drop()
    for call in (block.settle, block.settled, block.arrive, lambda: block.get(whole)):
        with pytest.raises(RuntimeError, match=GONE):
            call()
    door.close()
    with pytest.raises(ValueError, match="closed"):
        door.put(whole)


def test_no_room_is_no_error() -> None:
    door = engine(host_bytes=1 << 20)
    assert door.put(torch.ones(1 << 20)) is None
    assert door.counters()["block_count"] == 0


def test_a_copy_that_fails_leaves_the_source() -> None:
    door = engine(fault_fail_ppm=1_000_000)
    source = torch.ones(1 << 12)
    block = put(door, source)
    with pytest.raises(MemScaleError, match="failed by fault injection"):
        block.settle()
    assert torch.equal(source, torch.ones(1 << 12))
    block.drop()
    assert door.counters()["block_count"] == 0


def test_threads_wait_and_drop_at_once() -> None:
    door = engine(fault_delay_most_ns=3_000_000)
    trouble: list[BaseException] = []

    def wait(block: _core.Block) -> None:
        try:
            block.settle()
        except RuntimeError as error:
            if str(error) != GONE:
                trouble.append(error)
        except BaseException as error:
            trouble.append(error)

    for _ in range(20):
        block = put(door, torch.ones(1 << 10))
        threads = [threading.Thread(target=wait, args=(block,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        block.drop()
        for thread in threads:
            thread.join()
    assert not trouble


def test_a_child_of_fork_is_told() -> None:
    door = engine()
    block = put(door, torch.ones(1 << 10))
    block.settle()
    child = os.fork()
    if child == 0:
        try:
            block.settle()
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(back(block, torch.empty(1 << 10)), torch.ones(1 << 10))
