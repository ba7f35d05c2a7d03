# SPDX-License-Identifier: Apache-2.0
"""The training loop that every way runs: same weights, same batches, same random numbers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memscale.benchmarks.job import Job
from memscale.benchmarks.registry import Shape, build
from memscale.core.wrapping import executor_of

__all__ = ["LEARNING_RATE", "Batch", "Loop", "Run", "batches", "fresh_model"]

Batch = dict[str, Tensor]

LEARNING_RATE = 1e-4
_BATCHES = 4
"""Different batches, in turn: few enough that a model learns them within twenty steps."""

_WEIGHTS, _DATA, _DROPOUT = 0, 1, 2
"""Seeds."""


@dataclass
class Loop:
    """What is trained, and the calls that a way changes.

    Attributes:
        model: called with a batch.
        optimizer: its optimizer.
        around: in force during forward.
        forward: a batch's loss.
        backward: of that loss.
        update: the optimizer's step, and no gradients afterwards.
        autocast: whether the loop's own autocast is on, where the job asks for BF16.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Callable[[Batch], Tensor] | None = None
    backward: Callable[[Tensor], object] = Tensor.backward
    update: Callable[[], object] | None = None
    autocast: bool = True

    @property
    def plan(self) -> Any:
        """MemScale's, or None."""
        executor = executor_of(self.model)
        return None if executor is None else executor.plan


def fresh_model(job: Job) -> nn.Module:
    """The job's model, with the weights that every way begins with, in training mode."""
    torch.manual_seed(_WEIGHTS)
    with torch.device(job.device):
        return build(job.shape).train()


def batches(shape: Shape, device: str) -> list[Batch]:
    """The data: words whose frequency falls with their number, as in text. A masked word is to be found."""
    generator = torch.Generator().manual_seed(_DATA)
    size = (shape.batch, shape.length)
    made = []
    for _ in range(_BATCHES):
        words = ((shape.words + 1) ** torch.rand(size, generator=generator)).long().clamp_(1, shape.words) - 1
        batch = {"input_ids": words, "labels": words}
        if shape.kind == "bert":
            masked = torch.rand(size, generator=generator) < 0.15
            masked[:, 0] = True
            batch = {"input_ids": words.masked_fill(masked, 0), "labels": words.masked_fill(~masked, -100)}
        made.append({name: value.to(device) for name, value in batch.items()})
    return made


@dataclass
class Run:
    """A loop that steps.

    Attributes:
        job: what is measured.
        loop: what trains.
        data: its batches.
        losses: of the steps so far.
        seconds: of the steps so far.
    """

    job: Job
    loop: Loop
    data: list[Batch]
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """The loss, and the output that has it, which a loop's variable holds until the step is over."""
        kind = "cuda" if self.job.device == "cuda" else "cpu"
        half = self.job.precision == "bf16-amp" and self.loop.autocast
        under = torch.autocast(kind, torch.bfloat16, enabled=half)
        with under, self.loop.around():
            if self.loop.forward is not None:
                return self.loop.forward(batch), None
            output = self.loop.model(**batch)
            return output.loss, output

    def train(self, steps: int) -> None:
        """So many training steps."""
        if not self.losses:
            torch.manual_seed(_DROPOUT)
        for _ in range(steps):
            self._wait()
            began = time.perf_counter()
            loss, output = self.forward(self.data[len(self.losses) % len(self.data)])
            self.loop.backward(loss)
            if self.loop.update is not None:
                self.loop.update()
            else:
                self.loop.optimizer.step()
                self.loop.optimizer.zero_grad()
            self.losses.append(loss.detach())
            del loss, output
            self._wait()
            self.seconds.append(time.perf_counter() - began)

    def gradient_digest(self) -> str:
        """Of all bits of all gradients of a step that is not taken; "" where a loop does not show them."""
        if self.loop.update is not None:
            return ""
        torch.manual_seed(_DROPOUT)
        loss, output = self.forward(self.data[0])
        self.loop.backward(loss)
        del loss, output
        digest, shown = hashlib.sha256(), False
        for name, parameter in self.loop.model.named_parameters():
            digest.update(name.encode())
            if parameter.grad is not None:
                value = parameter.grad.detach().to("cpu", copy=True).flatten()
                digest.update(value.view(torch.uint8).numpy().tobytes())
                shown = True
        self.loop.optimizer.zero_grad()
        return digest.hexdigest()[:16] if shown else ""

    def _wait(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()
