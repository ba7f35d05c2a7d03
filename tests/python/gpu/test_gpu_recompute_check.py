# SPDX-License-Identifier: Apache-2.0
"""Recomputes on a card are compared with their forwards: the host's fingerprints, planted defects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memscale
import tallies
from memscale import _core
from memscale.errors import RecomputeError, modules_of_run
from memscale.optim import cards
from memscale.techniques.checkpoint import card_check

WIDTH = 64

WORLD = tallies.World()
"""What defective blocks read, where no code looks."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Without NVIDIA's compiler there is nothing to test here."""
    try:
        cards.fingerprint_table(torch.device("cuda", 0), 1)
    except Exception as error:
        pytest.skip(str(error))
    yield
    WORLD.clear()


class Block(nn.Module):
    """A residual MLP, with a place for a defect between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.defect(torch.tanh(self.up(x)))))

    def defect(self, h: Tensor) -> Tensor:
        return h


class ReadsGlobal(Block):
    def defect(self, h: Tensor) -> Tensor:
        return h * (2.0 if "now" in WORLD else 1.0)


class DropsMask(Block):
    def defect(self, h: Tensor) -> Tensor:
        mask = torch.ones_like(h)
        if "now" not in WORLD:
            mask[..., ::7] = 0
        return h * mask


class FlipsOneBit(Block):
    def defect(self, h: Tensor) -> Tensor:
        if "now" not in WORLD:
            return h
        flipped = h.detach().clone()
        flipped.view(torch.int32)[3, 1, 5] ^= 1
        return flipped + 0 * h


DEFECTS: list[type[Block]] = [ReadsGlobal, DropsMask, FlipsOneBit]


def batch() -> Tensor:
    return torch.randn(512, 32, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


def model_of(kind: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).cuda()


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> nn.Module:
    config = memscale.Config(memory_budget=1, enable_logging=False, enable_offloading=False, **more)
    return memscale.wrap(model, config, sample_input=(batch(),), optimizer=optimizer)


def loss_of(model: nn.Module) -> Tensor:
    result: Tensor = model(batch()).square().mean()
    return result


def backward_in_another_world(model: nn.Module) -> None:
    """Forward in one world, backward in another."""
    WORLD.clear()
    loss = loss_of(model)
    WORLD["now"] = True
    try:
        loss.backward()
    finally:
        WORLD.clear()


Change = Callable[[Tensor], Tensor]

TENSORS: dict[str, tuple[Tensor, Change]] = {
    "contiguous": (torch.randn(1000, 333), lambda base: base),
    "transposed": (torch.randn(300, 700), lambda base: base.t()),
    "channels_last": (torch.randn(4, 10, 12, 6), lambda base: base.permute(0, 3, 1, 2)),
    "slice": (torch.randn(500, 40), lambda base: base[:, 3:20]),
    "slice of halves": (torch.randn(500, 40).bfloat16(), lambda base: base[::3, 3:20]),
    "halves, out of line": (torch.randn(5001).bfloat16(), lambda base: base[1:]),
    "bytes, out of line": (torch.randint(0, 255, (100_003,), dtype=torch.uint8), lambda base: base[3:]),
    "expanded": (torch.randn(40, 1), lambda base: base.expand(40, 9)),
    "large": (torch.randn(5_000_001), lambda base: base),
    "none": (torch.randn(0, 3), lambda base: base),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_the_values_are_those_of_the_host(kind: str, sampled: bool) -> None:
    base, change = TENSORS[kind]
    kept = card_check.keep(change(base.cuda()), sampled)
    assert kept is not None and kept.value() == _core.fingerprint(change(base), sampled)


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_planted_defect_comes_out_of_backward(kind: type[Block]) -> None:
    model = wrapped(model_of(kind))
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    assert caught.value.module is not None
    assert set(modules_of_run(caught.value.module)) <= {"0", "1", "2", "3"}
    assert "has other values than in its forward (float32[512, 32, 256]" in caught.value.what


def test_equal_recomputes_pass() -> None:
    model, plain = wrapped(model_of(ReadsGlobal)), model_of(ReadsGlobal)
    for _ in range(3):
        for each in (model, plain):
            loss_of(each).backward()
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


class Attends(nn.Module):
    """Attention without dropout, whose kernels save a seed that nobody has written."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        with sdpa_kernel(self.backend):
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outer(out.transpose(1, 2).flatten(-2))


