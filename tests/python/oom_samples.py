# SPDX-License-Identifier: Apache-2.0
"""Models and loops for tests of running out of memory, and ways to make an allocation fail."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from memscale.errors import MemScaleError
from memscale.offload.engine import Offload, OffloadSettings
from memscale.optim.offload.attach import send
from zoo.models import case, own_loss

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
        if func.namespace == "profiler":  # a mark, which takes no memory
            return func(*args, **(kwargs or {}))
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
    """A model, its batches and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor] = own_loss


SAMPLES = {
    "dense": Sample(dense, lambda: torch.randn(8, 16)),
    "images": Sample(images, lambda: torch.randn(4, 3, 8, 8)),
    "words": Sample(TiedWords, lambda: torch.randint(40, (3, 7))),
    "recurrent": Sample(recurrent, lambda: torch.randn(3, 5, 16)),
}


def library_sample(name: str) -> Sample:
    """A case of the zoo, with the same batch each time."""
    found = case(name)
    return Sample(found.build, lambda: found.batch(0), found.loss)


LIBRARY = ("gpt2", "bert", "llama", "t5", "vit", "convnet", "lstm", "mixtral", "gru")
"""Of the zoo, for the benchmark."""


@dataclass(frozen=True)
class Stepper:
    """An optimizer, and how it is had.

    Attributes:
        make: makes it from weights.
        fields: of the configuration, without which it would be another one.
        prepare: is given it when the model is wrapped.
    """

    make: Callable[[list[Any]], torch.optim.Optimizer]
    fields: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[torch.optim.Optimizer], object] | None = None


def _in_a_file(optimizer: torch.optim.Optimizer) -> None:
    """Its state lies in a file between steps."""
    settings = OffloadSettings(torch.device("cpu"), file_bytes=1 << 30, directory=tempfile.gettempdir())
    assert not send(optimizer, Offload(settings))


def _adamw(**options: Any) -> Callable[[list[Any]], torch.optim.Optimizer]:
    return lambda weights: torch.optim.AdamW(weights, lr=1e-2, **options)


STEPPERS = {
    "adamw": Stepper(_adamw(foreach=False)),
    "foreach": Stepper(_adamw(foreach=True)),
    "fused": Stepper(_adamw(fused=True)),
    "sgd": Stepper(lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9)),
    "8 bits": Stepper(_adamw(), {"use_8bit_optimizer": True}),
    "state in a file": Stepper(_adamw(), {}, _in_a_file),
    "step in backward": Stepper(_adamw(), {"step_in_backward": True}),
}


@dataclass
class Ran:
    """What a loop has left.

    Attributes:
        tensors: parameters, buffers, optimizer state, gradients, the generator's state, losses.
        count: operations seen in what may fail.
        recoveries: steps that were repeated.
        model: the model.
        is_loud: an optimizer's step has failed half-way, and the next forward has said so.
    """

    tensors: list[Tensor]
    count: int
    recoveries: int
    model: nn.Module
    is_loud: bool = False

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
    part: str = "passes",
    **fields: Any,
) -> Ran:
    """Trains for some steps; a part of one runs under `failing`.

    Args:
        sample: model and batches.
        failing: makes operations fail; None: none does.
        accumulate: batches of one step.
        precision: "fp32", "bf16" for autocast, or "scaler" for `GradScaler` around FP32.
        optimizer: of `STEPPERS`.
        steps: of the loop; the last but one fails.
        part: "passes" for forward and backward, "step" for the optimizer's.
        **fields: of the configuration; without any the model is plain.
    """
    torch.manual_seed(0)
    model, kind = sample.make(), STEPPERS[optimizer]
    stepper = kind.make(list(model.parameters()))
    if fields:
        memscale.wrap(model, optimizer=stepper, enable_logging=False, **kind.fields, **fields)
        if kind.prepare is not None:
            kind.prepare(stepper)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "scaler", init_scale=8.0)
    torch.manual_seed(1)
    losses: list[Tensor] = []
    is_loud = False
    for step in range(steps):
        fails = failing if step == steps - 2 else None
        stepper.zero_grad()
        for _ in range(accumulate):
            batch = sample.batch()
            with fails if fails is not None and part == "passes" else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = sample.loss(_called(model, batch))
                scaled = scaler.scale(loss) if precision == "scaler" else loss
                scaled.backward()
            losses.append(loss.detach())
        try:
            with fails if fails is not None and part == "step" else nullcontext():
                scaler.step(stepper)
        except RuntimeError:
            is_loud = _next_forward_raises(model, batch)
            if is_loud:
                break
            raise
        scaler.update()
    executor: Any = memscale.executor_of(model)
    entries = stepper.state_dict()["state"].values()  # `state` lacks what is offloaded
    state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    tensors = [*model.parameters(), *model.buffers(), *state, *gradients, torch.get_rng_state(), *losses]
    return Ran(
        [tensor.detach().clone() for tensor in tensors],
        getattr(failing, "count", 0),
        0 if executor is None else executor.oom.recoveries,
        model,
        is_loud,
    )


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _next_forward_raises(model: nn.Module, batch: Any) -> bool:
    """Whether the model refuses to go on from half a step."""
    try:
        _called(model, batch)
    except MemScaleError:
        return True
    return False


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
