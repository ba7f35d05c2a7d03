# SPDX-License-Identifier: Apache-2.0
"""Rules for CPU kernels of losses that follow what the kernels allocate to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memscale.ops.scratch import RULES
from zoo.training import peak_bytes

aten = torch.ops.aten


def inside(func: Any, *args: Any) -> int:
    """What a call takes beyond what it returns or writes to."""
    made = func(*args)
    fresh = 0 if made is args[0] else made.numel() * made.element_size()
    return peak_bytes(lambda: func(*args)) - fresh


def of_rule(func: Any, *args: Any) -> int:
    return RULES[func._schema.name](args, [func(*args)])


def mask(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(shape) < 0.3


@pytest.mark.parametrize(
    ("source", "index"),
    [
        (torch.randn(64, 48), [mask(64, 48)]),
        (torch.randn(64, 48), [mask(64)]),
        (torch.randn(64, 48), [None, mask(48)]),
        (torch.randn(8, 16, 32), [mask(8, 16)]),
    ],
)
def test_a_mask_takes_what_its_places_take(source: Tensor, index: list[Tensor | None]) -> None:
    get, put = aten.index.Tensor, aten.index_put_.default
    assert of_rule(get, source, index) == inside(get, source, index)
    values = get(source, index)
    assert of_rule(put, source, index, values) == inside(put, source, index, values)
    one = torch.zeros(())  # for every place: nobody knows how many
    assert of_rule(put, source, index, one) >= of_rule(put, source, index, values)


@pytest.mark.parametrize("rows", [512, 40])
def test_softmax_of_a_transposed_matrix_takes_a_copy_and_a_block(rows: int) -> None:
    func, matrix = aten._log_softmax.default, torch.randn(64, rows).t()
    assert of_rule(func, matrix, 1, False) == inside(func, matrix, 1, False)
