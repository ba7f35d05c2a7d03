# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests of `memscale.autotuning`, and everything that a loop's state is."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import memscale
from memscale.autotuning import AutoTuner, TuningResult

WIDTH, WORDS = 64, 100


class Words(nn.Module):
    """Embedding, blocks, head; the loss inside."""

    def __init__(self, blocks: int = 3, hidden_bytes: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.hidden_bytes = hidden_bytes

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        if self.hidden_bytes and not isinstance(hidden, FakeTensor):  # memory that no trace can see
            torch.ones(self.hidden_bytes, dtype=torch.uint8)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Pictures(nn.Module):
    """A convolution with batch normalisation; one tensor in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).square().mean()


class Counting(torch.optim.SGD):
    """Its steps change a tensor among its settings, as Prodigy's do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, momentum=0.9)
        self.param_groups[0]["d"] = torch.ones(3)

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["d"] += 1
        return super().step(closure)


def words(batch: int, sequence: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (batch, sequence))
    return {"input_ids": ids, "labels": ids}


def pictures(batch: int) -> Tensor:
    return torch.randn(batch, 3, 16, 16)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**words(4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a loop would go on from, copied."""
    return {
        "weights": [value.detach().clone() for value in model.state_dict().values()],
        "gradients": [None if value.grad is None else value.grad.clone() for value in model.parameters()],
        "state": [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in own.items()}
            for own in optimizer.state.values()
        ],
        "groups": [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ],
        "attributes": {name for name in vars(optimizer)} | {("step", str(vars(optimizer).get("step")))},
        "flags": [module.training for module in model.modules()],
        "modules": [set(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


def objects_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Who they are: another tensor with the same bits would be one that a graph or a list does not know."""
    found = [value for value in model.parameters()]
    found += [value.grad for value in model.parameters() if value.grad is not None]
    found += [
        value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)
    ]
    hooks = [vars(optimizer)[name] for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    addresses = [value.data_ptr() for value in model.parameters()]
    return [*(id(value) for value in found), *addresses, *map(id, [*hooks, optimizer.state])]


def assert_same(before: Any, after: Any, where: str = "") -> None:
    if isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for name in before:
            assert_same(before[name], after[name], f"{where}/{name}")
    elif isinstance(before, list):
        assert len(before) == len(after), where
        for index, (first, second) in enumerate(zip(before, after, strict=True)):
            assert_same(first, second, f"{where}/{index}")
    else:
        assert before == after, where


def tuned(model: nn.Module, optimizer: Any, budget: int | str, total: int = 8, **more: Any) -> TuningResult:
    """What the tuner finds for a model of words."""
    return AutoTuner(
        model, optimizer, words, total, sequence=32, memory_budget=budget, enable_logging=False, **more
    ).tune()


def plain_peak(model: nn.Module, optimizer: Any, batch: int) -> int:
    """Of a step of words, as predicted."""
    return memscale.predict(model, optimizer, sample_input=words(batch)).plain.device_used_peak_bytes
