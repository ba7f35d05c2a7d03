# SPDX-License-Identifier: Apache-2.0
"""Dropout in tiles of rows drops what the plain step drops, and leaves the generator where that leaves it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_row_proof import Mlp
from test_row_tiles import Block, Net, batch, counting, error, gradients, runs, tiled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles import row_search, row_tiles
from memscale.techniques.tiles.row_dropout import Drop, Dropping
from zoo.training import peak_bytes

WIDTH = 16


class Middle(nn.Module):
    """A dropout where the module is wide; one more around everything, if asked for."""

    def __init__(self, p: float = 0.2, inplace: bool = False, outer: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.inner, self.outer = nn.Dropout(p, inplace), nn.Dropout(outer)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(nn.functional.gelu(self.up(self.norm(x))))))


class Inside(Middle):
    """A checkpoint of its own in the module, with the dropout in it."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.dropped, self.norm(x), use_reentrant=False)
        return self.outer(self.down(made))

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.inner(self.up(x)))


class Again(Middle):
    """One dropout is called twice: each time with another mask."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.down(self.inner(self.up(x))))


class Changing(Middle):
    """Calls its dropout once more, if told to."""

    calls = 1

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x).relu()
        for _ in range(self.calls):
            made = self.inner(made)
        return self.down(made)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "end": lambda: nn.Sequential(Mlp(), nn.Dropout(0.2)),
    "middle": Middle,
    "middle and end": lambda: Middle(outer=0.3),
    "in place": lambda: Middle(inplace=True),
    "checkpoint inside": lambda: Inside(outer=0.3),
}


def states(model: nn.Module, x: Tensor, autocast: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Results of a step; the generator's state between forward and backward, and after both."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(x)
    between = torch.get_rng_state()
    loss.backward()
    assert x.grad is not None
    made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "x": x.grad, **made}, [between, torch.get_rng_state()]


WAYS = [
    *((kind, "float64", block) for kind in KINDS for block in (False, True)),
    *(
        (kind, how, True)
        for kind in ("middle and end", "in place")
        for how in ("float32", "bfloat16", "autocast")
    ),
]


@pytest.mark.parametrize(("kind", "how", "block"), WAYS)
def test_masks_and_generator_are_those_of_the_plain_step(kind: str, how: str, block: bool) -> None:
    """A single other element in a mask would show in float64."""
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    torch.manual_seed(0)
    model = Net(Block(KINDS[kind]()) if block else KINDS[kind]()).to(dtype)
    plain, before = states(model, batch(dtype), how == "autocast")
    outer = CheckpointAttachment(model.it, "it")
    with tiled(model):
        if block:
            outer.attach()
        found, after = states(model, batch(dtype), how == "autocast")
        if block:
            outer.undo()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if dtype is torch.bfloat16 or how == "autocast":  # plain rounds these sums over all rows by a tenth
        plain, found = ({n: v for n, v in made.items() if "norm" not in n} for made in (plain, found))
    assert error(found, plain) < {"float64": 1e-13, "float32": 1e-5}.get(how, 0.01)


def test_other_masks_would_show() -> None:
    """Guards the test above."""
    model = Net(Middle())
    plain = gradients(model, batch())
    model.it.inner.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    assert error(gradients(model, batch()), plain) > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_pytorchs_own_checkpoint(reentrant: bool) -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(WIDTH, WIDTH), Block(Middle(outer=0.3))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.block, self.first(x), use_reentrant=reentrant)
            return made.sin().sum()

    torch.manual_seed(0)
    model = Theirs().double()
    plain, before = states(model, batch(torch.float64))
    with tiled(model):
        found, after = states(model, batch(torch.float64))
    assert error(found, plain) < 1e-13
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_dropout_at_the_end_does_not_make_the_block_run_it_a_third_time() -> None:
    """Its mask is saved before the first tile runs, so the block's recompute may end there."""
    mlp = counting(Mlp())
    assert runs(Block(nn.Sequential(mlp, nn.Dropout(0.2))), True) == {"up": 2, "down": 2}


def test_a_graph_that_is_kept_gives_the_same_again() -> None:
    model = Net(Middle(outer=0.3))
    with tiled(model):
        loss = model(batch())
        loss.backward(retain_graph=True)
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(once[name], p.grad) for name, p in model.named_parameters())


def test_the_probability_is_that_of_the_call() -> None:
    """It may change from step to step, and between forward and backward."""

    def step(p: float) -> dict[str, Tensor]:
        model.zero_grad()
        x = batch(torch.float64).requires_grad_()
        model.it.inner.p = p
        torch.manual_seed(3)
        loss = model(x)
        model.it.inner.p = 0.9
        loss.backward()
        assert x.grad is not None
        return {"x": x.grad, "loss": loss.detach(), "rng": torch.get_rng_state().double()}

    model = Net(Middle()).double()
    for p in (0.5, 0.0, 0.1):
        plain = step(p)
        with tiled(model):
            assert error(step(p), plain) < 1e-13


def test_evaluation_draws_nothing() -> None:
    model = Net(Middle(outer=0.3)).eval().double()
    plain, before = states(model, batch(torch.float64))
    with tiled(model):
        found, after = states(model, batch(torch.float64))
    assert error(found, plain) < 1e-13
    torch.manual_seed(3)
    assert all(torch.equal(state, torch.get_rng_state()) for state in (*before, *after))


