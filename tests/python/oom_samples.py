# SPDX-License-Identifier: Apache-2.0
"""Models and loops for tests of running out of memory, and ways to make an allocation fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memscale

HOST_TEXT = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"  # noqa: E501


class FailingAt(TorchDispatchMode):
    """Has operations fail for lack of memory.

    Args:
        at: numbers of the operations, from 1.
    """

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.count = set(at), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.at:
            raise RuntimeError(HOST_TEXT.format(1 << 20))
        return func(*args, **(kwargs or {}))


class WithLoss(nn.Module):
    """A model whose forward ends in its loss, as those of transformers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares."""
        out: Tensor = self.body(x)
        return (out**2).mean()


class TiedWords(nn.Module):
    """Words, a norm, attention, and logits by the words' own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        logits = self.head(self.layer(self.words(x)))
        return functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def dense() -> nn.Module:
    """Batch norms and dropout."""
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)]
    return WithLoss(
        nn.Sequential(*layers, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
    )


def images() -> nn.Module:
    """Convolutions."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return WithLoss(nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten()))


def recurrent() -> nn.Module:
    """Two layers of GRU with dropout between them."""
    return WithLoss(_First(nn.GRU(16, 16, 2, dropout=0.2, batch_first=True)))


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


@dataclass(frozen=True)
class Sample:
    """A model and its batches."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


SAMPLES = {
    "dense": Sample(dense, lambda: torch.randn(8, 16)),
    "images": Sample(images, lambda: torch.randn(4, 3, 8, 8)),
    "words": Sample(TiedWords, lambda: torch.randint(40, (3, 7))),
    "recurrent": Sample(recurrent, lambda: torch.randn(3, 5, 16)),
}

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "foreach": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
}


@dataclass
class Ran:
    """What a loop has left.

    Attributes:
        tensors: parameters, buffers, optimizer state, gradients, the generator's state, losses.
        count: operations seen in the steps that may fail.
        recoveries: steps that were repeated.
        model: the model.
    """

    tensors: list[Tensor]
    count: int
    recoveries: int
    model: nn.Module

    def equals(self, other: Ran) -> bool:
        """Whether every bit is the same."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def run(
    sample: Sample,
    failing: TorchDispatchMode | None = None,
    accumulate: int = 1,
    precision: str = "fp32",
    optimizer: str = "adamw",
    steps: int = 3,
    **fields: Any,
) -> Ran:
    """Trains for some steps; forward and backward of the second one run under `failing`.

    Args:
        sample: model and batches.
        failing: makes operations fail; None: none does.
        accumulate: batches of one step.
        precision: "fp32", "bf16" for autocast, or "scaler" for `GradScaler` around FP32.
        optimizer: of `OPTIMIZERS`.
        steps: of the loop.
        **fields: of the configuration; without any the model is plain.
    """
    torch.manual_seed(0)
    model = sample.make()
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    if fields:
        memscale.wrap(model, optimizer=stepper, enable_logging=False, **fields)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "scaler", init_scale=8.0)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        stepper.zero_grad()
        for _ in range(accumulate):
            x = sample.batch()
            with failing if failing is not None and step == 1 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = model(x)
                if precision == "scaler":
                    scaled = scaler.scale(loss)
                scaled = loss if precision != "scaler" else scaled
                scaled.backward()
            losses.append(loss.detach())
        scaler.step(stepper)
        scaler.update()
    executor: Any = model.__dict__.get("_memscale_executor")
    state = [
        value for entry in stepper.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    tensors = [*model.parameters(), *model.buffers(), *state, *gradients, torch.get_rng_state(), *losses]
    return Ran(
        [tensor.detach().clone() for tensor in tensors],
        getattr(failing, "count", 0),
        0 if executor is None else executor.oom.recoveries,
        model,
    )


@contextmanager
def few_file_bytes(limit: int) -> Iterator[None]:
    """Private memory of this process is limited for a block.

    Args:
        limit: bytes above what it has now.
    """
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        now = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
