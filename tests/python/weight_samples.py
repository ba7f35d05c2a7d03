# SPDX-License-Identifier: Apache-2.0
"""Small models whose weights are streamed, and loops over them, for tests of every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memscale.weights.blocks import HostBlocks
from memscale.weights.stream import Stream, opened
from memscale.weights.units import units_of

VOCABULARY, WIDTH, ROWS, LENGTH = 40, 24, 3, 7


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


class Block(nn.Module):
    """Attention, which uses a weight of a module that it does not call, and a part that may run twice."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.again = again

    def wide(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.again is None or not torch.is_grad_enabled():
            return x + self.wide(x)
        return x + checkpoint(self.wide, x, use_reentrant=self.again)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Tied, frozen and unused weights, and one of the model's own."""

    def __init__(self, again: bool | None = None, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(again) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].down.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Keeping(torch.autograd.Function):
    """Keeps a view of a weight past autograd's eyes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.turned = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.turned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.turned.t(), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Odd(nn.Module):
    """A square layer that uses its weight in an odd way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.turned: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.way == "kept by a function":
            return Keeping.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]
        if self.way == "view cached":
            if self.turned is None:
                self.turned = self.weight.detach().t()
            return x @ self.turned + F.linear(x, self.weight)
        if self.way == "written":
            with torch.no_grad():
                self.weight.mul_(0.99)
            return F.linear(x, self.weight)
        if self.way == "given new data":
            self.weight.__setattr__("da" + "ta", self.weight.detach() * 0.99)
            return F.linear(x, self.weight)
        if self.way == "without its module":
            return F.linear(x, self.inner.weight) + F.linear(x, self.weight.t(), self.inner.bias)
        if self.way == "conjugate":
            turned = torch.view_as_complex(self.weight.view(WIDTH, WIDTH // 2, 2)).conj()
            return x * torch.view_as_real(turned * turned.exp()).reshape(WIDTH, WIDTH).mean(0)
        assert self.way == "saved as it is"
        return x * self.weight.mean(0) + x * self.weight[0] + x.exp() * 1e-3


class PastVersions(Odd):
    """Writes to its weight where nobody counts it."""

    def forward(self, x: Tensor) -> Tensor:
        self.shrink()
        return super().forward(x)

    def shrink(self) -> None:
        self.weight.data.mul_(0.99)


def shrink_all(module: nn.Module, *unused: object) -> None:
    """A hook, or what a forward calls: writes to weights where nobody counts it."""
    for value in module.parameters():
        value.data.mul_(0.99)


class Helped(Odd):
    """Has somebody else do it."""

    def forward(self, x: Tensor) -> Tensor:
        shrink_all(self)
        return super().forward(x)


def odd_stack(way: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[Odd(way) for _ in range(4)])


class Recurrent(nn.Module):
    """Rows of states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Convolutions(nn.Module):
    """Weights in another order of memory, statistics, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 3 * 8 * 8)
        parts = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU()) for _ in range(3)]
        self.parts = nn.Sequential(*parts)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).view(-1, 3, 8, 8)
        return self.parts[0](self.parts(x))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
    return nn.Sequential(embed, *[Adapted() for _ in range(3)])


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def loss_of(model: nn.Module, number: int) -> Tensor:
    output = model(batch(number))
    return output.float().pow(2).mean() if isinstance(output, Tensor) else output.loss


@contextmanager
def streamed(
    model: nn.Module,
    least_bytes: int = 1,
    window: int | None = None,
    blocks: Callable[[str], HostBlocks] = HostBlocks,
) -> Iterator[Stream]:
    """Streams all that can be inside the block, and sees that nothing is left of it afterwards."""
    before = [(name, value, value.stride()) for name, value in model.named_parameters()]
    units, _ = units_of(model, least_bytes)
    with tempfile.TemporaryDirectory() as folder:
        stream = opened(model, blocks(folder))
        for unit in units:
            stream.add(unit)
        if window is not None:
            stream.window.most_bytes = window
        yield stream
        for path in list(stream.units):
            stream.remove(path)
    after = [(name, value, value.stride()) for name, value in model.named_parameters()]
    assert all(one[1] is other[1] and one[2] == other[2] for one, other in zip(before, after, strict=True))
    assert not [path for path, module in model.named_modules() if "forward" in vars(module)]


@dataclass(frozen=True)
class Loop:
    """How a model is trained.

    Attributes:
        optimizer: for its parameters.
        accumulate: backwards per step.
        forwards: before each backward.
        before_step: done to the model when gradients are complete; what it returns is compared.
        between: done between forward and backward.
        after_step: done to the model between steps.
        around: a context for forwards.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: int = 1
    forwards: int = 1
    before_step: Callable[[nn.Module], Any] = lambda model: None
    between: Callable[[nn.Module], Any] = lambda model: None
    after_step: Callable[[nn.Module], Any] = lambda model: None
    around: Callable[[], Any] = torch.enable_grad
    steps: int = 4


def trained(model: nn.Module, loop: Loop = Loop()) -> list[Tensor]:
    """Losses, gradients, what the loop has seen, and at last weights and state."""
    optimizer = loop.optimizer([value for value in model.parameters() if value.requires_grad])
    torch.manual_seed(7)
    found: list[Tensor] = []
    for step in range(loop.steps):
        for part in range(loop.accumulate):
            with loop.around():
                losses = [loss_of(model, 100 * step + 10 * part + i) for i in range(loop.forwards)]
            loop.between(model)
            loss = torch.stack(losses).sum()
            loss.backward()
            found.append(loss.detach())
            del loss, losses
        seen = loop.before_step(model)
        found += [seen] if isinstance(seen, Tensor) else []
        found += [value.grad.clone() for value in model.parameters() if value.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen = loop.after_step(model)
        found += [seen] if isinstance(seen, Tensor) else []
    found += [value.detach().clone() for value in [*model.parameters(), *model.buffers()]]
    return found + [
        value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Every bit."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )
