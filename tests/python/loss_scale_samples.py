# SPDX-License-Identifier: Apache-2.0
"""Models and loops for FP16 with loss scaling: by hand, and with MemScale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from memscale.techniques.precision import loss_scale, loss_scale_backward
from memscale.techniques.precision.autocast import AutocastAttachment
from memscale.techniques.precision.loss_scale import LossScale
from processors import use_fp16
from zoo.training import same_bits

ROOMY = memscale.Config(memory_budget="4GiB", use_mixed_precision=True, enable_logging=False, exact=True)
SMALLEST = ROOMY.replace(memory_budget=1)
STEPS, BAD = 4, 2
"""Optimizer steps of a run, and the one that overflows."""

INITIAL = 1024.0
"""Scale to begin with, at which the other steps do not."""


@pytest.fixture(autouse=True)
def fp16_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host that computes in FP16 alone; PyTorch computes FP16 on all. No scale outlives its test.

    A module of tests that imports it has it around each of them.
    """
    use_fp16(monkeypatch)
    yield
    for scale in loss_scale.active():
        while scale in loss_scale.active():
            scale.close()
    loss_scale_backward.uninstall()


class Block(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.shared = nn.LayerNorm(16), nn.Linear(16, 16), shared

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.shared(torch.sigmoid(self.shared(self.up(self.norm(x))))))


class Model(nn.Module):
    """A tied head, a projection used twice in each of two blocks, and a weight used in FP32 only."""

    def __init__(self, wrapped_block: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(3))
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.ones(12))
        self.wrapped_block = wrapped_block

    def forward(self, tokens: Tensor, prefix: Tensor | None = None) -> dict[str, Any]:
        x = self.words(tokens)
        if prefix is not None:
            x = x + prefix
        for block in self.blocks:
            x = block(x) if self.wrapped_block is None else self.wrapped_block(block, x)
        self.middle = x
        return {"logits": self.head(x) * self.gain.half(), "hidden": (x, x), "tokens": tokens}


def model_and_optimizer(seed: int = 0, **settings: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model(**settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def tokens(step: int) -> Tensor:
    return torch.randint(12, (24, 6), generator=torch.Generator().manual_seed(step))


class LanguageModel(nn.Module):
    """It computes its loss, from many classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(1024, 16)
        self.blocks = nn.ModuleList(Block(nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 1024)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def tiny_batch(rows: int = 3) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))


def is_from_half(tensor: Tensor) -> bool:
    """Whether FP32 numbers were FP16 ones."""
    return tensor.dtype is torch.float32 and torch.equal(tensor, tensor.half().float())


class Hand:
    """The loop that does it by hand."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL)

    def forward(self, *args: Any) -> dict[str, Any]:
        with torch.autocast("cpu", torch.float16):
            output = self.model(*args)
        hidden = output["hidden"][0].float()
        return {**output, "logits": output["logits"].float(), "hidden": (hidden, hidden)}

    def backward(self, loss: Tensor, **how: Any) -> None:
        self.scaler.scale(loss).backward(**how)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()


class Wrapped:
    """The plain loop, on a model that is wrapped; or has the technique attached, which is faster."""

    def __init__(
        self, model: Model, optimizer: torch.optim.Optimizer, config: memscale.Config | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        if config is None:
            self.loss_scale = LossScale(model, optimizer)
            AutocastAttachment(model, "cpu", torch.float16, scale=self.loss_scale).attach()
        else:
            memscale.wrap(model, config, sample_input=(tokens(0),), optimizer=optimizer)
            assert [step.technique for step in self.executor.plan.steps] == ["autocast"]
            self.loss_scale = self.executor.loss_scale
        self.loss_scale.value = INITIAL

    def forward(self, *args: Any) -> dict[str, Any]:
        return self.model(*args)

    def backward(self, loss: Tensor, **how: Any) -> None:
        loss.backward(**how)

    def unscale(self) -> None:
        """Gradients are true ones already."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def executor(self) -> Executor:
        return memscale.executor_of(self.model)

    @property
    def scale(self) -> float:
        return self.loss_scale.value


Loop = Hand | Wrapped
Body = Callable[[Loop, int], None]


def plain_loss(loop: Loop, step: int) -> Tensor:
    batch = tokens(step)
    logits = loop.forward(batch)["logits"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())
    return loss * 1e6 if step == BAD else loss


def ran(loop: Loop, body: Body) -> list[Any]:
    """Gradients before every step, weights and scale after it."""
    record: list[Any] = []
    for step in range(STEPS):
        body(loop, step)
        loop.unscale()
        if step != BAD:
            record += [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()]
        loop.step()
        record += [p.detach().clone() for p in loop.model.parameters()]
        record.append(torch.tensor(loop.scale))
    return record


def assert_as_by_hand(body: Body, config: memscale.Config | None = None, **settings: Any) -> Wrapped:
    hand = ran(Hand(*model_and_optimizer(**settings)), body)
    loop = Wrapped(*model_and_optimizer(**settings), config)
    mine = ran(loop, body)
    assert hand[-1] == INITIAL / 2, "no step has overflowed, or more than one"
    same = [a is b if a is None or b is None else same_bits(a, b) for a, b in zip(hand, mine, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} differ"
    return loop