ASIDE: dict[str, tuple[Callable[[nn.Module], None], bool, str]] = {
    "everything": (lambda it: setattr(it.inner, "p", 1.0), True, "drops everything"),
    "layout": (lambda it: None, False, "not contiguous"),
    "calls": (lambda it: setattr(it, "calls", 2), True, "not called as they were"),
    "no calls": (lambda it: setattr(it, "calls", 0), True, "not called as they were"),
}


@pytest.mark.parametrize("name", ASIDE)
def test_where_tiles_would_drop_something_else_the_module_runs_as_it_is(name: str) -> None:
    change, contiguous, why = ASIDE[name]
    model = nn.ModuleDict({"it": Changing()})
    x = torch.randn(2, 300, WIDTH)
    x = x if contiguous else x.transpose(0, 1).contiguous().transpose(0, 1)

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        y = model["it"](x)
        y.sin().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [y.detach(), torch.get_rng_state(), *grads]

    (tiles,) = row_search.find(model)
    change(model["it"])
    plain = step()
    tiles.attach()
    found = step()
    tiles.undo()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert not tiles.used and why in tiles.reason


class Functional(Mlp):
    """Drops by a function, not by a module."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Flat(Middle):
    """Its dropout gets rows and features the other way round: another order of the numbers drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x).transpose(1, 2)).transpose(1, 2))


class Wide(Middle):
    """Its dropout works in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x).double()).float())


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Functional, "random numbers"),
        (lambda: nn.Sequential(Mlp(), nn.AlphaDropout(0.1)), "random numbers"),
        (Flat, "does not get one row for each row"),
        (Wide, "another dtype or layout"),
        (Again, "called more than once"),
    ],
)
def test_other_random_numbers_are_refused(build: Callable[[], nn.Module], why: str) -> None:
    model = nn.ModuleDict({"it": build()})
    assert "it" not in [tiles.path for tiles in row_search.find(model)]
    assert why in row_search.reasons(model)["it"]


def test_looking_at_it_and_running_it_leave_the_dropouts_as_they_are() -> None:
    model = Net(Middle(outer=0.3))
    state = torch.get_rng_state()
    with tiled(model):
        assert torch.equal(state, torch.get_rng_state())
        model(batch()).backward()
        twin = copy.deepcopy(model)
        assert "forward" not in model.it.inner.__dict__ and "forward" not in twin.it.inner.__dict__
    model.it.down = None  # an exception between two dropouts
    assert "forward" not in model.it.inner.__dict__


FAILS: list[bool] = []
"""A global: a recompute finds what hangs on the module, and its cells, as its forward found them."""


def test_an_exception_between_dropouts_leaves_the_module_usable() -> None:
    def fails(x: Tensor) -> Tensor:
        if FAILS:
            raise ValueError("in between")
        return x.relu()

    FAILS.clear()
    model = Net(nn.Sequential(nn.Dropout(0.1), Mlp(fails), nn.Dropout(0.1))).double()
    plain = gradients(model, batch(torch.float64))
    with tiled(model):
        for moment in ("forward", "backward"):
            FAILS[:] = [True] * (moment == "forward")
            with pytest.raises(ValueError, match="in between"):
                loss = model(batch(torch.float64))
                FAILS.append(True)
                loss.backward()
            assert not any("forward" in part.__dict__ for part in model.it)
        FAILS.clear()
        assert error(gradients(model, batch(torch.float64)), plain) < 1e-13


def test_masks_are_bytes() -> None:
    """Between forward and backward a module holds its input, and one byte per element dropped."""

    def steps() -> None:
        held.append(model["it"](x))

    model, x = nn.ModuleDict({"it": Middle()}), torch.randn(4096, WIDTH, requires_grad=True)
    held: list[Tensor] = []
    (tiles,) = row_search.find(model)
    tiles.attach()
    peak = peak_bytes(steps)
    tiles.undo()
    inside = row_tiles.tile_rows(4096, tiles.facts) * 64 * 4
    # The mask, the output, and one tile; plain would save three tensors of the mask's shape in float32.
    assert 4096 * 64 + 4096 * WIDTH * 4 <= peak <= 4096 * 64 + 4096 * WIDTH * 4 + 6 * inside


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_card_is_asked_for_its_mask_by_the_kernel_of_the_plain_step() -> None:
    """Without one: on `meta`, which is not the CPU either."""
    x = torch.empty(2, 5, WIDTH, device="meta", dtype=torch.bfloat16)
    part = nn.Dropout(0.2)
    dropping = Dropping({"drop": part}, [Drop("drop", 64)], x)
    assert "meta" in dropping.why_not(x)
    with _Calls() as seen:
        (mask,) = dropping.draw(x.device)
        rows = torch.empty(1, 4, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with dropping.applied([mask], slice(3, 7)):
            part.forward(rows).sum().backward()
    assert mask.shape == (2, 5, 64) and mask.dtype is torch.bool
    assert rows.grad is not None and rows.grad.shape == rows.shape
    assert seen.names.count("aten::native_dropout") == 1
    assert seen.names.count("aten::native_dropout_backward") == 2  # forward and backward of the tile
