# SPDX-License-Identifier: Apache-2.0
"""Which cards get our kernels, which compiler they are compiled by, and where tensors of the state are made.

What needs a card, or the stand-in for one, is in tests/python/gpu/test_gpu_optim_state.py.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale.errors import MemScaleError
from memscale.optim import arrays, cards, give_back, take_over

CARD = torch.device("cuda", 3)


class Card:
    """Stands in for `_core.Card`."""

    name = "a card"
    made: list[tuple[Any, ...]]

    def __init__(self, *options: Any) -> None:
        self.made.append(options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of a driver with cards."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Card, "made", made, raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x50 + index, raising=False)
    return made


def opened(card: Any = Card) -> Any:
    """The cards of a process that has opened none."""
    return cards.Cards(card, lambda **options: types.SimpleNamespace(**options), lambda *made: made)


def test_the_cpu_needs_none() -> None:
    assert cards.why_not(torch.device("cpu")) == ""
    assert arrays.core_on(torch.device("cpu")) is arrays.core()


def test_other_devices_have_none() -> None:
    assert cards.why_not(torch.device("meta")).startswith("parameters on meta: its steps run on the CPU")


def test_a_card_is_opened_once(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_NVRTC", "/there/libnvrtc.so")
    mine = opened()
    assert [mine.why_not(CARD) for _ in range(3)] == [""] * 3
    first = mine.worker(CARD)
    assert mine.worker(CARD) is first and (first.card.name, first.stream) == ("a card", 0x53)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x70, raising=False)
    assert mine.worker(CARD) is not first
    assert asked == [(3, "/there/libnvrtc.so")]


def test_fingerprints_have_the_same_card(asked: list[tuple[Any, ...]]) -> None:
    mine = opened()
    table = mine.fingerprint_table(CARD, 7)
    assert table[1] == 7 and mine.worker(CARD).card is table[0]
    assert len(asked) == 1
    with pytest.raises(RuntimeError, match="not for cpu"):
        mine.fingerprint_table(torch.device("cpu"), 7)


def test_a_slow_compiler_is_told_once(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((10.0, 12.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    logging.getLogger("memscale").propagate = True
    caplog.set_level("INFO", "memscale")
    mine = opened()
    assert [mine.why_not(CARD) for _ in range(2)] == ["", ""]
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer state: its kernels for a card were compiled in 2.5 s"
    ]


def test_what_fails_is_one_line_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*options: Any) -> None:
        tried.append(options)
        raise MemScaleError("cannot compile the kernels:\n  line 1: no\n" + "x" * 1000)

    monkeypatch.setattr(torch.version, "hip", None)
    mine = opened(refuse)
    reasons = {mine.why_not(CARD) for _ in range(3)}
    assert len(tried) == 1 and len(reasons) == 1
    (reason,) = reasons
    assert reason.startswith("no kernels for cuda:3: cannot compile the kernels: line 1: no xxx")
    assert len(reason) < 350 and "\n" not in reason
    with pytest.raises(RuntimeError, match="no kernels for cuda:3"):
        mine.worker(CARD)


def test_no_memory_says_nothing_of_the_next_time(asked: list[tuple[Any, ...]]) -> None:
    full = [True]

    def refuse(*options: Any) -> Card:
        if full:
            raise MemoryError
        return Card(*options)

    mine = opened(refuse)
    with pytest.raises(MemoryError):
        mine.why_not(CARD)
    full.clear()
    assert mine.why_not(CARD) == "" and not mine.has_refused()


def test_a_graph_is_refused(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        opened().worker(CARD)


@pytest.mark.parametrize(
    ("version", "files", "chosen"),
    [
        ("13.0", ["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libnvrtc-builtins.so.13.0"], 0),
        ("13.0", ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cu13/lib/libnvrtc.so.13"], 1),
        ("12.8", ["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"], 1),
        ("12.8", ["nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12", "torch/lib/libnvrtc-b3.so.12"], 1),
        ("12.8", ["nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8"], None),
    ],
)
def test_the_compiler_is_pytorchs(
    version: str, files: list[str], chosen: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "nvidia"):
        (tmp_path / name).mkdir()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.delenv("MEMSCALE_NVRTC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert cards.compiler() == (None if chosen is None else str(tmp_path / files[chosen]))


@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_state_lies_with_its_parameter_whatever_the_default_device_is(moments: str) -> None:
    """`meta` stands for any device that is not the parameters'."""
    weights = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = torch.optim.AdamW(weights, foreach=False)
    torch.set_default_device("meta")
    try:
        assert take_over(optimizer, moments) == ""
        for weight in weights:
            weight.grad = torch.ones(300, dtype=weight.dtype, device="cpu")
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, map_location="cpu"))
        optimizer.step()
        places = {optimizer.state[weight][arrays.BYTES].device.type for weight in weights}
        give_back(optimizer)
    finally:
        torch.set_default_device(None)
    moments_now = [value for weight in weights for value in optimizer.state[weight].values()]
    assert places == {"cpu"} and {value.device.type for value in moments_now} == {"cpu"}
    assert all(weight[0].item() < 1 for weight in weights)
