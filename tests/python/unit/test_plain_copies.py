# SPDX-License-Identifier: Apache-2.0
"""Copies and files of a wrapped model are plain models, and say nothing of MemScale."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.torchkit import plain_copies
from zoo.models import case
from zoo.training import SMALLEST, built, same_bits


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"memscale" not in file.getvalue()
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"memscale" not in data  # it can be loaded where MemScale is not installed
    loaded: nn.Module = pickle.loads(data)
    return loaded


WAYS = [copy.deepcopy, _pickled, _saved]


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and plain values of all that hangs on a model's modules."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            yield f"{path}.{key}", value if isinstance(value, (bool, int, float, str)) else type(value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 64)
        self.blocks = nn.Sequential(*(self._block() for _ in range(3)))
        self.head = nn.Linear(64, 300)

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.words(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net().train()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.arange(64).view(4, 16)
    return ids, ids + 1


CONFIGS = {
    "checkpoints": SMALLEST,
    "tiles": Config(memory_budget=1, enable_logging=False, exact=False),
    "offload": Config(
        memory_budget=1,
        enable_logging=False,
        enable_offloading=True,
        async_offload=True,
        async_config=AsyncOffloadConfig(tiers=("file",), directory=tempfile.gettempdir()),
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("name", CONFIGS)
def test_a_copy_has_what_a_plain_models_copy_has(name: str, way: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = net(), net()
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, CONFIGS[name], sample_input=batch(), optimizer=optimizer)
    model(*batch()).backward()
    twin = way(model)
    assert dict(attributes(way(plain))) == dict(attributes(twin))
    assert same_bits(plain(*batch()).detach(), twin(*batch()).detach())
    before = dict(attributes(model))
    memscale.detach(model)
    assert dict(attributes(plain)) == dict(attributes(model)) != before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_what_is_switched_off_is_on_in_copies(way: Callable[[nn.Module], nn.Module]) -> None:
    """A transformers model's own checkpoints. Its configuration is nobody's but the user's."""
    gpt2 = case("gpt2")
    model: Any = built(gpt2)
    model.transformer.gradient_checkpointing = True
    model.config.use_cache = True
    expected = dict(attributes(way(model)))
    memscale.wrap(model, SMALLEST, gpt2.batch(0))
    assert model.config.use_cache and not model.transformer.gradient_checkpointing
    twin: Any = way(model)
    assert twin.config.use_cache and twin.config is twin.transformer.config
    assert expected == dict(attributes(twin))
    memscale.detach(model)
    assert model.config.use_cache and not any("__reduce_ex__" in vars(module) for module in model.modules())


def test_a_shallow_copy_has_the_same_children_and_no_plan() -> None:
    model = memscale.wrap(net(), SMALLEST, batch())
    twin = copy.copy(model)
    assert vars(twin).keys() == vars(net()).keys()
    assert twin.blocks is model.blocks
    loss = model(*batch())
    assert same_bits(loss.detach(), twin(*batch()).detach())


def test_a_part_of_a_model() -> None:
    model = memscale.wrap(net(), SMALLEST, batch())
    for way in WAYS:
        part = way(model.blocks)
        assert not any("forward" in vars(module) for module in part.modules())
        memscale.detach(memscale.wrap(nn.Sequential(part), SMALLEST, torch.ones(2, 64)))


def test_a_class_with_a_deepcopy_and_a_reduce_of_its_own() -> None:
    """`torch.fx` graphs copy their own dictionaries."""
    plain = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).train()
    keys = dict(attributes(copy.deepcopy(plain)))
    model = memscale.wrap(plain, SMALLEST, torch.ones(2, 4))
    assert memscale.executor_of(model) is not None
    for way in WAYS:
        twin = way(model)
        assert "forward" not in vars(twin) and not any(
            isinstance(v, plain_copies.Ours) for v in vars(twin).values()
        )
        assert same_bits(twin(torch.ones(2, 4)).detach(), model(torch.ones(2, 4)).detach())
    assert dict(attributes(copy.deepcopy(model))) == keys
    memscale.detach(model)
    assert not {"__reduce_ex__", "__deepcopy__"} & vars(model).keys()


class Counted(nn.Linear):
    """Leaves a cache out of its files, as its own `__getstate__` and `__setstate__` say."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}


def test_a_class_with_a_state_of_its_own() -> None:
    model = Counted(4, 4)
    model.cache = 3
    attachment = CheckpointAttachment(model, "")
    attachment.attach()
    twin = pickle.loads(pickle.dumps(model))
    assert twin.cache is None and vars(twin).keys() == vars(Counted(4, 4)).keys() | {"cache"}
    attachment.undo()
    assert "__reduce_ex__" not in vars(model)


def test_a_forward_that_was_replaced_before_is_there_in_copies() -> None:
    model = nn.Linear(4, 4)
    model.forward = torch.tanh  # type: ignore[assignment]
    first, second = (CheckpointAttachment(model, "") for _ in range(2))
    first.attach()
    second.attach()
    for way in (*WAYS, copy.copy):
        assert way(model).forward is torch.tanh
    second.undo()
    assert copy.deepcopy(model).forward is torch.tanh and "__reduce_ex__" in vars(model)
    first.undo()
    assert model.forward is torch.tanh and "__reduce_ex__" not in vars(model)


def test_a_stand_in_that_somebody_else_has_kept() -> None:
    """As accelerate keeps the forward that it has found."""
    model = nn.Linear(4, 4)
    attachment = CheckpointAttachment(model, "")
    attachment.attach()
    model._original_forward = model.forward
    for detached in (False, True):
        if detached:
            attachment.undo()
        for way in (copy.deepcopy, _pickled):
            twin = way(model)
            assert twin._original_forward.__self__ is twin
            assert twin._original_forward.__func__ is nn.Linear.forward


def test_a_reduce_of_somebody_else_is_asked_and_left() -> None:
    model = nn.Linear(4, 4)
    theirs = vars(model)["__reduce_ex__"] = lambda protocol: (nn.Linear, (4, 4), {"bias": None})
    plain_copies.begin(model)
    assert copy.deepcopy(model).bias is None
    plain_copies.end(model)
    assert vars(model)["__reduce_ex__"] is theirs
