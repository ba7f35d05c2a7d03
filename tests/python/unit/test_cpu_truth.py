# SPDX-License-Identifier: Apache-2.0
"""What a trace on fakes says of a CPU step is what PyTorch's profiler sees when the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memscale
from memscale.ops import op_facts
from zoo.training import peak_bytes

aten = torch.ops.aten
AMPLE = memscale.Config(memory_budget=1 << 40, enable_logging=False)


def train(build: Callable[[], nn.Module], config: memscale.Config | None = None) -> int:
    """Two steps of a model that returns its loss. The predicted peak; 0 without a configuration."""
    model, batch = build().train(), torch.zeros(16, 64, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config is None:
        for _ in range(2):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 0
    with memscale.optimize(model, optimizer, config) as executor:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert executor.planned is not None
        assert executor.planned.plan.profile == "static"
        return executor.planned.plan.predicted.allocated_peak_bytes


class Gathered(nn.Module):
    """Scores over far more positions than are picked from them: backward of the pick fills large zeros."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scores = nn.Linear(48, 1024)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64).expand(16, 64, 64)
        return self.pick(self.scores(x), places).sin().sum()


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda scores, places: scores.gather(-1, places),
    "gather/transposed": lambda scores, places: scores.transpose(0, 1).gather(-1, places.transpose(0, 1)),
    "index-select": lambda scores, places: scores.index_select(2, places[0, 0]),
    "index": lambda scores, places: scores[:, :, places[0, 0]],
}


class Pooled(nn.Module):
    """The gradient comes to the norm transposed, as from a pooling, and goes on along two paths at once."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 1024), nn.Linear(1024, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        states = self.wide(x)
        states = states + self.down(nn.functional.gelu(self.up(states)))
        return nn.functional.adaptive_avg_pool1d(self.norm(states).transpose(1, 2), 1).sum()


@pytest.mark.parametrize("pick", PICKS)
def test_fills_of_backward_take_one_tensor(pick: str) -> None:
    predicted = train(lambda: Gathered(PICKS[pick]), AMPLE)
    truth = peak_bytes(lambda: train(lambda: Gathered(PICKS[pick])))
    assert abs(predicted - truth) <= 1024  # a second filled tensor would be 4 MiB


def test_a_transposed_gradient_is_copied_once() -> None:
    predicted = train(Pooled, AMPLE)
    truth = peak_bytes(lambda: train(Pooled))
    assert abs(predicted - truth) <= 1024  # a second copy would be 256 KiB


class Tabled(nn.Module):
    """A block that reads small tables, which are copied where it is to be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.table: Tensor
        self.register_buffer("table", torch.ones(96))
        self.large: Tensor
        self.register_buffer("large", torch.ones(4096))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.table) * self.large[:96])


