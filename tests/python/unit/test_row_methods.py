# SPDX-License-Identifier: Apache-2.0
"""Tiles over a method of a block; sums of gradients inside products; models as people configure them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_row_dropout import states
from test_row_proof import Mlp, hugging_face
from test_row_tiles import ROWS, Counted, Net, batch, counting, error, gradients, tiled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from memscale.state import model_state
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles import row_search

WIDTH = 16


class Output(nn.Module):
    """Down, dropout, the residual and its norm: as BERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.drop(self.dense(x)) + residual)


class PostNorm(nn.Module):
    """A block that lets rows meet, and a method that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.up, self.act, self.output = nn.Linear(WIDTH, 64), nn.GELU(), Output()

    def feed_forward_chunk(self, x: Tensor) -> Tensor:
        return self.output(self.act(self.up(x)), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward_chunk(x + self.drop(self.mix(x.cumsum(1) / ROWS)))


class Scaled(PostNorm):
    """Its method uses a weight of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def feed_forward_chunk(self, x: Tensor) -> Tensor:
        return super().feed_forward_chunk(x) * self.scale


# ---- a method of a block -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [False, True], ids=["alone", "in a checkpointed block"])
def test_a_method_runs_in_tiles(block: bool) -> None:
    torch.manual_seed(0)
    model = Net(PostNorm()).double()
    plain, before = states(model, batch(torch.float64))
    outer = CheckpointAttachment(model.it, "it")
    with tiled(model) as found:
        assert [(tiles.path, tiles.method) for tiles in found] == [("it", "feed_forward_chunk")]
        assert found[0].facts.children == ("drop", "up", "act", "output")
        if block:
            outer.attach()
        treated, after = states(model, batch(torch.float64))
        if block:
            outer.undo()
    assert error(treated, plain) < 1e-13
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_norm_behind_the_residual_is_in_the_tiles_and_nothing_runs_three_times() -> None:
    model = Net(counting(PostNorm()))
    outer = CheckpointAttachment(model.it, "it")
    with tiled(model):
        outer.attach()
        Counted.rows = {}
        model(batch()).backward()
        outer.undo()
    assert {name: rows / ROWS for name, rows in Counted.rows.items()} == {
        "mix": 2,
        "up": 2,
        "output.dense": 2,
    }


def test_a_method_that_uses_more_than_its_parts_is_refused() -> None:
    model = Net(Scaled())
    assert row_search.find(model) == []
    assert "beside those of its parts" in row_search.reasons(model)["it"]


def test_attaching_to_a_method_leaves_no_trace() -> None:
    model = Net(PostNorm())
    plain = gradients(model, batch())
    with tiled(model) as found:
        assert model.it.feed_forward_chunk is model.it.__dict__["feed_forward_chunk"]
        twin = copy.deepcopy(model)
        assert "feed_forward_chunk" not in twin.it.__dict__
        assert error(gradients(twin, batch()), plain) < 1e-6 and not found[0].used
        file = io.BytesIO()
        torch.save(model, file)
        assert error(gradients(model, batch()), plain) < 1e-5
    assert "feed_forward_chunk" not in model.it.__dict__
    again = gradients(model, batch())
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found_again = gradients(loaded, batch())
    assert all(torch.equal(plain[name], found_again[name]) for name in plain)


def test_hooks_that_come_later_make_a_method_stand_aside() -> None:
    model = Net(PostNorm())
    plain = gradients(model, batch())
    with tiled(model, used=False) as found:
        handle = model.it.up.register_forward_hook(lambda *_: None)
        again = gradients(model, batch())
        assert "has hooks" in found[0].reason
        handle.remove()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_block_with_a_method_in_tiles_does_not_look_changed() -> None:
    """What stands in for it notes that it was used; that is no attribute that a forward changed."""
    model = Net(PostNorm())
    with tiled(model):
        with model_state.preserved(model) as changes:
            model(batch()).backward()
        assert not changes.attributes


def test_a_plan_takes_a_method_and_checkpoints_its_block() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(PostNorm() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.blocks(x).sin().sum()
            return made

    config = memscale.Config(memory_budget=1 << 20, enable_tiling=True, exact=False, enable_logging=False)
    plan = memscale.plan(Stack(), None, config, torch.zeros(4, 1024, WIDTH))
    (step,) = plan.steps
    assert step.modules == ("blocks.0", "blocks.1", "blocks.2") and step.types == ("PostNorm",)
    assert plan.active


# ---- sums inside products ------------------------------------------------------------------------------


def conv1d() -> nn.Module:
    """Products of GPT-2's kind: the weight lies the other way round."""
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return nn.Sequential(layer(64, WIDTH), nn.GELU(), layer(WIDTH, 64))


class Sparing(nn.Module):
    """A bias that is trained and a weight that is not; a weight of two products; ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu_(nn.functional.linear(x, self.down.weight.t()))
        return self.down(torch.relu_(self.up(x)) + wide)


class Writes(nn.Module):
    """Writes to what the tiles give."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        made = self.mlp(x)
        made += x.cumsum(1)
        return made


KINDS: dict[str, Callable[[], nn.Module]] = {"conv1d": conv1d, "sparing": Sparing, "written to": Writes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ROWS, 200])
def test_gradients_of_many_kinds_of_products(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind]()).double()
    x = batch(torch.float64)[:, : rows // 2].contiguous()
    plain = gradients(model, x)
    with tiled(model):
        assert error(gradients(model, x), plain) < 1e-13
        assert error(gradients(model, x), plain) < 1e-13  # and once more: sums begin anew


class _Made(TorchDispatchMode):
    """Notes the shape of everything that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = func._schema.returns and all(item.alias_info is None for item in func._schema.returns)
        self.shapes += [tuple(result.shape)] if fresh and isinstance(result, Tensor) else []
        return result


@pytest.mark.parametrize("kind", [Mlp, conv1d])
def test_a_weights_gradient_is_made_once_and_added_to(kind: Callable[[], nn.Module]) -> None:
    model = Net(kind())
    with tiled(model), _Made() as seen:  # around the forward, too: backward's tiles run under its modes
        loss = model(batch())
        seen.shapes.clear()
        loss.backward()
    assert seen.shapes.count((64, WIDTH)) == seen.shapes.count((WIDTH, 64)) == 1


def test_layers_whose_forward_was_replaced_are_left_alone() -> None:
    model = Net(Mlp()).double()
    plain = gradients(model, batch(torch.float64))
    with tiled(model):
        outer = CheckpointAttachment(model.it.up, "it.up")  # by a plan, inside the tiles
        outer.attach()
        assert error(gradients(model, batch(torch.float64)), plain) < 1e-13
        assert "forward" in model.it.up.__dict__ and "forward" not in model.it.down.__dict__
        outer.undo()
    assert not any("forward" in part.__dict__ for part in model.modules())


# ---- models as people configure them -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_default_dropout_of_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hugging_face()[name][0]().double().train()
    model.config.use_cache = False
    ids = torch.randint(3, 50, (100, 8), generator=torch.Generator().manual_seed(1))  # of several tiles
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})

    def step() -> tuple[dict[str, Tensor], Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(**inputs).last_hidden_state.sin().sum()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}, torch.get_rng_state()

    plain, before = step()
    with tiled(model):
        found, after = step()
    noise = {name for name, value in plain.items() if float(value.norm()) < 1e-9}  # zero but for rounding
    plain, found = ({n: v for n, v in made.items() if n not in noise} for made in (plain, found))
    assert error(found, plain) < 1e-11
    assert torch.equal(before, after)
