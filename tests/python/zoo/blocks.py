# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks that do one odd thing each. Around the block everything is ordinary."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zoo.models import mean_square, numbers

WIDTH = 32
ROWS = 256

inputs = numbers(ROWS, WIDTH)


class Block(nn.Module):
    """A residual MLP, whose hidden activations are what a checkpoint frees."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class _Cube(torch.autograd.Function):
    """Saves one tensor the proper way, and keeps another on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x * ctx.factor, None


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _Cube.apply(self.norm(x), 0.01)  # type: ignore[no-untyped-call]


class InPlaceViews(Block):
    """In-place operations on its own tensors, and on views of them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden[:, :WIDTH].mul_(2)
        hidden.narrow(1, WIDTH, 8).neg_()
        hidden[:, ::3].add_(1)
        return x + self.down(torch.tanh_(hidden.clone())) * hidden.view(-1, 3, WIDTH).transpose(1, 2).sum(-1)


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.01)
        return super().forward(x)


class InPlaceResidual(Stack):
    """The blocks' input is overwritten after they ran. Plain PyTorch allows it, as they do not save it."""

    def __init__(self) -> None:
        super().__init__(_Sine)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x += block(x)
        return x


class _Sine(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.sin(x * 2.0 + 1))))


class Shared(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))


class DataDependent(Stack):
    """Goes another way depending on what was computed."""

    def __init__(self) -> None:
        super().__init__(functools.partial(Block, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if float(x.detach().mean()) > -100.0 else x
        return x


@dataclass
class Out:
    hidden: Tensor
    norm: Tensor
    notes: list[str]


class ReturnsDataclass(Block):
    def forward(self, x: Tensor) -> Out:  # type: ignore[override]
        y = super().forward(x)
        return Out(y, y.norm(dim=-1), ["kept"])


class ReturnsDict(Block):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x)
        return {"hidden": y, "more": (y.sum(), [y * 2, None])}


class Structured(Stack):
    """Blocks that return a dataclass and a dictionary; the model returns a transformers output."""

    def __init__(self) -> None:
        super().__init__(ReturnsDataclass)
        self.others = nn.ModuleList(ReturnsDict() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        total = x.new_zeros(())
        for block in self.blocks:
            out = block(x)
            assert out.notes == ["kept"]
            x, total = out.hidden, total + out.norm.mean()
        for block in self.others:
            out = block(x)
            x, total = out["hidden"], total + out["more"][0] * 1e-3 + out["more"][1][0].mean()
        return CausalLMOutput(loss=mean_square(x) + total, logits=x)


class Keywords(Block):
    def forward(
        self, x: Tensor, *, scale: float, parts: dict[str, Any], name: str, kind: torch.dtype
    ) -> Tensor:  # type: ignore[override]
        parts["seen"].append(name)
        y = super().forward(x).to(kind) * scale
        return y + parts["bias"][0]


class TakesKeywords(Stack):
    """Keyword arguments, nested containers, things that are no tensors, and a list that blocks append to."""

    def __init__(self) -> None:
        super().__init__(Keywords)
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        seen: list[str] = []
        for number, block in enumerate(self.blocks):
            x = block(
                x,
                scale=scale,
                parts={"bias": (self.bias, 3), "seen": seen},
                name=str(number),
                kind=torch.float32,
            )
        assert len(seen) == len(self.blocks)
        return x


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.up = parametrizations.spectral_norm(self.up)
        self.down = parametrizations.weight_norm(self.down)


class OldWeightNorm(Block):
    """The hooks that preceded parametrizations; they store a computed tensor on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.utils.weight_norm(self.up)


class LayerDrop(Stack):
    """Leaves blocks out at random, by Python's, NumPy's and PyTorch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        import numpy

        for block in self.blocks:
            if random.random() > 0.2 and numpy.random.random() > 0.1 and torch.rand(()) > 0.1:
                x = block(x)
        return x


class PythonRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        import numpy

        return super().forward(x * (1 + random.random()) * (1 + float(numpy.random.random())))


class UsesCheckpoint(Block):
    """Calls PyTorch's own checkpoint inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(0.1)
        self.reentrant = reentrant
        self.inner = Block(0.1)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        result = checkpoint(self.inner, super().forward(x), use_reentrant=self.reentrant)
        assert isinstance(result, Tensor)
        return result


class InsideCheckpoint(Stack):
    """Runs whole blocks inside PyTorch's own checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(functools.partial(Block, 0.1))
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Complex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.fft.irfft(torch.fft.rfft(self.norm(x)) * (1 + 2j), n=WIDTH)


class NoisySlope(Block):
    """Ends with an operation whose noise is saved before it is drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(super().forward(x), training=self.training)


class Vectorized(Block):
    """Calls modules under `vmap`, where a tensor has no storage."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.vmap(self.up)(self.norm(x))
        return x + self.down(F.gelu(hidden))


class Scripted(Block):
    """Has a part whose registries are TorchScript's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.jit.script(self.up)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.stack = nn.Embedding(64, WIDTH, sparse=True), Stack()

    def forward(self, ids: Tensor) -> Tensor:
        result = self.stack(self.embedding(ids))
        assert isinstance(result, Tensor)
        return result


class Lazy(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.LazyLinear(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.drop(self.first(x)))
