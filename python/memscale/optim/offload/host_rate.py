# SPDX-License-Identifier: Apache-2.0
"""How fast the host's cores step parameters with our state."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from memscale.hardware.cost_rates import MEASURED
from memscale.hardware.measured_rates import quantised
from memscale.optim.arrays import core_on, form_of
from memscale.optim.kinds import kind_of, parameter_refusal, rule_of
from memscale.optim.offload.pieces import HOST, Own
from memscale.optim.offload.step import as_tensor, types_of

if TYPE_CHECKING:
    from memscale.hardware.detect import Hardware

Measure = Callable[[str, torch.dtype, int], int]

USUAL_PER_THREAD: Final = 300
"""Elements per microsecond and thread where nothing is measured: a fifth of what AdamW with 8-bit moments
took on two threads of an EPYC (`bench/results/c.csv`), for a host that does something else meanwhile."""

_ELEMENTS: Final = 1 << 20  # a piece
_ROUNDS: Final = 4


def elements_per_us(
    moments: str,
    dtype: torch.dtype,
    hardware: Hardware,
    measure: Measure | None = None,
) -> int:
    """Elements of a parameter that AdamW steps in a microsecond; measured where the card's rates were.

    Args:
        moments: their form, as in `take_over`.
        dtype: of weight and gradient.
        hardware: the card. With rates of a table, as those of a card that is not there, nothing is measured.
        measure: gives the rate of moments, dtype and threads; None: `measured`.
    """
    if hardware.cost.source != MEASURED:
        return USUAL_PER_THREAD * hardware.cpu_threads
    return (measure or measured)(moments, dtype, hardware.cpu_threads)


@functools.lru_cache(maxsize=16)
def measured(moments: str, dtype: torch.dtype, threads: int) -> int:
    """Once in a process, in a moment; rounded as rates are that calibration keeps."""
    weight = torch.nn.Parameter(torch.ones(_ELEMENTS, dtype=dtype, device="cpu"))
    optimizer = torch.optim.AdamW([weight], lr=0.0)  # which is not stepped: hooks of the program would see it
    kind = kind_of(optimizer)
    if isinstance(kind, str) or parameter_refusal(weight):
        return USUAL_PER_THREAD * threads
    form, gradient = form_of(kind, moments, weight), torch.ones_like(weight)
    layout = Own(form)
    piece = torch.zeros(layout.size(0, _ELEMENTS), dtype=torch.uint8, device="cpu")
    rule = {**rule_of(kind, optimizer.param_groups[0]), **types_of(form, gradient)}
    best = float("inf")
    for number in range(1, _ROUNDS + 1):
        tensor = as_tensor(layout, number, weight, gradient, piece, 0, _ELEMENTS)
        began = time.perf_counter()
        core_on(HOST).step(rule, [tensor])
        best = min(best, time.perf_counter() - began)
    return quantised(_ELEMENTS / (best * 1e6))
