# SPDX-License-Identifier: Apache-2.0
"""Autocast's cache of casts belongs to the loop: planning and recomputes leave it as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.torchkit import cached_casts
from zoo.training import SMALLEST, seed

WIDTH = 32


class Block(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.own or torch.is_autocast_enabled("cpu")):
            y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def model_of(own: bool = False) -> nn.Module:
    seed()
    return nn.Sequential(*(Block(own) for _ in range(4)), nn.Linear(WIDTH, WIDTH))


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(96, WIDTH, generator=generator) for _ in range(count))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def two_forwards(model: nn.Module, other: nn.Module | None = None) -> list[Tensor]:
    """Gradients of steps whose block of autocast has two forwards, and those of a model around them."""
    seen = []
    for x in batches(3):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            inner = other if other is not None else nn.Identity()
            loss = model(inner(x)).float().square().mean() + model(inner(-2 * x)).float().mean()
        loss.backward()
        seen += gradients(model) + ([] if other is None else gradients(other))
    return seen


def delayed(model: nn.Module, inside: bool) -> list[Tensor]:
    """Each block of autocast has the backward of the step before, the optimizer's step and a forward."""
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    pending: Tensor | None = None
    for x in batches(5):
        with torch.autocast("cpu", torch.bfloat16):
            if pending is not None:
                optimizer.zero_grad()
                pending.backward()
                seen += gradients(model)
                optimizer.step()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                pending = model(x).float().square().mean()
        seen.append(pending.detach())
    return seen


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("sample", [False, True])
def test_two_forwards_in_one_block(sample: bool) -> None:
    """The second one takes the casts of the first, also where a plan is made between them."""
    plain = two_forwards(model_of())
    model = memscale.wrap(model_of(), SMALLEST, sample_input=next(batches(1)) if sample else None)
    assert same(plain, two_forwards(model))
    assert memscale.executor_of(model).plan.active
    memscale.detach(model)


def test_casts_of_another_model() -> None:
    plain = two_forwards(model_of(), nn.Linear(WIDTH, WIDTH))
    assert same(plain, two_forwards(memscale.wrap(model_of(), SMALLEST), nn.Linear(WIDTH, WIDTH)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_backward_inside_of_autocast(inside: bool, own: bool) -> None:
    """What a recompute casts is not there any more when the weights have changed."""
    plain = delayed(model_of(own), inside)
    model = memscale.wrap(model_of(own), SMALLEST, sample_input=next(batches(1)))
    assert memscale.executor_of(model).plan.active
    assert same(plain, delayed(model, inside))


def test_the_cache_is_as_before() -> None:
    """The same casts, with their nodes; of a weight that was not cast, none."""
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(torch.ones(2, 4)).grad_fn
        with cached_casts.set_aside(other):
            assert not cached_casts.has_any(layer.parameters())
            other(torch.ones(2, 4))
        after = layer(torch.ones(2, 4)).grad_fn
        assert cached_casts.has_any([layer.weight]) and not cached_casts.has_any(other.parameters())
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")

    def casts(node: object) -> set[object]:
        found, pending = set(), [node]
        while pending:
            one = pending.pop()
            if one is not None:
                found |= {one} if one.name() == "ToCopyBackward0" else set()  # type: ignore[attr-defined]
                pending += [item for item, _ in one.next_functions]  # type: ignore[attr-defined]
        return found

    assert casts(before) & casts(after)
    assert not cached_casts.is_open()


def test_a_plan_that_is_made_in_a_block_holds_no_batch() -> None:
    """Not until a collection either: it would be in memory beside the batches that follow."""
    model = memscale.wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), memory_budget="1GiB")
    gc.unfreeze()  # the tests' own: planning does otherwise where the program has frozen nothing
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 8)
        held = weakref.ref(x)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        del x, loss
        assert memscale.executor_of(model).plan is not None and held() is None
    finally:
        gc.enable()
        gc.freeze()
