# SPDX-License-Identifier: Apache-2.0
"""Devices by name, by size, present or not: what a prediction is for, without touching any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale.core import devices
from memscale.core.devices import closest_names, find_card, resolve_device
from memscale.errors import MemScaleError
from memscale.hardware import present_gpu
from memscale.hardware.cards import CARDS
from memscale.hardware.present_gpu import PresentGpu
from memscale.hardware.target import LARGE_WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES
from processors import use_gpu

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("rtx3090", "NVIDIA GeForce RTX 3090"),
        ("3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("3090ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("4070 super", "NVIDIA GeForce RTX 4070 SUPER"),
        ("gtx-1080-ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("a100-40gb", "NVIDIA A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100 32GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("H100", "NVIDIA H100 SXM"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("A6000", "NVIDIA RTX A6000"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("3060 12 GB", "NVIDIA GeForce RTX 3060 12GB"),
    ],
)
def test_names_are_matched_in_about_any_spelling(text: str, name: str) -> None:
    card = find_card(text)
    assert card is not None and card.name == name


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_finds_itself_and_is_plausible(card: devices.Card) -> None:
    assert find_card(card.name) is card
    words = [int(word[:-2]) for word in card.name.split() if word.endswith("GB")]
    for nominal in words:
        if nominal < 400:  # the GH200 is named by the host's
            assert 0.9 * nominal * GIB < card.total_bytes < nominal * GIB
    assert card.total_bytes % 1 == 0 and (6, 0) <= card.capability <= (12, 1)


def test_an_open_size_takes_the_smallest() -> None:
    card = find_card("a100")
    assert card is not None and card.name == "NVIDIA A100 40GB"
    assert find_card("RTX 3090 48GB") is None


@pytest.mark.parametrize("text", ["RTX 9090", "banana", "", "a", "RTX 3090 48GB"])
def test_an_unknown_card_names_the_closest(text: str) -> None:
    with pytest.raises(ValueError, match=r"closest: '.*Also allowed"):
        resolve_device(text)
    assert len(closest_names(text)) == 5


def test_closest_is_close() -> None:
    assert "NVIDIA GeForce RTX 3090" in closest_names("RTX 3091")


def test_a_card_by_name() -> None:
    hardware = resolve_device("RTX 3090")
    assert hardware.device_kind == "cuda" and hardware.compute_capability == (8, 6)
    assert 23.6 * GIB < hardware.total_bytes < 23.7 * GIB
    assert hardware.target.kind == "cuda" and hardware.target.foreach
    assert hardware.target.gemm_workspace_bytes == SMALL_WORKSPACE_BYTES == 8_519_680
    assert resolve_device("H100").target.gemm_workspace_bytes == LARGE_WORKSPACE_BYTES == 33_554_432
    assert resolve_device("RTX 5090").target.gemm_workspace_bytes == LARGE_WORKSPACE_BYTES


def test_a_card_by_size_says_what_it_assumes() -> None:
    hardware = resolve_device("24GiB")
    assert hardware.total_bytes == 24 * GIB and hardware.compute_capability == (8, 0)
    assert "8.0 assumed" in hardware.name
    assert resolve_device("16 GB").total_bytes == 16 * 10**9


def test_the_host() -> None:
    model = nn.Linear(2, 2)
    for device in ("cpu", "CPU", torch.device("cpu"), None):
        hardware = resolve_device(device, model)
        assert hardware.device_kind == "cpu" and hardware.target.kind == "cpu"
    assert resolve_device(None, nn.Linear(2, 2, device="meta")).device_kind == "cpu"
    assert resolve_device(None).device_kind == "cpu"


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="device is a int"):
        resolve_device(3)  # type: ignore[arg-type]
    with pytest.raises(MemScaleError, match="cpu and cuda"):
        resolve_device(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card_is_said() -> None:
    with pytest.raises(MemScaleError, match=r"no CUDA device|NVIDIA driver"):
        resolve_device("cuda")


class TestPresentCard:
    """The driver's answer, without a driver."""

    @pytest.mark.parametrize(
        ("gpu", "total"),
        [
            (PresentGpu("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0)), find_card("A100 80GB")),
            (PresentGpu("NVIDIA A100-PCIE-40GB", 40 * GIB, (8, 0)), find_card("A100 40GB")),
            (PresentGpu("NVIDIA GeForce RTX 3080", 10 * GIB, (8, 6)), find_card("3080 10GB")),
            (PresentGpu("NVIDIA GeForce RTX 3080", 12 * GIB, (8, 6)), find_card("3080 12GB")),
        ],
    )
    def test_it_is_matched_against_the_table(
        self, gpu: PresentGpu, total: devices.Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_gpu(monkeypatch, gpu)
        hardware = resolve_device("cuda")
        assert hardware.total_bytes == total.total_bytes and hardware.name == gpu.name
        assert not torch.cuda.is_initialized()

    def test_one_that_the_table_has_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = PresentGpu("NVIDIA Thing 9000", 77 * GIB, (9, 0))
        use_gpu(monkeypatch, gpu)
        hardware = resolve_device("cuda:1")
        assert hardware.total_bytes == 77 * GIB and hardware.device_index == 1

    @pytest.mark.parametrize(
        ("visible", "index", "expected"),
        [
            (None, 2, 2),
            ("3,1", 1, 1),
            ("3,1", 0, 3),
            (" 5 ", 0, 5),
            ("GPU-ab,2", 0, b"GPU-ab"),
            ("1,-1,2", 0, 1),
        ],
    )
    def test_cuda_visible_devices(
        self, visible: str | None, index: int, expected: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert present_gpu.identity(index) == expected

    @pytest.mark.parametrize(("visible", "index"), [("", 0), ("0", 1), ("1,-1,2", 1), ("MIG-x", 0)])
    def test_cards_that_are_hidden_or_divided(
        self, visible: str, index: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(MemScaleError):
            present_gpu.identity(index)
