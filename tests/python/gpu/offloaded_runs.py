# SPDX-License-Identifier: Apache-2.0
"""Parameters on a card with offloaded optimizer state or gradients, and the same without, for every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import memscale
from memscale.hardware.detect import detect
from memscale.offload.engine import Offload, OffloadSettings
from memscale.offload.limits import Link
from memscale.optim.offload.attach import send
from memscale.plans.plan import Plan
from memscale.techniques.optimizer.gradient_offload import GradientOffload

PIECE = 1 << 12

Make = Callable[[Any], torch.optim.Optimizer]

TIERS = {
    "pinned": {"pinned_bytes": 96 << 20},
    "pageable": {"host_bytes": 96 << 20},
    "file": {"file_bytes": 96 << 20, "directory": tempfile.gettempdir()},
}


def card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def opened(tier: str = "pinned", **settings: Any) -> Offload:
    """An engine for the card over one tier."""
    return Offload(OffloadSettings(card(), **{"least_bytes": 1, **TIERS[tier], **settings}))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of odd sizes; one is small, and one in another order of dimensions."""
    torch.manual_seed(0)
    shapes = ((150, 401), (77,), (1 << 15,), (3, 13337))
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    made.append(torch.randn(8, 16, 17, 18).to(dtype).to(memory_format=torch.channels_last))
    return [nn.Parameter(value.to(card())) for value in made]


def step(values: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 5, seed: int = 1) -> None:
    """Steps with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for value in values:
            gradient = torch.randn(value.shape, generator=generator).to(value.dtype)
            value.grad = torch.empty_like(value).copy_(gradient)
        optimizer.step()


def pair(make: Make, dtype: torch.dtype = torch.float32, tier: str = "pinned") -> Any:
    """Twice the same parameters and optimizer; the second one's state is offloaded."""
    both = parameters(dtype), parameters(dtype)
    optimizers = [make(values) for values in both]
    assert send(optimizers[1], opened(tier), PIECE) == ""
    return both, optimizers


def equal(one: Any, other: Any) -> bool:
    """Whether all bits are the same, wherever they lie, in lists and dicts of tensors and numbers."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and torch.equal(one.detach().cpu(), other.detach().cpu())
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# ---- training with released gradients ----------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, a frozen and an unused parameter, gradients of several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.first, self.last = nn.Linear(24, 36), nn.Linear(36, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.last.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.last(nn.functional.gelu(self.first(x)))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net().to(card())


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 40, (2, 3, 7), generator=generator).to(card())
    return nn.functional.cross_entropy(model(x[0]).flatten(0, 1), x[1].flatten())


@dataclass(frozen=True)
class Loop:
    """How a model is trained.

    Attributes:
        optimizer: for its parameters.
        before_step: what the loop does to gradients; what it returns is compared.
        accumulate: backwards per step.
        to_none: as `zero_grad` takes it.
        scaled: with a gradient scaler.
        state_offloaded: the optimizer's state is offloaded, too.
    """

    optimizer: Make
    before_step: Callable[[nn.Module], Any] = lambda model: None
    accumulate: int = 1
    to_none: bool = True
    scaled: bool = False
    state_offloaded: bool = False


def trained(model: nn.Module, loop: Loop, steps: int = 5) -> list[Tensor]:
    """Losses, what `before_step` returned, gradients as the loop reads them, weights and state."""
    optimizer = loop.optimizer([value for value in model.parameters() if value.requires_grad])
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2) if loop.scaled else None
    found: list[Tensor] = []
    for number in range(steps):
        for part in range(loop.accumulate):
            loss = loss_of(model, 10 * number + part)
            (loss if scaler is None else scaler.scale(loss)).backward()
            found.append(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        seen = loop.before_step(model)
        found += [seen] if isinstance(seen, Tensor) else []
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        found += [value.grad.clone() for value in model.parameters() if value.grad is not None]
        optimizer.zero_grad(set_to_none=loop.to_none)
    found += [value.detach() for value in model.parameters()]
    return found + [
        value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]


def technique(model: nn.Module, window_bytes: int = 0, tier: str = "pinned") -> GradientOffload:
    """Gradient release for a model: everything leaves, in small pieces."""
    offload = opened(tier, window_bytes=window_bytes)
    link = Link(offload.settings, 1000, 1000, 96 << 20)
    return GradientOffload(model, link, detect(card()), lambda: offload)


# ---- training under a plan ---------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers of one size, and a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()  # type: ignore[no-any-return]


@dataclass
class Run:
    """What a run leaves behind; peaks are the allocator's."""

    found: list[Any] = field(default_factory=list)
    plan: Plan | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int, accumulate: int = 1
) -> Run:
    """Trains a wrapped model, and detaches it: losses, weights and state, the plan and the peaks."""
    made = Run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        for _ in range(accumulate):
            loss = model(x)
            loss.backward()
            made.found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    made.allocated_bytes = torch.cuda.max_memory_allocated()
    made.reserved_bytes = torch.cuda.max_memory_reserved()
    made.plan = memscale.executor_of(model).plan
    memscale.detach(model)
    made.found += [value.detach().cpu() for value in model.parameters()]
    state = optimizer.state_dict()["state"]
    made.found.append([(key, name, _here(state[key][name])) for key in sorted(state) for name in state[key]])
    return made


def _here(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
