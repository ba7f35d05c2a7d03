# SPDX-License-Identifier: Apache-2.0
"""How fast the host's cores step parameters with our state."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final

import torch

from memscale.core.calibration import quantised
from memscale.core.cost_rates import MEASURED
from memscale.optim.taken import take_over

if TYPE_CHECKING:
    from memscale.core.hardware import Hardware

_USUAL_PER_THREAD: Final = 300
"""Elements per microsecond and thread where nothing is measured: a fifth of what AdamW with 8-bit moments
took on two threads of an EPYC (`bench/results/c.csv`), for a host that does something else meanwhile."""

_ELEMENTS: Final = 1 << 20  # a piece
_ROUNDS: Final = 4  # the first makes the state


def elements_per_us(moments: str, dtype: torch.dtype, hardware: Hardware) -> int:
    """Elements of a parameter that AdamW steps in a microsecond; measured where the card's rates were.

    Args:
        moments: their form, as in `take_over`.
        dtype: of weight and gradient.
        hardware: the card. With rates of a table, as those of a card that is not there, nothing is measured.
    """
    if hardware.cost.source != MEASURED:
        return _USUAL_PER_THREAD * hardware.cpu_threads
    return _measured(moments, dtype, hardware.cpu_threads)


@functools.lru_cache(maxsize=16)
def _measured(moments: str, dtype: torch.dtype, threads: int) -> int:
    """Once in a process, in a moment; rounded as rates are that calibration keeps."""
    values = torch.nn.Parameter(torch.ones(_ELEMENTS, dtype=dtype, device="cpu"))
    optimizer = torch.optim.AdamW([values], lr=0.0)
    take_over(optimizer, moments)
    values.grad = torch.ones_like(values)
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - began)
    return quantised(_ELEMENTS / (best * 1e6))
