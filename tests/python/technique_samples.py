# SPDX-License-Identifier: Apache-2.0
"""Models to attach a technique to by hand, which operations they consist of, and a loop that trains them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.ops.op_facts import facts
from memscale.techniques.base import Attachment
from memscale.techniques.checkpoint.checkpoint_state import Uses
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from zoo import blocks as odd
from zoo.models import Case, mean_square, numbers
from zoo.models import case as zoo_case
from zoo.training import Loop, Run, built, call, seed

WIDTH = 16

Operation = tuple[str, int]
"""Name and ordinal, as selective checkpoints know operations."""


class Transformer(nn.Module):
    """An attention and MLP block with dropout; the projection of the MLP's residual is called twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.shared = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + F.dropout(self.out(mixed.reshape(rows, length, width)), 0.1, self.training)
        hidden = F.gelu(self.up(self.second(x)))
        return x + self.shared(torch.tanh(self.shared(self.down(hidden) * self.scale)))


class CellLoop(nn.Module):
    """An LSTM cell over time: its gates are views of a product that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH))
        outputs = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            outputs.append(self.out(state[0]))
        return x + torch.stack(outputs, 1)


class Model(nn.Module):
    """Blocks between two projections."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


@dataclass(frozen=True)
class Sample:
    """A model and the modules in it that a technique is attached to."""

    case: Case
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.case.name


def _sample(name: str, block: Callable[[], nn.Module], *shape: int) -> Sample:
    width = shape[-1]
    case = Case(name, lambda: Model(block, 2, width), numbers(*shape), mean_square, frozen=("blocks.0",))
    return Sample(case, ("blocks.0", "blocks.1"))


BLOCKS = (
    _sample("transformer", Transformer, 3, 5, WIDTH),
    Sample(zoo_case("gpt2"), ("transformer.h.0", "transformer.h.2")),
    Sample(zoo_case("llama"), ("model.layers.0", "model.layers.1")),
    Sample(zoo_case("convnet"), ("blocks.0", "blocks.2")),
    _sample("cells", CellLoop, 3, 4, WIDTH),
)
"""The blocks that selective checkpoints are made for, and those that they must not stumble over."""

ODD = tuple(
    _sample(name, block, 8, odd.WIDTH)
    for name, block in {
        "custom-function": odd.Custom,
        "in-place-views": odd.InPlaceViews,
        "parametrized": odd.Parametrized,
        "complex": odd.Complex,
        "old-weight-norm": odd.OldWeightNorm,
        "checkpoint-inside": functools.partial(odd.UsesCheckpoint, False),
        "reentrant-checkpoint-inside": functools.partial(odd.UsesCheckpoint, True),
        "python-random": odd.PythonRandom,
    }.items()
)
"""Blocks that do one odd thing each."""


class _Lister(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.every: list[Operation] = []
        self.eligible: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = facts(func)
        operation = info.name, self.counts.get(info.name, 0)
        self.counts[info.name] = operation[1] + 1
        result = func(*args, **(kwargs or {}))
        self.every.append(operation)
        outputs = [value for value in _flat(result) if isinstance(value, Tensor)]
        inputs = {value.untyped_storage()._cdata for value in _flat(args) if isinstance(value, Tensor)}
        fresh = outputs and not any(value.untyped_storage()._cdata in inputs for value in outputs)
        if fresh and not info.is_view and not info.writes and not info.random and info.name != "_to_copy":
            self.eligible.append(operation)
        return result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


@dataclass(frozen=True)
class Listing:
    """The operations of one call: all of them, and those that a plan may keep."""

    every: tuple[Operation, ...]
    eligible: tuple[Operation, ...]


def operations(module: nn.Module, run: Callable[[], object]) -> Listing:
    """What `module`'s forward consists of when `run` calls it (the last call counts)."""
    lister = _Lister()
    original = module.forward

    def listed(*args: Any, **kwargs: Any) -> Any:
        lister.__init__()  # type: ignore[misc]
        with lister:
            return original(*args, **kwargs)

    module.forward = listed
    try:
        run()
    finally:
        del module.forward
    return Listing(tuple(lister.every), tuple(lister.eligible))


@functools.cache
def operations_of(sample: Sample) -> Listing:
    """The operations of a sample's first block."""
    model = built(sample.case)
    CacheSwitch(model).attach()
    return operations(model.get_submodule(sample.paths[0]), lambda: call(model, sample.case.batch(0)))


def subsets(operations: Sequence[Operation], count: int) -> list[frozenset[Operation]]:
    """Random sets, the same every time."""
    source = random.Random(5)
    return [frozenset(source.sample(operations, source.randint(1, len(operations)))) for _ in range(count)]


def selective(model: nn.Module, path: str, kept: frozenset[Operation] = frozenset()) -> CheckpointAttachment:
    """An attachment for a module of a model, as the executor would make it."""
    module = model.get_submodule(path)
    buffers = [(owner, name) for owner in module.modules() for name in owner._buffers]
    return CheckpointAttachment(module, path, buffers, uses=Uses(True, True), kept=kept)


@contextmanager
def attached(*attachments: Attachment) -> Iterator[None]:
    with ExitStack() as stack:
        for attachment in attachments:
            attachment.attach()
            stack.callback(attachment.undo)
        yield


FIVE = Loop()
Attach = Callable[[nn.Module], Sequence[Attachment]]


def train(case: Case, attach: Attach = lambda model: (), loop: Loop = FIVE) -> Run:
    """Trains a case with techniques attached; everything that it computes is in the result."""
    model = built(case, loop)
    run = Run(model=model)
    optimizer = loop.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with attached(CacheSwitch(model), *attach(model)):
        for step in range(loop.steps):
            for part in range(loop.accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                    loss = case.loss(call(model, case.batch(step * loop.accumulate + part)))
                (loss / loop.accumulate).backward()
                run.values[step, "loss", str(part)] = loss.detach().clone()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    run.values[step, "gradient", name] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        run.values[loop.steps, "random", ""] = torch.get_rng_state()
    assert not any("forward" in module.__dict__ for module in model.modules())
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        run.values[loop.steps, "state", name] = value.detach().clone()
    return run


@functools.cache
def plain(case: Case, loop: Loop = FIVE) -> Run:
    """The plain run, computed once."""
    return train(case, loop=loop)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights every time; the generators stand at a known place afterwards."""
    seed()
    model = build().train()
    torch.manual_seed(7)
    return model
