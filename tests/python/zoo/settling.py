# SPDX-License-Identifier: Apache-2.0
"""Blocks whose first call is not like the others, or that exchange their weights or their parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.blocks import WIDTH, Block


class Exchanges(Block):
    """Gives a weight other data, or takes another weight, before it is used: constraints do so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "norm":
            self.scale.weight.data = torch.renorm(self.scale.weight.data, 2, 0, 0.4)
        elif self.kind == "decay":
            self.scale.weight.data = self.scale.weight.data * 0.9
        elif self.kind == "weight":
            self.scale.weight = nn.Parameter(self.scale.weight.detach() * 0.9)
        else:
            self.scale = nn.Linear(WIDTH, WIDTH)
        return super().forward(x + self.scale(x))


class FirstCall(Block):
    """Does something else in its first call than later."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_first = kind, True
        self.noise: list[Tensor] | None = None
        self.extra: nn.Module | None = nn.Linear(WIDTH, WIDTH) if kind == "part-goes" else None

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "_" + self.kind.replace("-", "_"))(x)
        return super().forward(F.dropout(x, 0.1))

    def _flag_falls(self, x: Tensor) -> Tensor:
        x = x * 2 if self.is_first else x
        self.is_first = False
        return x

    def _flag_comes(self, x: Tensor) -> Tensor:
        x = x if hasattr(self, "been_here") else x * 2
        self.been_here = True
        return x

    def _noise(self, x: Tensor) -> Tensor:
        self.noise = self.noise or [torch.randn(WIDTH)]
        return x + self.noise[0]

    def _part(self, x: Tensor) -> Tensor:
        self.extra = self.extra or nn.Linear(WIDTH, WIDTH)
        return x + self.extra(x)

    def _part_goes(self, x: Tensor) -> Tensor:
        if self.extra is not None:
            x = x + self.extra(x)
            del self.extra
            self.extra = None
        return x

    def _weight(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = nn.Parameter(torch.full((WIDTH,), 0.5))
        return x + self.shift

    def _buffer(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        return x + self.shift

    def _grows(self, x: Tensor) -> Tensor:
        if not hasattr(self, "parts"):
            self.parts = nn.ModuleList()
        if len(self.parts) < 2:
            self.parts.append(nn.Linear(WIDTH, WIDTH))
        for part in self.parts:
            x = x + part(x)
        return x


FIRST_CALLS = ("flag-falls", "flag-comes", "noise", "part", "part-goes", "weight", "buffer", "grows")


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)

    def forward(self, x: Tensor) -> Any:
        return self.scaled(x)


class PartCounts(Block):
    """Has a part that counts calls of a method that is not its forward, or where PyTorch does not find it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.part, self.hidden = _Counting(), [_Counting()]

    def forward(self, x: Tensor) -> Tensor:
        part = self.part if self.kind == "method-of-part" else self.hidden[0]
        return super().forward(part(x) if self.kind == "hidden-call" else part.scaled(x))