class Normalises(nn.Module):
    """cuDNN's batch normalisation of halves in channels_last, which has a reserve."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.norm = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).unsqueeze(-1).contiguous(memory_format=torch.channels_last)
        return x + torch.relu(self.norm(self.convolve(image))).squeeze(-1).transpose(1, 2)


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("kind", [*BACKENDS, Normalises], ids=str)
def test_what_nobody_writes_is_not_compared(kind: Any) -> None:
    """Memory that comes back with other bytes makes no difference."""
    torch.manual_seed(0)
    blocks = [Normalises() if kind is Normalises else Attends(kind) for _ in range(12)]
    model, x = nn.Sequential(*blocks).cuda().bfloat16(), batch().bfloat16()
    try:
        model(x)
    except RuntimeError as error:
        pytest.skip(str(error))
    config = memscale.Config(memory_budget=1, enable_logging=False, enable_offloading=False)
    memscale.wrap(model, config, sample_input=(x,))
    assert memscale.executor_of(model).plan.active
    for _ in range(3):
        loss = model(x).square().mean()
        junk = [
            torch.full((size,), 77, dtype=torch.uint8, device="cuda")
            for size in (*[512] * 64, 1 << 20, 1 << 24)
        ]
        del junk
        loss.backward()


def test_the_module_is_kept_for_the_rest_of_the_run() -> None:
    model, failed = wrapped(model_of(ReadsGlobal)), []
    for _ in range(6):
        model.zero_grad()
        try:
            backward_in_another_world(model)
        except RecomputeError as error:
            failed.append(error.module)
            continue
        break
    assert len(failed) == len(set(failed)) > 0
    kept = {path for run in failed for path in modules_of_run(run or "")}
    assert not [choice for choice in memscale.executor_of(model).plan.active if choice.module in kept]


def test_no_gradient_is_used_by_a_step_inside_of_backward() -> None:
    model = model_of(ReadsGlobal)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    wrapped(model, optimizer, step_in_backward=True)
    loss_of(model).backward()
    optimizer.step()
    before = [value.detach().clone() for value in model.parameters()]
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    assert caught.value.module is not None
    last = modules_of_run(caught.value.module)[-1]
    for (name, value), was in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(value, was) or name[0] > last, name


@contextmanager
def on_a_stream() -> Iterator[None]:
    """One of the program's own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


def test_on_streams_of_the_programs_own() -> None:
    model = wrapped(model_of(FlipsOneBit))
    for _ in range(3):
        with on_a_stream():
            loss_of(model).backward()
    with on_a_stream(), pytest.raises(RecomputeError):
        backward_in_another_world(model)


def test_streams_without_order_share_a_table() -> None:
    """Its calls come one after another on the card, whatever the streams."""
    models = [wrapped(model_of(Block)) for _ in range(2)]
    batches = [batch(), batch()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    losses: list[Tensor] = []
    torch.cuda.synchronize()
    for model, x, stream in zip(models, batches, streams, strict=True):
        with torch.cuda.stream(stream):
            losses.append(model(x).square().mean())
    for loss, stream in zip(losses, streams, strict=True):
        with torch.cuda.stream(stream):
            loss.backward()
    torch.cuda.synchronize()


def test_nothing_is_compared_while_a_graph_is_captured() -> None:
    if os.environ.get("STANDIN_COMPUTE"):
        pytest.skip("the stand-in has no CUDA graphs")
    value, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = value * 2
        assert card_check.keep(doubled, False) is None


def test_it_allocates_nothing_of_pytorchs() -> None:
    model = wrapped(model_of(Block))
    for _ in range(2):
        loss_of(model).backward()
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    kept = [card_check.keep(value, False) for value in model.parameters()]
    assert all(each is not None for each in kept)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
