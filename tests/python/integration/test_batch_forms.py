# SPDX-License-Identifier: Apache-2.0
"""Batches and outputs that say what a step takes in other ways than by tensors in tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from zoo.blocks import WIDTH, Block
from zoo.models import generator
from zoo.training import peak_bytes, seed

CONFIG = memscale.Config(memory_budget="64MiB", enable_logging=False)


@dataclass
class Output:
    """A leaf to PyTorch's trees."""

    y: Tensor
    parts: dict[int, Tensor]
    note: str = ""


class Deep(nn.Module):
    """Runs as many of its blocks as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, depth: int, step: int = 0) -> Output:
        parts = {}
        for number in range(depth):
            x = self.blocks[number](x)
            parts[number] = x * (1 + step)
        return Output(x, parts)


class TakesObject(nn.Module):
    """Its batch is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, graph: Any) -> Output:
        return Output(self.blocks(graph.x), {0: graph.extra["x"]})


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=generator(0))


def started(model: nn.Module) -> tuple[nn.Module, Callable[..., None]]:
    """A wrapped model with its first optimizer step behind it, and its step."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(*batch: Any) -> None:
        output = model(*batch)
        sum(part.square().sum() for part in [output.y, *output.parts.values()]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return memscale.wrap(model.train(), CONFIG, optimizer=optimizer), step


def predicted(model: nn.Module) -> int:
    plan: memscale.Plan = memscale.executor_of(model).plan
    return plan.predicted.allocated_peak_bytes


@pytest.mark.parametrize("depths", [(2, 6), (6, 2, 6)])
def test_a_number_that_decides_memory_is_planned_for(depths: tuple[int, ...]) -> None:
    seed()
    model = Deep()
    plain = peak_bytes(lambda: run_plain(depths[-1]))
    model, step = started(model)
    for depth in depths:
        step(rows(2048), depth)
        if depth == 6:
            assert predicted(model) >= plain
    assert memscale.executor_of(model).plan.fits


def run_plain(depth: int) -> None:
    """All that one step of `Deep` takes, model, batch and optimizer included."""
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(rows(2048), depth)
    sum(part.square().sum() for part in [output.y, *output.parts.values()]).backward()
    optimizer.step()


def test_a_number_that_counts_is_not_planned_for_ever(plans: list[object]) -> None:
    _, step = started(Deep())
    for number in range(8):
        step(rows(16), 2, number)
    assert 1 <= len(plans) <= 4, "first step, and two that were the same"


def test_an_output_that_is_no_tree_has_a_loss_and_is_held() -> None:
    model, step = started(Deep())
    step(rows(2048), 3)
    executor = memscale.executor_of(model)
    assert executor.planned.trace.graph.op_count > 60, "a backward was traced"
    held = model(rows(2048), 3)
    assert executor.open.waiting == 0
    facts = executor._facts()
    size = held.y.numel() * 4
    assert sorted(facts.carried_bytes) == [size] * 4


def test_a_batch_that_is_an_object_is_planned_for_when_it_grows() -> None:
    model, step = started(TakesObject())
    peaks = []
    for count in (64, 2048, 512):
        x = rows(count)
        step(SimpleNamespace(x=x, extra={"x": x + 1}))
        peaks.append(predicted(model))
    assert peaks[1] > 2 * peaks[0] and peaks[2] == peaks[1]


class Spectrum(nn.Module):
    """Complex weights, and an output that is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(128, 128, dtype=torch.cfloat) / 16)
        self.second = nn.Parameter(torch.randn(128, 128, dtype=torch.cfloat) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft(x @ self.first) * 2) @ self.second


def test_a_complex_output_has_a_loss() -> None:
    model, x = Spectrum(), torch.randn(32, 32, 128, dtype=torch.cfloat)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).abs().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = x.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    predicted = memscale.predict(model, optimizer, sample_input=x, device="cpu").allocated_peak_bytes
    assert 0.99 * predicted <= before + peak_bytes(step) <= predicted


def test_names_of_files_in_a_batch_ask_for_no_plan(plans: list[object]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))

        def forward(self, batch: dict[str, Any], mode: str = "deep") -> Tensor:
            return (self.blocks if mode == "deep" else self.blocks[:1])(batch["x"]).square().mean()

    model = Named()
    memscale.wrap(model, CONFIG)
    for step in range(12):
        model({"x": rows(16), "files": [f"{step}-{row}.png" for row in range(16)]}).backward()
    assert len(plans) <= 5
    before = len(plans)
    model({"x": rows(16), "files": ["a.png"] * 16}, "flat").backward()
    assert len(plans) == before + 1  # what a word decides is looked at as before


def test_lengths_that_never_come_again_end_asking_for_plans(plans: list[object]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.layer(packed)[0].data.square().mean()

    model = Packed()
    memscale.wrap(model, CONFIG)
    for step in range(40):
        model(torch.randn(3, 30, 8), [30, 1 + step % 29, 1 + (step * 7 + step // 29) % 30]).backward()
    assert len(plans) <= 20


def test_a_data_set_that_a_batch_knows_is_not_searched() -> None:
    """Batches of torchtext do; every forward looked at every example."""
    looked: list[object] = []

    class Example:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            looked.append(self)
            return {}

    batch = SimpleNamespace(x=rows(16), extra={"x": rows(1)})
    batch.dataset = SimpleNamespace(examples=[Example() for _ in range(5000)])
    model = TakesObject()
    memscale.wrap(model, CONFIG)
    model(batch).y.square().mean().backward()
    assert len(looked) == 0
