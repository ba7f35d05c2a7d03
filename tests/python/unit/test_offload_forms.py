# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of every form come back as they were, on memory that is theirs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.offload.engine import Offload, OffloadSettings

ROUTES: dict[str, dict[str, int]] = {
    "library": {},
    "table": {"fault_no_library": True},
    "capsules": {"fault_capsules": True},
}

FORMS: dict[str, Callable[[], Tensor]] = {
    "in rows": lambda: torch.randn(3, 5),
    "in columns": lambda: torch.randn(5, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "seven dimensions": lambda: torch.randn(2, 1, 3, 1, 2, 1, 2),
    "a number": lambda: torch.randn(()),
    "one number, often": lambda: torch.randn(1).expand(4, 3),
    "rows, often": lambda: torch.randn(3, 1).expand(3, 4),
    "every other row": lambda: torch.randn(6, 4)[::2],
    "from the middle": lambda: torch.randn(10)[3:7],
    "to the last byte but one": lambda: torch.zeros(9, dtype=torch.uint8)[:8].view(torch.int32),
    "overlapping": lambda: torch.randn(8).as_strided((3, 4), (2, 1)),
    "bool": lambda: torch.randn(7) > 0,
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "int64": lambda: torch.arange(9).reshape(3, 3),
}


@contextmanager
def offload(faults: dict[str, int] | None = None) -> Iterator[Any]:
    """An engine with room in host memory, whatever the size; empty when the block ends."""
    door = Offload(OffloadSettings(torch.device("cpu"), host_bytes=16 << 20, least_bytes=1), faults)
    yield door.engine
    counters = door.counters()
    assert (counters["block_count"], counters["source_bytes"]) == (0, 0)


def raw(tensor: Tensor) -> bytes:
    """Values of any dtype, to be compared bit by bit."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_comes_back_as_it_was(form: str, route: str) -> None:
    tensor = FORMS[form]()
    facts, bits = (tensor.shape, tensor.stride(), tensor.dtype), raw(tensor)
    with offload(ROUTES[route]) as engine:
        saved = engine.pack(tensor)
        engine.settle()
        del tensor
        for _ in range(2):
            back = engine.unpack(saved)
            assert (back.shape, back.stride(), back.dtype) == facts
            assert raw(back) == bits
            assert (type(back), back._version, back.is_leaf, back.requires_grad) == (Tensor, 0, True, False)
            assert not back._is_view()
            back.view(-1)[:1].zero_() if back.is_contiguous() else None  # nobody else sees it
        assert engine.counters()["saves_moved"] == 1
        del saved


def test_several_tensors_on_one_storage_share_it_until_the_last() -> None:
    whole = torch.randn(4, 6)
    parts = [whole, whole[1:3], whole.t(), whole.view(3, 8), whole.view(-1)[5:6]]
    bits = [raw(part) for part in parts]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 2, 3]):
        with offload() as engine:
            saves = [engine.pack(part) for part in parts]
            engine.settle()
            back = {i: engine.unpack(saves[i]) for i in order}
            assert all(raw(back[i]) == bits[i] for i in order)
            assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 1
            assert len({id(tensor) for tensor in back.values()}) == len(parts)
            assert engine.counters()["in_bytes_host"] == whole.nbytes
            del saves


class Watching(TorchDispatchMode):
    """Lets everything pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_does_not_disturb() -> None:
    tensor = torch.randn(3, 5)
    with offload() as engine:
        saved = engine.pack(tensor)
        engine.settle()
        with Watching():
            inside = engine.unpack(saved)
        assert torch.equal(inside, tensor)
        assert torch.equal(engine.unpack(saved), tensor)
        del saved


def test_what_came_back_outlives_its_engine() -> None:
    tensor = torch.randn(64)
    with offload() as engine:
        saved = engine.pack(tensor)
        engine.settle()
        back = engine.unpack(saved)
        del saved
    engine.close()
    del engine
    assert torch.equal(back, tensor)
