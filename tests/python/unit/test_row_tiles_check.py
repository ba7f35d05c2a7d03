# SPDX-License-Identifier: Apache-2.0
"""What tiles of rows compute again is compared with their forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_row_tiles import Net, batch, error, gradients
from torch import Tensor, nn

import memscale
from card_table import card_of_the_cpu
from memscale.errors import RecomputeError
from memscale.techniques.checkpoint.recompute_check import OTHER_ON_CARD, RecomputeCheck
from memscale.techniques.tiles import row_search

WIDTH = 16
WORLD: dict[str, Any] = {}


class Mlp(nn.Module):
    """Reads a global in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.defect(torch.tanh(self.up(x))).sin())

    def defect(self, h: Tensor) -> Tensor:
        return h * 1.5 if "now" in WORLD else h * 0.5


class Later(Mlp):
    """From its second call on, once calls are counted."""

    def defect(self, h: Tensor) -> Tensor:
        if "calls" not in WORLD:
            return h
        WORLD["calls"] += 1
        return h * 1.5 if WORLD["calls"] > 1 else h


class SavesFewer(Mlp):
    def defect(self, h: Tensor) -> Tensor:
        return h if "now" in WORLD else torch.sin(h)


class Casts(Mlp):
    def defect(self, h: Tensor) -> Tensor:
        return h.double().sin().float() if "now" in WORLD else torch.sin(h)


@contextmanager
def checked(model: nn.Module, mode: str = "always") -> Iterator[list[tuple[str, str]]]:
    """Tiles with a check. Gives what it has told of modules that differ."""
    failed: list[tuple[str, str]] = []
    (tiles,) = row_search.find(model)
    tiles.check = RecomputeCheck(mode, lambda path, what: failed.append((path, what)))
    tiles.attach()
    try:
        yield failed
        assert tiles.used
    finally:
        tiles.undo()


@contextmanager
def other_world() -> Iterator[None]:
    WORLD["now"] = True
    try:
        yield
    finally:
        WORLD.clear()


@pytest.mark.parametrize("kind", [Mlp, SavesFewer, Casts])
def test_another_world_in_backward_is_an_error(kind: type[Mlp]) -> None:
    torch.manual_seed(0)
    model = Net(kind())
    with checked(model) as failed:
        loss = model(batch())
        with other_world(), pytest.raises(RecomputeError, match="module 'it'") as caught:
            loss.backward()
        assert failed == [("it", caught.value.what)]
        tiled = gradients(model, batch())
        assert len(failed) == 1
    assert error(tiled, gradients(model, batch())) < 1e-5


def test_on_a_card_it_is_an_error_when_backward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net(Mlp())
    with card_of_the_cpu(monkeypatch) as table, checked(model) as failed:
        gradients(model, batch())
        assert table.reads == 1 and not failed
        loss = model(batch())
        with other_world(), pytest.raises(RecomputeError, match="of a tile") as caught:
            loss.backward()
        assert table.reads == 2 and failed == [("it", caught.value.what)]
        assert caught.value.cause == OTHER_ON_CARD


def test_a_difference_in_a_later_tile_is_found() -> None:
    """By which time it is known which saves are looked at whole."""
    torch.manual_seed(0)
    model = Net(Later())
    with checked(model) as failed:
        gradients(model, batch())
        x = batch().requires_grad_()
        loss = model(x)
        WORLD["calls"] = 0
        with pytest.raises(RecomputeError, match="of a tile"):
            loss.backward()
        assert WORLD.pop("calls") == 2
    assert failed


def test_off() -> None:
    model = Net(Mlp())
    with checked(model, "off") as failed:
        loss = model(batch())
        with other_world():
            loss.backward()
    assert not failed


def test_first() -> None:
    model = Net(Mlp())
    with checked(model, "first") as failed:
        loss = model(batch())
        with other_world(), pytest.raises(RecomputeError):
            loss.backward()
        loss = model(batch())
        with other_world():
            loss.backward()
    assert len(failed) == 1


def test_a_run_goes_on_without_the_module() -> None:
    torch.manual_seed(0)
    model = Net(Mlp())
    config = memscale.Config(memory_budget=1, mode="aggressive", enable_logging=False)
    memscale.wrap(model, config, sample_input=(batch(),))
    executor: Any = memscale.executor_of(model)
    assert "mlp_tile" in executor.plan.explain()
    loss = model(batch())
    with other_world(), pytest.raises(RecomputeError) as caught:
        loss.backward()
    assert 'exclude=("it",)' in str(caught.value)
    model.zero_grad()
    with other_world():
        model(batch()).backward()
    loss = model(batch())
    with other_world():
        loss.backward()
    assert "mlp_tile" not in executor.plan.explain()
