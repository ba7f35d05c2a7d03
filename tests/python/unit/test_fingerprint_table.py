# SPDX-License-Identifier: Apache-2.0
"""`_core.FingerprintTable` on the stand-in driver of the C tests (tests/fake_cuda), where it is built."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from card_memory import COMPILER, DRIVER, IS_BUILT, Memory
from memscale import _core
from memscale._core import fingerprint
from memscale.optim import cards

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""

pytestmark = pytest.mark.skipif(not IS_BUILT, reason="the C tests' stand-in driver is not built")


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.end()


@pytest.fixture
def card() -> _core.Card:
    return _core.Card(0, str(COMPILER), str(DRIVER))


VALUES = {
    "floats": lambda: torch.randn(300, 7),
    "transposed": lambda: torch.randn(30, 70).t(),
    "rows": lambda: torch.randn(100, 40, dtype=torch.float64)[:, 3:20],
    "halves, out of line": lambda: torch.randn(5001).bfloat16()[1:],
    "expanded": lambda: torch.randn(40, 1).expand(40, 9),
    "large": lambda: torch.randint(0, 255, (200_003,), dtype=torch.uint8),
    "none": lambda: torch.randn(0, 3),
    "one": lambda: torch.tensor(True),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", VALUES)
def test_the_values_are_those_of_the_host(kind: str, sampled: bool, memory: Memory, card: _core.Card) -> None:
    here = VALUES[kind]()
    table = _core.FingerprintTable(card, 4)
    there = memory.put(here, at=64)
    kept = table.keep(there, sampled, 0)
    assert kept is not None and kept.value() == fingerprint(here, sampled)
    kept.compare(there, 1, 0)
    assert table.read() is None


def test_the_first_difference_is_told(memory: Memory, card: _core.Card) -> None:
    table = _core.FingerprintTable(card)
    assert table.device_bytes == 8 * 65536 + 64
    here = torch.randn(1000)
    there = memory.put(here)
    kept = [table.keep(there, False, 0) for _ in range(3)]
    changed = here.clone()
    changed[500] = -changed[500]
    there = memory.put(changed, at=1 << 14)
    for tag, one in enumerate(kept, 7):
        assert one is not None
        one.compare(there, tag, 0)
    assert table.read() == (3, 7, fingerprint(here), fingerprint(changed))
    assert table.read() is None


def test_a_slot_goes_back_with_its_object(memory: Memory, card: _core.Card) -> None:
    table = _core.FingerprintTable(card, slots=2)
    there = memory.put(torch.randn(10))
    first, second = table.keep(there, False, 0), table.keep(there, False, 0)
    assert first is not None and second is not None and table.keep(there, False, 0) is None
    del first
    third = table.keep(there, False, 0)
    assert third is not None
    del table, card  # what is kept has them
    gc.collect()
    third.compare(there, 1, 0)
    assert third.value() == second.value()


def test_what_is_refused(memory: Memory, card: _core.Card) -> None:
    table = _core.FingerprintTable(card, 2)
    for wrong in (torch.randn(3), memory.put(torch.randn(3), ordinal=1)):
        with pytest.raises(ValueError, match="is not on its card"):
            table.keep(wrong, False, 0)
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        table.keep(3, False, 0)
    with pytest.raises(ValueError, match="a fingerprint needs bytes in memory"):
        table.keep(torch.empty(3, device="meta"), False, 0)
    with pytest.raises(TypeError, match="card must be a Card"):
        _core.FingerprintTable("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slot_count is 0"):
        _core.FingerprintTable(card, 0)
    with pytest.raises(TypeError):
        _core.KeptFingerprint()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuMemAlloc_v2"])
def test_a_card_without_room(call: str, card: _core.Card) -> None:
    """For kernels or for the table: PyTorch's own exception, and another time there is room."""
    fail = ctypes.CDLL(str(DRIVER)).fake_cuda_fail
    fail(call.encode(), 1, OUT_OF_MEMORY)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="OUT_OF_MEMORY") as caught:
        _core.FingerprintTable(card, 4)
    assert getattr(caught.value, "status", "") == "EDEVMEM"
    _core.FingerprintTable(card, 4)


def test_kernels_without_room_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that was full is none without kernels."""
    monkeypatch.setattr(torch.version, "hip", None)
    fail = ctypes.CDLL(str(DRIVER)).fake_cuda_fail
    mine = cards.Cards(lambda ordinal, compiler: _core.Card(ordinal, str(COMPILER), str(DRIVER)))
    for call in ("cuDevicePrimaryCtxRetain", "cuModuleLoadData"):
        fail(call.encode(), 1, OUT_OF_MEMORY)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            mine.why_not(torch.device("cuda", 0))
        assert not mine.has_refused()
    assert mine.why_not(torch.device("cuda", 0)) == ""
