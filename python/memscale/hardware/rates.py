# SPDX-License-Identifier: Apache-2.0
"""Speeds of machines, as constants: what the planner prices recomputation and transfers with.

Nothing here is measured on the running machine: a card's speed comes from a table by its name, and a host's
from a formula in its number of threads. They count for devices that are not there, and where `calibration`
is off.

The table holds the vendors' peak figures, dense, with FP32 accumulation. What a training step reaches of them
is one share per kind, below; the planner compares alternatives on one card, so the ratios matter most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

TERA_PER_US: Final = 1_000_000  # 1 TFLOP/s in operations per microsecond
GIGA_PER_US: Final = 1_000  # 1 GB/s in bytes per microsecond

# Shares of the peak that large matrix products and elementwise operations reach in eager PyTorch. A 3090 is
# commonly seen at 35 TFLOP/s in BF16 training (peak 71), an H100 near 400 to 500 (peak 989).
_SCALAR_PERCENT: Final = 70  # FP32 on the ordinary units
_TENSOR_PERCENT: Final = 50  # TF32, BF16, FP16 on the tensor units
_MEMORY_PERCENT: Final = 80  # memory bandwidth


@dataclass(frozen=True)
class Rates:
    """Speeds of one device, as reached in practice, in integers."""

    flops_per_us: int  # FP32 products without TF32, PyTorch's default
    tf32_flops_per_us: int  # FP32 products with TF32 allowed; equal to the above where there is none
    half_flops_per_us: int  # BF16 or FP16 products
    moved_bytes_per_us: int  # device memory, read plus write
    link_bytes_per_us: int  # to or from host memory, one direction, pinned


@dataclass(frozen=True)
class _Card:
    """One row: peak TFLOP/s in FP32, TF32 and half precision, memory GB/s, link GB/s as reached."""

    fp32: float
    tf32: float
    half: float
    memory: int
    link: int

    def rates(self) -> Rates:
        fp32 = _share(self.fp32 * TERA_PER_US, _SCALAR_PERCENT)
        return Rates(
            flops_per_us=fp32,
            tf32_flops_per_us=max(fp32, _share(self.tf32 * TERA_PER_US, _TENSOR_PERCENT)),
            half_flops_per_us=max(fp32, _share(self.half * TERA_PER_US, _TENSOR_PERCENT)),
            moved_bytes_per_us=_share(self.memory * GIGA_PER_US, _MEMORY_PERCENT),
            link_bytes_per_us=self.link * GIGA_PER_US,
        )


# Link: PCIe 3.0 x16 gives 12 GB/s in practice, 4.0 gives 25, 5.0 gives 50; half where a card has 8 lanes.
_PCIE3, _PCIE4, _PCIE5, _NVLINK_C2C = 12, 25, 50, 350

# Key: words that must all appear in the device's name. The row with the most words wins.
CARDS: Final[dict[str, _Card]] = {
    # Data centre
    "P100": _Card(9.3, 0, 18.7, 732, _PCIE3),
    "T4": _Card(8.1, 0, 65, 300, _PCIE3),
    "V100": _Card(15.7, 0, 125, 900, _PCIE3),
    "A10": _Card(31.2, 62.5, 125, 600, _PCIE4),
    "A10G": _Card(31.5, 35, 70, 600, _PCIE4),
    "A30": _Card(10.3, 82, 165, 933, _PCIE4),
    "A40": _Card(37.4, 74.8, 149.7, 696, _PCIE4),
    "A100": _Card(19.5, 156, 312, 1555, _PCIE4),
    "A100 80GB": _Card(19.5, 156, 312, 1935, _PCIE4),
    "L4": _Card(30.3, 60, 121, 300, _PCIE4),
    "L40": _Card(90.5, 90.5, 181, 864, _PCIE4),
    "L40S": _Card(91.6, 183, 362, 864, _PCIE4),
    "H100": _Card(66.9, 494, 989, 3350, _PCIE5),
    "H100 PCIe": _Card(51.2, 378, 756, 2039, _PCIE5),
    "H200": _Card(66.9, 494, 989, 4800, _PCIE5),
    "GH200": _Card(66.9, 494, 989, 4000, _NVLINK_C2C),
    "B200": _Card(75, 1125, 2250, 8000, _PCIE5),
    # Workstation
    "A6000": _Card(38.7, 77.4, 154.8, 768, _PCIE4),
    "6000 Ada": _Card(91.1, 182, 364, 960, _PCIE4),
    # Turing: no BF16 and no TF32; half precision with FP32 accumulation
    "2060": _Card(6.5, 0, 25.8, 336, _PCIE3),
    "2070": _Card(7.5, 0, 29.9, 448, _PCIE3),
    "2080": _Card(10.1, 0, 40.3, 448, _PCIE3),
    "2080 Ti": _Card(13.4, 0, 53.8, 616, _PCIE3),
    # Ampere, Ada, Blackwell for desktops: TF32 as fast as FP32, half precision twice that
    "3060": _Card(12.7, 12.7, 25.5, 360, _PCIE4),
    "3060 Ti": _Card(16.2, 16.2, 32.4, 448, _PCIE4),
    "3070": _Card(20.3, 20.3, 40.6, 448, _PCIE4),
    "3070 Ti": _Card(21.7, 21.7, 43.5, 608, _PCIE4),
    "3080": _Card(29.8, 29.8, 59.5, 760, _PCIE4),
    "3080 Ti": _Card(34.1, 34.1, 68.2, 912, _PCIE4),
    "3090": _Card(35.6, 35.6, 71, 936, _PCIE4),
    "3090 Ti": _Card(40, 40, 80, 1008, _PCIE4),
    "4060": _Card(15.1, 15.1, 30.2, 272, _PCIE4 // 2),
    "4060 Ti": _Card(22.1, 22.1, 44.1, 288, _PCIE4 // 2),
    "4070": _Card(29.1, 29.1, 58.3, 504, _PCIE4),
    "4070 Ti": _Card(40.1, 40.1, 80.2, 504, _PCIE4),
    "4080": _Card(48.7, 48.7, 97.5, 717, _PCIE4),
    "4090": _Card(82.6, 82.6, 165.2, 1008, _PCIE4),
    "5060": _Card(19.2, 19.2, 38.4, 448, _PCIE5 // 2),
    "5060 Ti": _Card(23.7, 23.7, 47.4, 448, _PCIE5 // 2),
    "5070": _Card(30.9, 30.9, 61.7, 672, _PCIE5),
    "5070 Ti": _Card(43.9, 43.9, 87.9, 896, _PCIE5),
    "5080": _Card(56.3, 56.3, 112.6, 960, _PCIE5),
    "5090": _Card(104.8, 104.8, 209.5, 1792, _PCIE5),
}

# A card that the table does not know counts as a middling one of its generation, by compute capability.
CLASS_RATES: Final[tuple[tuple[tuple[int, int], str], ...]] = (
    ((12, 0), "5070"),
    ((10, 0), "B200"),
    ((9, 0), "H100 PCIe"),
    ((8, 9), "4070"),
    ((8, 6), "3070"),
    ((8, 0), "A100"),
    ((7, 5), "2070"),
    ((7, 0), "V100"),
)
_OLDEST: Final = "P100"


def gpu_rates(name: str, capability: tuple[int, int]) -> Rates:
    """Speeds of a card by its name, or by its generation if the table does not know it.

    Args:
        name: As the driver reports it, for example "NVIDIA GeForce RTX 3090".
        capability: CUDA compute capability, major and minor.
    """
    # "A100-SXM4-80GB" and "A100 80GB PCIe" name the same card: compare whole words in any order.
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    known = [key for key in CARDS if words.issuperset(key.lower().split())]
    if known:
        return CARDS[max(known, key=lambda key: len(key.split()))].rates()
    for lowest, key in CLASS_RATES:
        if capability >= lowest:
            return CARDS[key].rates()
    return CARDS[_OLDEST].rates()


def cpu_rates(threads: int, wide: bool = False) -> Rates:
    """Speeds of a host by its number of threads.

    40 GFLOP/s a thread is what an AVX2 core reaches in FP32 matrix products, 90 one with AVX-512. Two threads
    nearly fill the memory bus of an ordinary host (20 GB/s each); further ones add 2 GB/s, up to 32 threads.

    Args:
        threads: Threads that PyTorch computes with, at least 1.
        wide: The processor has AVX-512.
    """
    threads = max(1, threads)
    moved = 20 * min(threads, 2) + 2 * max(0, min(threads, 32) - 2)
    flops = (90_000 if wide else 40_000) * threads
    return Rates(
        flops_per_us=flops,
        tf32_flops_per_us=flops,
        half_flops_per_us=flops,
        moved_bytes_per_us=moved * GIGA_PER_US,
        link_bytes_per_us=moved * GIGA_PER_US // 2,  # a copy within the host reads and writes every byte
    )


def _share(rate: float, percent: int) -> int:
    """A percentage of a rate as an integer, at least 1. Rounded first: 8.1 * 1e6 is not exact."""
    return max(1, round(rate) * percent // 100)
