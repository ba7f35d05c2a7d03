# SPDX-License-Identifier: Apache-2.0
"""A small model whose saved tensors are large enough to leave, and what whole runs of it are watched with."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.offload.engine import Offload

WIDTH = 64


class Block(nn.Module):
    """An MLP whose dropout must drop the same again."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Network(nn.Module):
    """A row of blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(count: int = 8, length: int = 512) -> Tensor:
    """A saved tensor is 1 MiB of it, or 4."""
    return torch.randn(count, length, WIDTH)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """With the same random numbers every time."""
    torch.manual_seed(3)
    loss: Tensor = model(x).square().mean()
    return loss


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients of a step."""
    model.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of all of them."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Every bit."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def config(folder: Path, budget: int | None = None, checkpoints: bool = False, **more: Any) -> Config:
    """Offload to a file in a folder, its invariants checked."""
    return Config(
        memory_budget=budget,
        enable_checkpointing=checkpoints,
        enable_logging=False,
        async_config=AsyncOffloadConfig(tiers=("file",), directory=str(folder), debug=True),
        **more,
    )


_WHOLE: dict[tuple[int, torch.Size], int] = {}


def whole_bytes(model: nn.Module, x: Tensor) -> int:
    """Predicted peak of a network's plain step."""
    key = sum(1 for _ in model.parameters()), x.shape
    if key not in _WHOLE:
        _WHOLE[key] = memscale.plan(model, sample_input=x).plain.device_used_peak_bytes
    return _WHOLE[key]


def wrapped(model: nn.Module, x: Tensor, folder: Path, percent: int = 65, **more: Any) -> nn.Module:
    """The model, under a budget that only offload meets."""
    budget = whole_bytes(model, x) * percent // 100
    memscale.wrap(model, config(folder, budget, **more), sample_input=x)
    plan = memscale.executor_of(model).plan
    assert plan is not None and plan.fits and any(choice.offloads for choice in plan.choices)
    return model


def engine_of(model: nn.Module) -> Offload:
    """The engine of a wrapped model's plan."""
    engine = memscale.executor_of(model).in_force.offload
    assert engine is not None
    return engine


def is_empty(engine: Offload) -> bool:
    """Nothing is offloaded, and no source waits."""
    gc.collect()
    counters = engine.counters()
    held = [value for name, value in counters.items() if name.startswith("held_bytes")]
    return counters["block_count"] == counters["source_bytes"] == 0 and not any(held)


def files_in(folder: Path) -> list[int]:
    """Descriptors of this process that lead to a file in a folder, whether or not it has a name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"{folder}/"):
                found.append(int(link.name))
        except OSError:  # that of the listing itself
            continue
    return found
