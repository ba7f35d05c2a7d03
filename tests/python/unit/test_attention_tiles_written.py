# SPDX-License-Identifier: Apache-2.0
"""What attention in tiles returns may be written in place, as what plain PyTorch returns may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from test_attention_tiles import (
    BATCH,
    WIDTH,
    _einsum,
    _flattened,
    _in_place,
    _operator,
    assert_close,
    gradients,
    model,
    tiled,
)
from torch import Tensor


def _added(made: Tensor, v: Tensor) -> Tensor:
    made += v
    return made


def _some_rows(made: Tensor, v: Tensor) -> Tensor:
    """BigBird computes its first and last blocks apart, and writes them over."""
    made[:, :, :64] = v[:, :, -64:] * 2
    return made


def _activated(made: Tensor, v: Tensor) -> Tensor:
    return made.relu_()


def _through_a_view(made: Tensor, v: Tensor) -> Tensor:
    made.view(BATCH, -1, 2, WIDTH // 2)[..., 0, :] = 0
    return made


@pytest.mark.parametrize("way", [_operator, _flattened, _einsum, _in_place])
@pytest.mark.parametrize("write", [_added, _some_rows, _activated, _through_a_view])
def test_the_output_may_be_written_in_place(write: Callable[..., Tensor], way: Any) -> None:
    """A view that the tiles' function returned could not be: autograd refuses."""

    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return write(way(it, q, k, v), v)

    net = model(core)
    exact, plain = gradients(copy.deepcopy(net).double()), gradients(net)
    with tiled(net) as tile:
        assert_close(gradients(net), plain, exact)
        assert not tile.reason
