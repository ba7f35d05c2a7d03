# SPDX-License-Identifier: Apache-2.0
"""Cards that a step can be predicted for without having one: name, memory, compute capability.

A card's "24 GB" is not what a program gets. The driver keeps a part for itself, and a card with error
correction another. `total_bytes` is what `cudaMemGetInfo` and `torch.cuda` call total, on Linux without a
display. It moves by some ten MiB from driver to driver; where several were seen, the smaller is here.

`known` says how well it is known:

    exact      printed in bytes by deviceQuery or torch.cuda.get_device_properties
    reported   printed by PyTorch in GiB with two digits ("GPU 0 has a total capacity of 23.69 GiB")
    nominal    not seen: the memory on the box less 1.5 %, which is what the others lack on average
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
_NOMINAL_PPM: Final = 985_000


@dataclass(frozen=True)
class Card:
    """One kind of card.

    Attributes:
        name: as the driver reports it, or close to it.
        total_bytes: see above.
        capability: CUDA compute capability, major and minor.
        known: "exact", "reported" or "nominal".
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    known: str


def _exact(name: str, total_bytes: int, capability: tuple[int, int]) -> Card:
    return Card(name, total_bytes, capability, "exact")


def _reported(name: str, hundredths: int, capability: tuple[int, int]) -> Card:
    """Memory in hundredths of a GiB, rounded down as far as two digits leave open."""
    return Card(name, (2 * hundredths - 1) * GIB // 200, capability, "reported")


def _nominal(name: str, gib: int, capability: tuple[int, int]) -> Card:
    return Card(name, gib * GIB // 1_000_000 * _NOMINAL_PPM, capability, "nominal")


_PASCAL_DC, _PASCAL, _VOLTA, _TURING = (6, 0), (6, 1), (7, 0), (7, 5)
_AMPERE_DC, _AMPERE, _ADA, _HOPPER = (8, 0), (8, 6), (8, 9), (9, 0)
_BLACKWELL_DC, _BLACKWELL = (10, 0), (12, 0)

CARDS: Final[tuple[Card, ...]] = (
    # Desktop, Pascal to Turing
    _exact("NVIDIA GeForce GTX 1080 Ti", 11_721_506_816, _PASCAL),
    _reported("NVIDIA GeForce RTX 2060", 579, _TURING),
    _reported("NVIDIA GeForce RTX 2060 SUPER", 779, _TURING),
    _reported("NVIDIA GeForce RTX 2070", 779, _TURING),
    _reported("NVIDIA GeForce RTX 2070 SUPER", 779, _TURING),
    _reported("NVIDIA GeForce RTX 2080", 779, _TURING),
    _reported("NVIDIA GeForce RTX 2080 SUPER", 779, _TURING),
    _exact("NVIDIA GeForce RTX 2080 Ti", 11_554_717_696, _TURING),
    _reported("NVIDIA TITAN RTX", 2365, _TURING),
    # Desktop, Ampere
    _reported("NVIDIA GeForce RTX 3060 12GB", 1176, _AMPERE),
    _reported("NVIDIA GeForce RTX 3060 Ti", 779, _AMPERE),
    _reported("NVIDIA GeForce RTX 3070", 779, _AMPERE),
    _reported("NVIDIA GeForce RTX 3070 Ti", 779, _AMPERE),
    _reported("NVIDIA GeForce RTX 3080 10GB", 978, _AMPERE),
    _reported("NVIDIA GeForce RTX 3080 12GB", 1176, _AMPERE),
    _reported("NVIDIA GeForce RTX 3080 Ti", 1176, _AMPERE),
    _reported("NVIDIA GeForce RTX 3090", 2369, _AMPERE),
    _reported("NVIDIA GeForce RTX 3090 Ti", 2368, _AMPERE),
    # Desktop, Ada
    _reported("NVIDIA GeForce RTX 4060", 775, _ADA),
    _nominal("NVIDIA GeForce RTX 4060 Ti 8GB", 8, _ADA),
    _reported("NVIDIA GeForce RTX 4060 Ti 16GB", 1570, _ADA),
    _reported("NVIDIA GeForce RTX 4070", 1172, _ADA),
    _nominal("NVIDIA GeForce RTX 4070 SUPER", 12, _ADA),
    _reported("NVIDIA GeForce RTX 4070 Ti", 1172, _ADA),
    _reported("NVIDIA GeForce RTX 4070 Ti SUPER", 1570, _ADA),
    _reported("NVIDIA GeForce RTX 4080", 1570, _ADA),
    _reported("NVIDIA GeForce RTX 4080 SUPER", 1570, _ADA),
    _exact("NVIDIA GeForce RTX 4090", 25_250_627_584, _ADA),
    # Desktop, Blackwell
    _nominal("NVIDIA GeForce RTX 5060 Ti 16GB", 16, _BLACKWELL),
    _nominal("NVIDIA GeForce RTX 5070", 12, _BLACKWELL),
    _reported("NVIDIA GeForce RTX 5070 Ti", 1547, _BLACKWELL),
    _reported("NVIDIA GeForce RTX 5080", 1547, _BLACKWELL),
    _exact("NVIDIA GeForce RTX 5090", 33_677_180_928, _BLACKWELL),
    # Laptop
    _nominal("NVIDIA GeForce RTX 3070 Laptop GPU", 8, _AMPERE),
    _nominal("NVIDIA GeForce RTX 3080 Laptop GPU 16GB", 16, _AMPERE),
    _nominal("NVIDIA GeForce RTX 4060 Laptop GPU", 8, _ADA),
    _nominal("NVIDIA GeForce RTX 4070 Laptop GPU", 8, _ADA),
    _nominal("NVIDIA GeForce RTX 4080 Laptop GPU", 12, _ADA),
    _nominal("NVIDIA GeForce RTX 4090 Laptop GPU", 16, _ADA),
    _nominal("NVIDIA GeForce RTX 5090 Laptop GPU", 24, _BLACKWELL),
    # Workstation
    _nominal("NVIDIA RTX A2000 6GB", 6, _AMPERE),
    _nominal("NVIDIA RTX A2000 12GB", 12, _AMPERE),
    _reported("NVIDIA RTX A4000", 1573, _AMPERE),
    _reported("NVIDIA RTX A4500", 1969, _AMPERE),
    _reported("NVIDIA RTX A5000", 2367, _AMPERE),
    _nominal("NVIDIA RTX A5500", 24, _AMPERE),
    _reported("NVIDIA RTX A6000", 4740, _AMPERE),
    _nominal("NVIDIA RTX 4000 Ada Generation", 20, _ADA),
    _nominal("NVIDIA RTX 4500 Ada Generation", 24, _ADA),
    _nominal("NVIDIA RTX 5000 Ada Generation", 32, _ADA),
    _reported("NVIDIA RTX 6000 Ada Generation", 4738, _ADA),
    _nominal("NVIDIA RTX PRO 6000 Blackwell", 96, _BLACKWELL),
    # Data centre
    _reported("Tesla P100 16GB", 1589, _PASCAL_DC),
    _reported("Tesla V100 16GB", 1577, _VOLTA),
    _reported("Tesla V100 32GB", 3174, _VOLTA),
    _exact("Tesla T4", 15_843_721_216, _TURING),
    _reported("NVIDIA A10", 2206, _AMPERE),
    _reported("NVIDIA A10G", 2206, _AMPERE),
    _reported("NVIDIA A30", 2350, _AMPERE_DC),
    _reported("NVIDIA A40", 4434, _AMPERE),
    _reported("NVIDIA A100 40GB", 3939, _AMPERE_DC),
    _reported("NVIDIA A100 80GB", 7915, _AMPERE_DC),
    _reported("NVIDIA A800 80GB", 7932, _AMPERE_DC),
    _reported("NVIDIA L4", 2203, _ADA),
    _reported("NVIDIA L40", 4440, _ADA),
    _reported("NVIDIA L40S", 4439, _ADA),
    _reported("NVIDIA H100 PCIe", 7910, _HOPPER),
    _reported("NVIDIA H100 SXM", 7910, _HOPPER),
    _reported("NVIDIA H100 NVL", 9300, _HOPPER),
    _reported("NVIDIA H800", 7910, _HOPPER),
    _nominal("NVIDIA H20", 96, _HOPPER),
    _reported("NVIDIA H200", 13972, _HOPPER),
    _reported("NVIDIA GH200 96GB", 9450, _HOPPER),
    _reported("NVIDIA GH200 480GB", 9450, _HOPPER),  # named by its host memory
    _nominal("NVIDIA GH200 144GB", 144, _HOPPER),
    _reported("NVIDIA B200", 17835, _BLACKWELL_DC),
    _nominal("NVIDIA GB200", 186, _BLACKWELL_DC),
    _nominal("NVIDIA B300", 275, (10, 3)),
)
