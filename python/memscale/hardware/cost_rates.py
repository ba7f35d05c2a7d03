# SPDX-License-Identifier: Apache-2.0
"""Rates per class of work: what the planner prices operations with.

A class is what limits an operation (`ops/work.py`); a kind of rate is a class in full or in half precision.
Rates are measured on the machine at hand (`core/calibration.py`), or follow from a few figures of a card or
host by the shares below.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memscale import _core

if TYPE_CHECKING:
    from memscale.hardware.rates import Rates

MEASURED: Final = "measured on this machine"
TABLE: Final = "from a table"

KINDS: Final = _core.RATE_NAMES
CLASSES: Final = KINDS[: _core.WORK_COUNT]
PRODUCTS: Final = frozenset(
    ("matrix", "batch", "attention", "convolution", "grouped", "grouped_gradient", "recurrent")
)
"""Classes that are limited by floating-point operations, not by bytes."""

NEVER: Final = 2**64 - 1
"""As the size from which on memory is fresh."""

_GLIBC_MAPS_FROM: Final = 32 << 20
"""From this size on, the C library of Linux always asks the system for memory and gives it back at once."""


@dataclass(frozen=True)
class CostRates:
    """Rates of one device. All plain integers above 0, so that they can be compared and written down.

    Args:
        flops_per_us: floating-point operations per microsecond, by kind, in the order of `KINDS`.
        moved_bytes_per_us: bytes read plus written, by kind.
        fresh_from_bytes: buffers of this size and above come from the system each time.
        fresh_bytes_per_us: rate at which their pages appear, beside what is moved.
        launch_ns: fixed cost of one operation.
        recompute_ns: fixed cost of one checkpointed call.
        intercept_ns: cost of one operation inside a selective checkpoint, where each is looked at.
        source: `MEASURED` or `TABLE`.
    """

    flops_per_us: tuple[int, ...]
    moved_bytes_per_us: tuple[int, ...]
    fresh_from_bytes: int
    fresh_bytes_per_us: int
    launch_ns: int
    recompute_ns: int
    intercept_ns: int
    source: str

    def flops_of(self, kind: str) -> int:
        """Floating-point operations per microsecond of a kind."""
        return self.flops_per_us[KINDS.index(kind)]

    def bytes_of(self, kind: str) -> int:
        """Bytes per microsecond of a kind."""
        return self.moved_bytes_per_us[KINDS.index(kind)]

    @property
    def for_core(self) -> dict[str, Any]:
        """As `_core.decide` takes them."""
        return {
            "flops_per_us": dict(zip(KINDS, self.flops_per_us, strict=True)),
            "moved_bytes_per_us": dict(zip(KINDS, self.moved_bytes_per_us, strict=True)),
            "fresh_from_bytes": self.fresh_from_bytes,
            "fresh_bytes_per_us": self.fresh_bytes_per_us,
            "launch_ns": self.launch_ns,
            "recompute_ns": self.recompute_ns,
            "intercept_ns": self.intercept_ns,
        }

    @property
    def note(self) -> str:
        """One line for a plan: where the times come from."""
        return f"times by rates {self.source}"


def fresh_from() -> int:
    """Size from which on this process's memory is fresh each time; `NEVER` where that is not known."""
    return _GLIBC_MAPS_FROM if platform.libc_ver()[0] == "glibc" else NEVER


# ---- a card ------------------------------------------------------------------------------------------

# Percent of the rate of large matrix products, respectively of the memory's bandwidth as reached by large
# elementwise operations, that a class reaches on a card. Rules of thumb from published kernels, not measured
# here.
_CARD_FLOPS: Final = {
    "matrix": 100, "batch": 60, "attention": 70, "convolution": 70, "grouped": 5, "grouped_gradient": 3,
    "recurrent": 30,
}  # fmt: skip
_CARD_BYTES: Final = {
    "other": 60, "move": 100, "math": 100, "slow_math": 90, "reduce": 70, "channel": 60, "select": 60,
    "window": 50, "random": 80, "gather": 40,
}  # fmt: skip

# Of one eager operation, of one checkpointed call (which saves and restores the card's random state too), and
# of one operation that a dispatch mode looks at.
_CARD_LAUNCH_NS: Final = 5_000
_CARD_RECOMPUTE_NS: Final = 100_000
_CARD_INTERCEPT_NS: Final = 15_000


