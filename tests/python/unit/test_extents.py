# SPDX-License-Identifier: Apache-2.0
"""Whether two tensors of one memory share an element: never said no of two that do."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from memscale.torchkit.extents import extent_of, overlap


def elements(tensor: Tensor) -> set[int]:
    return set(tensor.flatten().tolist())


def view(memory: Tensor, draw: random.Random) -> Tensor:
    made = memory.view(draw.choice([(6, 8), (4, 12), (2, 4, 6), (48,)]))
    for _ in range(draw.randint(0, 3)):
        dimension = draw.randrange(made.dim())
        size = made.shape[dimension]
        length = draw.randint(1, size)
        made = made.narrow(dimension, draw.randint(0, size - length), length)
    return made.transpose(0, -1) if draw.random() < 0.3 else made


def test_no_shared_element_is_missed() -> None:
    draw, memory, apart = random.Random(0), torch.arange(48), 0
    for _ in range(3000):
        one, other = view(memory, draw), view(memory, draw)
        if not overlap(extent_of(one), extent_of(other)):
            apart += 1
            assert elements(one).isdisjoint(elements(other))
    assert apart > 200


def test_chunks_of_rows_are_apart() -> None:
    first, second, third = torch.arange(48).view(4, 12).chunk(3, 1)
    assert not overlap(extent_of(first), extent_of(second))
    assert not overlap(extent_of(third), extent_of(first))
    assert overlap(extent_of(first), extent_of(first.clone()))
