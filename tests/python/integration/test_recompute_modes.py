# SPDX-License-Identifier: Apache-2.0
"""Modes of a program's own see no plan; counters of PyTorch and `TorchFunctionMode` no recompute either."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memscale

WIDTH = 16
SEEN = collections.Counter[str]()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class CountsFunctions(TorchFunctionMode):
    """Counts in a global."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class CountsOperators(TorchDispatchMode):
    """Counts in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def functions(counter: Any) -> list[int]:
    return [SEEN["linear"], SEEN["tanh"]]


def operators(counter: Any) -> int:
    return counter.count


def flops(counter: Any) -> int:
    return counter.get_total_flops()


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "functions": (CountsFunctions, functions),
    "operators": (CountsOperators, operators),
    "flops": (lambda: FlopCounterMode(display=False), flops),
}


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_counts(kind: str, whole: bool) -> None:
    make, read = KINDS[kind]

    def train(wrapped: bool) -> list[Any]:
        SEEN.clear()
        torch.manual_seed(0)
        model, counts = nn.Sequential(*(Block() for _ in range(4))), list[Any]()
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(256, WIDTH)
            with make() as counter:
                loss = model(x).square().mean()
                if whole and kind != "operators":
                    loss.backward()
            counts += [loss.item(), read(counter)]
            if not whole or kind == "operators":
                loss.backward()
            if kind != "operators":
                counts.append(read(counter))
            counts += [parameter.grad.tolist() for parameter in model.parameters()]
            model.zero_grad()
        if wrapped:
            assert memscale.executor_of(model).plan.active
        return counts

    assert train(False) == train(True)
