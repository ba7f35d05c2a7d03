# SPDX-License-Identifier: Apache-2.0
"""What the tests of offloaded optimizer state share: parameters that are cut in odd places, and steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.offload.engine import Offload, OffloadSettings
from memscale.optim.offload.attach import send
from optim_samples import Lion

PIECE = 1 << 12

Make = Callable[[Any], torch.optim.Optimizer]

CUT: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, **how),
    "maximize": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, maximize=True, **how),
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, **how),
    "nesterov": lambda p, **how: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, **how),
}

WHOLE: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
if hasattr(torch.optim, "Adafactor"):  # PyTorch 2.5
    WHOLE["adafactor"] = lambda p: torch.optim.Adafactor(p, lr=1e-2)


def opened(faults: dict[str, int] | None = None, **settings: Any) -> Offload:
    """An engine over a file."""
    given = {"file_bytes": 64 << 20, "directory": tempfile.gettempdir(), **settings}
    return Offload(OffloadSettings(torch.device("cpu"), **given), faults)


def with_small_ones(patch: pytest.MonkeyPatch) -> None:
    """State of the smallest parameters leaves, too."""
    patch.setattr("memscale.optim.offload.state.LEAST_BYTES", 1)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of odd sizes; one is small, and one in another order of dimensions."""
    torch.manual_seed(0)
    shapes = ((150, 401), (77,), (1 << 15,), (3, 13337))
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    picture = torch.randn(8, 16, 17, 18).to(dtype).to(memory_format=torch.channels_last)
    return [*made, nn.Parameter(picture)]


def step(values: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 1) -> None:
    """Steps with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for value in values:
            value.grad = torch.empty_like(value).copy_(torch.randn(value.shape, generator=generator))
        optimizer.step()


def pair(make: Make, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Twice the same parameters and optimizer; the second one's state is offloaded."""
    both = parameters(dtype), parameters(dtype)
    optimizers = [make(values) for values in both]
    assert send(optimizers[1], opened(**settings), PIECE) == ""
    return both, optimizers


def equal(one: Any, other: Any) -> bool:
    """Whether all bits are the same, in lists and dicts of tensors and numbers."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