def card_cost(rates: Rates, fp32_flops_per_us: int) -> CostRates:
    """Rates of a card by its figures in the table.

    Args:
        rates: of the table.
        fp32_flops_per_us: FP32 products under PyTorch's present setting for TF32.
    """
    half = rates.half_flops_per_us
    flops = [*_shares(_CARD_FLOPS, fp32_flops_per_us), *_shares(_CARD_FLOPS, half)]
    moved = _shares(_CARD_BYTES, rates.moved_bytes_per_us)
    return CostRates(
        flops_per_us=tuple(flops),
        moved_bytes_per_us=(*moved, *moved),
        fresh_from_bytes=NEVER,
        fresh_bytes_per_us=rates.moved_bytes_per_us,
        launch_ns=_CARD_LAUNCH_NS,
        recompute_ns=_CARD_RECOMPUTE_NS,
        intercept_ns=_CARD_INTERCEPT_NS,
        source=TABLE,
    )


# ---- a host ------------------------------------------------------------------------------------------

# Percent of the rate of FP32 matrix products; and of other classes, whose speed comes from the cores too as
# long as the memory keeps up, the bytes that they move in the time of a thousand operations of such products.
# As measured with one thread of an AMD EPYC with AVX-512 and PyTorch 2.13; half precision is BF16, for which
# that processor has instructions.
_HOST_FLOPS: Final = {
    "matrix": 100, "batch": 55, "attention": 75, "convolution": 100, "grouped": 50, "grouped_gradient": 5,
    "recurrent": 85,
}  # fmt: skip
_HOST_HALF_FLOPS: Final = {
    "matrix": 220, "batch": 220, "attention": 75, "convolution": 190, "grouped": 45, "grouped_gradient": 4,
    "recurrent": 160,
}  # fmt: skip
_HOST_BYTES: Final = {
    "other": 75, "math": 95, "slow_math": 35, "reduce": 75, "channel": 80, "select": 28, "window": 26,
    "gather": 150,
}  # fmt: skip
_HOST_HALF_BYTES: Final = {
    "other": 70, "move": 110, "math": 55, "slow_math": 26, "reduce": 70, "channel": 120, "select": 18,
    "window": 15, "gather": 130,
}  # fmt: skip
_HOST_RANDOM: Final = (700, 350)
"""Random numbers are drawn by one thread: bytes per microsecond, in full and in half precision."""

_HOST_WITHOUT_HALF_PERCENT: Final = 50
"""Products in half precision of a processor without instructions for it, of those in FP32. Not measured."""

_HOST_FRESH_BYTES_PER_US: Final = 2_500  # of each of the first two threads
_HOST_LAUNCH_NS: Final = 7_500
_HOST_RECOMPUTE_NS: Final = 65_000
_HOST_INTERCEPT_NS: Final = 20_000


def host_cost(rates: Rates, threads: int, has_half: bool) -> CostRates:
    """Rates of a host.

    Args:
        rates: what `cpu_rates` says of it.
        threads: that PyTorch computes with.
        has_half: its processor has instructions for products in half precision.
    """
    products, bus = rates.flops_per_us, rates.moved_bytes_per_us
    half = dict(_HOST_HALF_FLOPS)
    if not has_half:
        half = {name: share * _HOST_WITHOUT_HALF_PERCENT // 100 for name, share in _HOST_FLOPS.items()}
    moved: list[int] = []
    for per_thousand, drawn in zip((_HOST_BYTES, _HOST_HALF_BYTES), _HOST_RANDOM, strict=True):
        for name in CLASSES:
            own = products * per_thousand[name] // 1000 if name in per_thousand else bus
            moved.append(drawn if name == "random" else max(1, min(own, bus)))
    return CostRates(
        flops_per_us=(*_shares(_HOST_FLOPS, products), *_shares(half, products)),
        moved_bytes_per_us=tuple(moved),
        fresh_from_bytes=fresh_from(),
        fresh_bytes_per_us=_HOST_FRESH_BYTES_PER_US * min(max(threads, 1), 2),
        launch_ns=_HOST_LAUNCH_NS,
        recompute_ns=_HOST_RECOMPUTE_NS,
        intercept_ns=_HOST_INTERCEPT_NS,
        source=TABLE,
    )


def _shares(percent: Mapping[str, int], rate: int) -> list[int]:
    """Per class its share of a rate, at least 1; the whole of it for classes that are not named."""
    return [max(1, rate * percent.get(name, 100) // 100) for name in CLASSES]
