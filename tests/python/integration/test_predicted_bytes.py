# SPDX-License-Identifier: Apache-2.0
"""Predictions of steps whose memory hangs on one detail of an operator: none too low, none far too high."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from calls import beside
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment, Region
from zoo.training import peak_bytes


class Blur(nn.Module):
    """A reshape gives a dimension of one element a stride by which the convolution chooses its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kernel = nn.Parameter(torch.ones(32, 1, 1)), nn.Parameter(torch.rand(1, 1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale).reshape(-1, 35, 35, 1)
        x = F.pad(x, [0, 0, 1, 1, 1, 1]).permute(0, 3, 1, 2).reshape(-1, 1, 37, 37)
        return F.conv2d(x, self.kernel).square().mean()


class PyramidHead(nn.Module):
    """Batch norm of single pixels in channels_last, whose copies are wide afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.pool = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.mix = nn.Sequential(nn.Conv2d(64, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        wide = F.interpolate(self.pool(x), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.mix(torch.cat([x, wide], 1)).square().mean()


class Aggregation(nn.Module):
    """Backward of `amax` adds to a tensor that is read later: not in place, though others do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.edges = torch.randint(1000, (2, 1700), generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        to = self.edges[1].view(-1, 1).expand(-1, 32)
        for layer in self.layers:
            x = layer(x)[self.edges[0]]
            x = x.new_zeros(1000, 32).scatter_reduce(0, to, x, "amax", include_self=False)
        return x.square().mean()


class Branches(nn.Module):
    """A gradient for which another branch waits is not summed into."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.head = nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8)
        self.branches = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        total = self.first(h)
        for branch in self.branches:
            total = branch(h) + total
        return self.head(total + h).square().mean()


class Positions(nn.Module):
    """Returns what a cache of the process holds, and no operation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean(), "positions": positions(len(x))}


@functools.cache
def positions(length: int) -> Tensor:
    return torch.arange(64.0).repeat(length, 1)


class Head(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean()


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(20, -1)[0],
    "max": lambda x: x.max(1)[0],
    "kthvalue": lambda x: x.kthvalue(3, 1)[0],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)),
    "index_select": lambda x: x.index_select(0, torch.arange(len(x) - 10)),
    "binary cross-entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(x.shape)),
}

CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "reshape to one channel": lambda: (Blur(), torch.randn(4, 32, 35, 35)),
    "single pixels": lambda: (
        PyramidHead(),
        torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last),
    ),
    "branches": lambda: (Branches(), torch.randn(2000, 8)),
    "amax of edges": lambda: (Aggregation(), torch.randn(1000, 32)),
    **{
        name: lambda function=function: (Head(function), torch.randn(2000, 32))  # type: ignore[misc]
        for name, function in HEADS.items()
    },
}


@pytest.mark.parametrize("name", [*CASES])
def test_plain_peak(name: str) -> None:
    torch.manual_seed(0)
    model, x = CASES[name]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    predicted = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes
    step()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), x))
    measured = held + peak_bytes(step)
    assert measured <= 1.001 * predicted <= 1.02 * measured


class Dropped(nn.Module):
    """Has positions made that nothing reads or returns, as detectors do with those of all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x)["loss"]}


@pytest.mark.parametrize("kind", [Positions, Dropped])
def test_what_a_cache_holds_and_a_module_returns(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2000, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        output = model(x)
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    predicted = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x, positions(len(x))))
    measured = held + peak_bytes(step)
    assert measured <= 1.001 * predicted <= 1.02 * measured


class Messages(nn.Module):
    """Ends with sums by places that it is given, which is what its backward asks for first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = x[edges[0]]
        sent = self.gate(sent).sigmoid() * self.value(sent)
        to = edges[1].view(-1, 1).expand(-1, 32)
        return x.new_zeros(x.shape).scatter_add(0, to, sent)


def test_what_is_saved_of_inputs_asks_for_no_recompute() -> None:
    module, edges = Messages(), torch.randint(50, (2, 80))
    done: list[Region] = []
    CheckpointAttachment(module, "module", []).attach()
    output = module(torch.randn(50, 32, requires_grad=True), edges)
    seen: list[int] = []
    node = output.grad_fn.next_functions[1][0]
    assert output.grad_fn.name() == "ScatterAddBackward0" and node.name() == "MulBackward0"
    node.register_prehook(lambda _: seen.append(len(done)))
    with beside({Region.run_again: done.append}):
        output.sum().backward()
    assert seen == [0] and len(done) == 1


class Shifted(nn.Module):
    """Its layer, last in backward, saves an input and a weight, which are recomputed by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return F.gelu(self.layer(x) + shift.mean())


def test_inputs_go_with_the_last_save_that_is_recomputed() -> None:
    module, shift = Shifted(), torch.ones(1000)
    CheckpointAttachment(module, "module", []).attach()
    output, held = module(torch.ones(4, 8), shift), weakref.ref(shift)
    del shift
    gone: list[bool] = []
    node = output.grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.name() == "AddmmBackward0" and held() is not None
    node.register_prehook(lambda _: gone.append(held() is None))
    output.sum().backward()
    assert gone == [True]


class Remembers(nn.Module):
    """Holds what it has computed, and the graph of it, until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(32, 32), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with torch.no_grad():
            scale = x.repeat(1, 16).sin().mean(1, keepdim=True)
        self.seen = x.sin().exp()
        return x * scale


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Remembers() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


class Shifting(nn.Module):
    """Peaks before it adds what a cache of the process holds from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with torch.no_grad():
            scale = x.repeat(1, 16).sin().mean(1, keepdim=True)
        return (x * scale + shifts(len(x))).square().mean()


@functools.cache
def shifts(length: int) -> Tensor:
    return torch.linspace(0, 1, length).view(-1, 1).repeat(1, 32)


@pytest.mark.parametrize("kind", [Remembering, Shifting])
def test_what_is_held_from_step_to_step(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    shifts.cache_clear()
    model, x = kind(), torch.randn(2000, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    predicted = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes

    def train() -> None:
        for _ in range(3):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    measured = sum(tensor.nbytes for tensor in (*model.parameters(), x)) + peak_bytes(train)
    assert measured <= 1.001 * predicted <= 1.02 * measured


collected: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collected", default=None)


def collect(module: nn.Module, args: Any, output: Tensor) -> None:
    states = collected.get()
    if states is not None:
        states["states"].append(output)


class Collecting(nn.Module):
    """Collects what its blocks return, as long as it runs, into a list that a context variable holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(6)
        )
        for block in self.blocks:
            block.register_forward_hook(collect)

    def forward(self, x: Tensor) -> Tensor:
        states: dict[str, list[Tensor]] = {"states": []}
        token = collected.set(states)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            collected.reset(token)
        return (x + states["states"][0]).square().mean()


def test_plan_where_a_context_variable_collects() -> None:
    torch.manual_seed(0)
    model, x = Collecting(), torch.randn(2000, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    config = memscale.Config(memory_budget="1KiB", enable_logging=False)
    with memscale.optimize(model, optimizer, config, sample_input=x) as executor:
        step()
        held = sum(tensor.nbytes for tensor in (*model.parameters(), x))
        measured = held + peak_bytes(step)
        assert executor.plan.active
        assert measured <= 1.001 * executor.plan.predicted.allocated_peak_bytes <= 1.02 * measured
