# SPDX-License-Identifier: Apache-2.0
"""Small trainings with released gradients, and the same without, for tests of every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memscale.hardware.detect import detect
from memscale.offload.engine import Offload, OffloadSettings
from memscale.offload.limits import Link
from memscale.optim.release.gradient import ReleasedGradient
from memscale.optim.release.window import ReleaseWindow
from memscale.techniques.optimizer.gradient_offload import GradientOffload

PIECE = 128
"""Elements of a block where one gradient is looked at."""

LARGER_PIECE = 512
"""And where a model is trained."""

SETTINGS = OffloadSettings(
    torch.device("cpu"), host_bytes=32 << 20, least_bytes=1, window_bytes=0, debug=True, trace_count=0
)
LATE = {"fault_seed": 5, "fault_delay_most_ns": 300_000, "fault_split_ppm": 500_000}
"""Copies that begin late, come in two parts, and overtake each other."""

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied weights, a frozen and an unused parameter, gradients of all forms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.first, self.last = nn.Linear(24, 36), nn.Linear(36, 24)
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.last.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.last(nn.functional.gelu(self.first(x)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 40, (3, 7), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    logits = model(batch(number))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch(number + 1000).flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@dataclass(frozen=True)
class Loop:
    """How a model is trained.

    Attributes:
        optimizer: for its parameters.
        before_step: what the loop does to gradients; what it returns is compared.
        accumulate: backwards per step.
        to_none: as `zero_grad` takes it.
        scaled: with a gradient scaler.
        steps: of the optimizer.
    """

    optimizer: Optimizer
    before_step: Callable[[nn.Module], Any] = lambda model: None
    accumulate: int = 1
    to_none: bool = True
    scaled: bool = False
    steps: int = 5


def trained(model: nn.Module, loop: Loop) -> list[Tensor]:
    """Losses, what `before_step` returned, gradients as the loop reads them, weights and state."""
    optimizer = loop.optimizer([value for value in model.parameters() if value.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if loop.scaled else None
    found: list[Tensor] = []
    for step in range(loop.steps):
        for part in range(loop.accumulate):
            loss = loss_of(model, 10 * step + part)
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


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Every bit."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def technique(
    model: nn.Module, window_bytes: int = 0, faults: Mapping[str, int] | None = None, **more: Any
) -> GradientOffload:
    """The technique for a model: everything leaves, in small pieces."""
    settings = replace(SETTINGS, window_bytes=window_bytes, **more)
    offload = Offload(settings, faults)
    return GradientOffload(
        model, Link(settings, 1000, 1000, 32 << 20), detect(torch.device("cpu")), lambda: offload
    )


@contextmanager
def released(
    model: nn.Module, window_bytes: int = 0, faults: Mapping[str, int] | None = None, **more: Any
) -> Iterator[GradientOffload]:
    """Has a model's gradients released inside the block."""
    made = technique(model, window_bytes, faults, **more)
    made.attach()
    assert made.window is not None
    made.window.piece_elements = LARGER_PIECE
    try:
        yield made
    finally:
        made.undo()


def is_offloaded(gradient: Tensor | None) -> bool:
    """Whether it is released, and takes no memory now."""
    return (
        isinstance(gradient, ReleasedGradient)
        and gradient.memscale_bytes.plain.untyped_storage().nbytes() == 0
    )


def gradient_of(values: Tensor) -> tuple[ReleasedGradient, ReleaseWindow]:
    """A gradient with these values, which is offloaded."""
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.zeros_like(values))
    made = technique(model)
    made.attach()
    assert made.window is not None
    made.window.piece_elements = PIECE
    (weight * values).sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, ReleasedGradient) and is_offloaded(gradient)
    return gradient, made.window