def test_small_buffers_that_a_checkpoint_copies_are_counted() -> None:
    model = nn.Sequential(*(Tabled() for _ in range(6)), nn.Flatten(0), nn.Linear(16 * 64 * 48, 1)).train()
    batch = torch.zeros(16, 64, 48)
    before = sum(item.nbytes for item in [*model.parameters(), *model.buffers(), batch])

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    config = memscale.Config(memory_budget=1, enable_logging=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memscale.wrap(model, config, sample_input=batch, optimizer=optimizer)
    step()
    plan = memscale.executor_of(model).planned.plan
    measured = before + peak_bytes(step)
    assert len(plan.active) > 4
    assert 0 <= plan.predicted.allocated_peak_bytes - measured < 96 * 4  # one table of one block


def test_the_assumed_loss_counts_among_what_a_loop_may_drop() -> None:
    """A squared error keeps one value per element in its result's storage; other losses one value."""
    model = nn.Conv2d(3, 5, 3, padding=1)
    with memscale.optimize(model, config=AMPLE) as executor:
        model(torch.zeros(2, 3, 16, 16)).sum().backward()
        assert executor.planned is not None
        trace = executor.planned.trace
    elements = 2 * 5 * 16 * 16
    assert trace.output_bytes == 4 * elements + 4 * elements


def strided(*sizes: int) -> Tensor:
    """A tensor whose last two dimensions are swapped in memory."""
    return torch.zeros(*sizes[:-2], sizes[-1], sizes[-2]).transpose(-1, -2)


def layouts(func: Any, args: tuple[Any, ...]) -> list[tuple[tuple[int, ...], int]]:
    """Strides and bytes of what a call returns."""
    result = op_facts.run(func, op_facts.facts(func), args, {})
    return [
        (part.stride(), part.untyped_storage().nbytes())
        for part in (result if isinstance(result, tuple) else (result,))
        if isinstance(part, Tensor)
    ]


@pytest.mark.parametrize("grad_is_strided", [False, True])
@pytest.mark.parametrize("source_is_strided", [False, True])
def test_layer_norm_backward_on_fakes_lies_as_the_kernels_result(
    grad_is_strided: bool, source_is_strided: bool
) -> None:
    def arguments() -> tuple[Any, ...]:
        grad = strided(4, 6, 8) if grad_is_strided else torch.zeros(4, 6, 8)
        source = strided(4, 6, 8) if source_is_strided else torch.zeros(4, 6, 8)
        statistics = torch.zeros(4, 6, 1)
        weight, bias = torch.ones(8), torch.zeros(8)
        return grad, source, [8], statistics, statistics, weight, bias, [True, True, True]

    real = layouts(aten.native_layer_norm_backward.default, arguments())
    with FakeTensorMode():
        assert layouts(aten.native_layer_norm_backward.default, arguments()) == real


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="this PyTorch has no grouped product")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_product_on_fakes_is_as_large_as_the_kernels_result(dtype: torch.dtype) -> None:
    """The fake kernel takes BF16 alone, the CPU's more."""

    def arguments() -> tuple[Any, ...]:
        ends = torch.tensor([8, 16, 32], dtype=torch.int32)
        return torch.zeros(32, 16, dtype=dtype), torch.zeros(3, 16, 24, dtype=dtype), ends

    real = layouts(aten._grouped_mm.default, arguments())
    with FakeTensorMode():
        assert layouts(aten._grouped_mm.default, arguments()) == real


class Aligned(nn.Module):
    """A loss over alignments of a target; how long targets are is computed from them."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 16), nn.Linear(16, 12)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        scores = self.last(self.first(x).tanh()).log_softmax(-1).transpose(0, 1)
        targets = (torch.arange(16 * 7).view(16, 7) % 11 + 1).tril(3)
        lengths = (targets > 0).sum(-1)
        targets = targets[targets > 0] if self.packed else targets
        steps = torch.full((16,), 64)
        return nn.functional.ctc_loss(scores, targets, steps, lengths, zero_infinity=True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_loss_over_alignments_is_traced_without_data(packed: bool) -> None:
    predicted = train(lambda: Aligned(packed), AMPLE)
    truth = peak_bytes(lambda: train(lambda: Aligned(packed)))
    assert abs(predicted - truth) <= 1024  # what backward needs are 60 KiB, and a copy of the scores 48 KiB


class Bags(nn.Module):
    """Saves indices that are made inside: a trace has their values, and yet they must not seem to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(64, 8, mode="sum") for _ in range(4)])
        self.head = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(16 * 512 * 8).view(8, -1).t().remainder(64)
        return self.head(torch.cat([bag(ids) for bag in self.bags], 1)).sum()


def test_real_values_that_are_saved_do_not_stay() -> None:
    smallest = memscale.Config(memory_budget=1 << 20, enable_logging=False)
    seen = []
    truth = peak_bytes(lambda: seen.append(train(Bags, smallest)))
    assert abs(seen[0] - truth) <= 1024
    assert train(Bags, AMPLE) - truth >= 2 << 20  # the bags' indices
