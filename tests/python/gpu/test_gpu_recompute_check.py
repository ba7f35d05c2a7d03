# SPDX-License-Identifier: Apache-2.0
"""Recomputes on a card are compared with their forwards: the host's fingerprints, planted defects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import _core
from memscale.errors import RecomputeError
from memscale.optim import cards
from memscale.techniques import card_check

WIDTH = 64

WORLD: dict[str, Any] = {}
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
    return torch.randn(64, 32, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


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


TENSORS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(1000, 333),
    "transposed": lambda: torch.randn(300, 700).t(),
    "channels_last": lambda: torch.randn(4, 6, 10, 12).contiguous(memory_format=torch.channels_last),
    "slice": lambda: torch.randn(500, 40)[:, 3:20],
    "halves, out of line": lambda: torch.randn(5001).bfloat16()[1:],
    "bytes, out of line": lambda: torch.randint(0, 255, (100_003,), dtype=torch.uint8)[3:],
    "expanded": lambda: torch.randn(40, 1).expand(40, 9),
    "large": lambda: torch.randn(5_000_001),
    "none": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_the_values_are_those_of_the_host(kind: str, sampled: bool) -> None:
    here = TENSORS[kind]()
    there = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device="cuda").copy_(here)
    if "out of line" in kind:
        base = torch.empty(here.numel() + 3, dtype=here.dtype, device="cuda")
        there = base[3 if here.dtype is torch.uint8 else 1 :][: here.numel()].copy_(here)
    kept = card_check.keep(there, sampled)
    assert kept is not None and kept.value() == _core.fingerprint(here, sampled)


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_planted_defect_comes_out_of_backward(kind: type[Block]) -> None:
    model = wrapped(model_of(kind))
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    assert caught.value.module in ("0", "1", "2", "3")
    assert "has other values than in its forward (float32[64, 32, 256]" in caught.value.what


def test_equal_recomputes_pass() -> None:
    model, plain = wrapped(model_of(ReadsGlobal)), model_of(ReadsGlobal)
    for _ in range(3):
        for each in (model, plain):
            loss_of(each).backward()
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


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
    assert not [choice for choice in model._memscale_executor.plan.active if choice.module in failed]


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
    later = range(int(caught.value.module) + 1, 4)
    for (name, value), was in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(value, was) or int(name[0]) in later, name


def test_on_streams_of_the_programs_own() -> None:
    model = wrapped(model_of(FlipsOneBit))
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss_of(model).backward()
        torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RecomputeError):
        backward_in_another_world(model)


def test_nothing_is_compared_while_a_graph_is_captured() -> None:
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
