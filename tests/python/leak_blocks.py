# SPDX-License-Identifier: Apache-2.0
"""Calls of `_core.Block` on an engine that lives as long as this module, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from memscale import _core

_TENSOR = torch.ones(1024)
_ENGINE = _core.OffloadEngine(torch.Tensor, torch.nn.Parameter, None, {"host_bytes": 1 << 20})


def _put() -> _core.Block:
    _ENGINE.step()
    block = _ENGINE.put(_TENSOR)
    assert block is not None
    return block


def _back() -> None:
    block = _put()
    block.get(torch.empty(1024))
    block.arrive()


def _unsettled() -> bool:
    block = _put()
    while not block.settled():
        pass
    return block.settled()


BLOCK_CALLS: dict[str, Callable[[Path], object]] = {
    "OffloadEngine.put": lambda _: _put(),
    "Block": lambda _: _put(),
    "Block.nbytes": lambda _: _put().nbytes,
    "Block.settle": lambda _: _put().settle(),
    "Block.settled": lambda _: _unsettled(),
    "Block.get": lambda _: _put().get(torch.empty(1024)),
    "Block.arrive": lambda _: _back(),
    "Block.drop": lambda _: _put().drop(),
}
"""By public name."""

BLOCK_ERRORS: tuple[Callable[[], object], ...] = (
    lambda: _ENGINE.put(7),
    lambda: _ENGINE.put(torch.ones(4, 4)[:, :2]),
    lambda: _put().get(torch.ones(3)),
    lambda: _put().arrive(),
)
"""What is refused."""
