# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks that do one odd thing each. Around the block everything is ordinary."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zoo.models import Case, generator, mean_square, numbers

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
        hidden.narrow(1, WIDTH, 8).relu_()
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
    def forward(self, x: Tensor, *, scale: float, parts: dict[str, Any], name: str, kind: torch.dtype) -> Tensor:  # type: ignore[override]
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
            x = block(x, scale=scale, parts={"bias": (self.bias, 3), "seen": seen}, name=str(number), kind=torch.float32)
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


class Statistic(Block):
    """Keeps a running statistic: in place, by rebinding, as a plain attribute, in a dictionary."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.plain = torch.zeros(WIDTH)
        self.held = {"mean": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        new = 0.1 * x.detach().mean(0)
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(new)
        elif self.kind == "rebound":
            self.mean = 0.9 * self.mean + new
        elif self.kind == "plain":
            self.plain.mul_(0.9).add_(new)
        else:
            self.held["mean"].mul_(0.9).add_(new)
        return super().forward(x + self.mean + self.plain + self.held["mean"])


class WrittenByParent(Stack):
    """A buffer that blocks read and the model changes after they ran."""

    def __init__(self) -> None:
        super().__init__(functools.partial(Statistic, "buffer"))
        self.register_buffer("scale", torch.ones(()))
        for block in self.blocks:
            block.kind, block.mean = "read", self.mean_of(block)

    @staticmethod
    def mean_of(block: nn.Module) -> Tensor:
        return block.get_buffer("mean")

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        for block in self.blocks:
            block.mean.add_(0.5)
        return out


class _Counter:
    number = 0


class Counting(Block):
    """Counts its calls, and computes with the count: a second run would compute something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.number, self.object = 0, _Counter()
        self.counter: collections.Counter[str] = collections.Counter(before=2)
        self.nested: dict[str, list[int]] = {"calls": []}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "number":
            self.number += 1
        elif self.kind == "object":
            self.object.number += 1
        elif self.kind == "counter":
            self.counter["now"] += self.counter["before"]
        else:
            self.nested["calls"].append(1)
        calls = self.number + self.object.number + self.counter["now"] + len(self.nested["calls"])
        return super().forward(x) * (1 + 0.1 * calls)


class OwnGenerator(Block):
    """Draws from generators of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import numpy

        self.kind = kind
        self.torch_rng = torch.Generator().manual_seed(1)
        self.numpy_rng, self.python_rng = numpy.random.default_rng(1), random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return super().forward(x * torch.rand(x.shape, generator=self.torch_rng))
        drawn = self.numpy_rng.random() if self.kind == "numpy" else self.python_rng.random()
        return super().forward(x * (1 + float(drawn)))


class ChangesBatch(nn.Module):
    """Changes the batch that it is given."""

    def __init__(self, look: bool) -> None:
        super().__init__()
        self.look = look
        self.embedding, self.stack = nn.Embedding(64, WIDTH), Stack()

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        ids.add_(1)
        x.mul_(2)
        if self.look and float(x.sum()) > 1e9:
            return x
        return self.stack(self.embedding(ids) + x)


def ids(step: int) -> tuple[Tensor]:
    return (torch.randint(0, 60, (8, 32), generator=generator(step)),)


def _case(name: str, build: Callable[[], nn.Module], **settings: Any) -> Case:
    settings.setdefault("batch", inputs)
    settings.setdefault("loss", lambda out: out["loss"] if isinstance(out, dict) else mean_square(out))
    return Case(name, build, profile=settings.pop("profile", None), **settings)


ODD = (
    _case("dropout", lambda: Stack(functools.partial(Block, 0.2)), profile="static"),
    _case("autograd-function", lambda: Stack(Custom)),
    _case("in-place-and-views", lambda: Stack(InPlaceViews)),
    _case("changes-its-input", lambda: Stack(ChangesItsInput), checkpoints=False),
    _case("in-place-residual", InPlaceResidual, checkpoints=False),
    _case("shared-three-times", Shared),
    _case("data-dependent", DataDependent, profile="empirical"),
    _case("structured-outputs", Structured),
    _case("keywords", TakesKeywords, checkpoints=False),
    _case("parametrizations", lambda: Stack(Parametrized)),
    _case("old-weight-norm", lambda: Stack(OldWeightNorm), checkpoints=False),
    _case("layer-drop", LayerDrop, checkpoints=False),
    _case("python-random", lambda: Stack(PythonRandom)),
    _case("checkpoint-inside", lambda: Stack(lambda: UsesCheckpoint(False)), checkpoints=False),
    _case("checkpoint-inside-reentrant", lambda: Stack(lambda: UsesCheckpoint(True)), checkpoints=False),
    _case("checkpoint-outside", lambda: InsideCheckpoint(False), checkpoints=False),
    _case("checkpoint-outside-reentrant", lambda: InsideCheckpoint(True), checkpoints=False),
    _case("complex", lambda: Stack(Complex)),
    *(_case(f"statistic-{kind}", lambda kind=kind: Stack(lambda: Statistic(kind)), checkpoints=False)
      for kind in ("buffer", "rebound", "plain", "held")),
    _case("buffer-written-by-parent", WrittenByParent, checkpoints=False),
    *(_case(f"counts-in-{kind}", lambda kind=kind: Stack(lambda: Counting(kind)), checkpoints=False)
      for kind in ("number", "object", "counter", "nested")),
    *(_case(f"own-generator-{kind}", lambda kind=kind: Stack(lambda: OwnGenerator(kind)), checkpoints=False)
      for kind in ("torch", "numpy", "python")),
    _case("changes-its-batch", lambda: ChangesBatch(False), batch=lambda step: (*ids(step), *numbers(8, 32, WIDTH)(step)),
          checkpoints=False),
    _case("changes-its-batch-and-looks", lambda: ChangesBatch(True),
          batch=lambda step: (*ids(step), *numbers(8, 32, WIDTH)(step)), checkpoints=False),
)  # fmt: skip

LAZY = _case("lazy", Lazy)
SPARSE = _case("sparse-gradients", Sparse, batch=ids, checkpoints=True)
