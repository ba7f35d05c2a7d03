# SPDX-License-Identifier: Apache-2.0
"""Our optimizer state in whole runs: what it takes, what plans say of it, resuming in a new process."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import memscale
from memscale import Config
from memscale.core.step_signature import optimizer_memory
from memscale.optim import give_back, is_patched, take_over
from memscale.techniques.optimizer.eight_bit_layout import layout_of
from optim_samples import OPTIMIZERS, OUR_ADAMW, network, train
from zoo.models import Case, case
from zoo.training import built, call, peak_bytes

pytestmark = OUR_ADAMW

QUIET = Config(memory_budget="4GiB", enable_logging=False)
DTYPES = [torch.float32, torch.bfloat16]


def batch_of(model_case: Case, dtype: torch.dtype) -> Any:
    return tree_map_only(
        Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, model_case.batch(0)
    )


def held_bytes(model: nn.Module, batch: Any) -> int:
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    return sum(value.untyped_storage().nbytes() for value in tensors if isinstance(value, Tensor))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.float32),
        ("gpt2", torch.bfloat16),
        ("bert", torch.float32),
        ("convnet", torch.float32),
        ("convnet", torch.bfloat16),
    ],
)
def test_what_it_takes_is_predicted(name: str, dtype: torch.dtype) -> None:
    model_case = case(name)
    model = built(model_case).to(dtype)
    batch = batch_of(model_case, dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = memscale.predict(model, optimizer, QUIET, batch)
    assert take_over(optimizer) == ""
    fresh = memscale.predict(model, optimizer, QUIET, batch)

    def step() -> None:
        output = call(model, batch)
        loss = model_case.loss(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = sum(entry["memscale_state"].nbytes for entry in optimizer.state.values())
    measured = held_bytes(model, batch) + state + peak_bytes(step)
    later = memscale.predict(model, optimizer, QUIET, batch)
    assert fresh.by_category["optimizer_state"] == later.by_category["optimizer_state"] == state
    saved = plain.by_category["optimizer_state"] - state
    assert plain.allocated_peak_bytes - fresh.allocated_peak_bytes == saved
    # Of `0.5 * x` autograd keeps the number, in 8 bytes that no trace sees: 9 times in a GPT-2 of 3 layers.
    unseen = 72 if name == "gpt2" else 0
    assert measured - unseen <= later.allocated_peak_bytes <= 1.02 * measured
    weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert state < (2.1 if dtype is torch.float32 else 3.1) * weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_allocates_nothing(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.ones(1000, 100, dtype=dtype)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    take_over(optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()

    def work() -> None:
        torch.empty(7)  # so that there is something to see
        optimizer.step()

    assert peak_bytes(work) == 28


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_what_pytorch_steps_is_told_as_well(name: str) -> None:
    ours, theirs = nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(5000, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([ours, theirs])
    if name == "adamw":
        optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [theirs], "amsgrad": True})
    assert take_over(optimizer) == ""
    for weight in (ours, theirs):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    layout, place = layout_of(optimizer), (1, 0) if name == "adamw" else (0, 1)
    assert layout is not None
    for weight, at in ((ours, (0, 0)), (theirs, place)):
        state = [value.nbytes for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
        assert sorted(layout.state(*at)) == sorted(state)
    bound = sum(layout.scratch(*place, on_card=False))
    assert layout.scratch(0, 0, on_card=False) == [] and peak_bytes(optimizer.step) <= bound


def test_the_optimizer_decides_what_a_plan_is_for() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    before = optimizer_memory(optimizer)
    take_over(optimizer)
    assert optimizer_memory(optimizer) != before
    give_back(optimizer)
    assert optimizer_memory(optimizer) == before


RUNS = (("adamw", "bfloat16"), ("sgd", "float32"), ("lion", "float32"))

RESUME = """
import sys
import torch
from memscale.optim import take_over
from optim_samples import OPTIMIZERS, network, train

for path, name, dtype in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    model = network(getattr(torch, dtype))
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    take_over(optimizer)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    for seed in (3, 4):
        train(model, optimizer, 3, seed)
        scheduler.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
"""


def test_resumed_in_a_new_process_every_bit_is_the_same(tmp_path: Path) -> None:
    words: list[str] = []
    expected = []
    for name, dtype in RUNS:
        model = network(getattr(torch, dtype))
        optimizer = OPTIMIZERS[name](model.parameters())
        take_over(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        words += [str(tmp_path / name), name, dtype]
        for seed in (1, 2, 3, 4):
            if seed == 3:
                saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                torch.save({key: value.state_dict() for key, value in saved.items()}, words[-3])
            train(model, optimizer, 3, seed)
            scheduler.step()
        expected.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{RESUME}"
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for path, mine in zip(words[::3], expected, strict=True):
        leaves, others = tree_leaves(mine), tree_leaves(torch.load(path, weights_only=True))
        assert len(leaves) == len(others)
        for a, b in zip(leaves, others, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_a_wrapper_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    inner = network()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    model, wrapper = accelerator.prepare(inner, optimizer)
    batch = torch.ones(4, 24)
    expected = memscale.predict(model, optimizer, QUIET, batch)
    assert memscale.predict(model, wrapper, QUIET, batch).by_category == expected.by_category
    assert len(optimizer.param_groups[0]["params"]) == 6
    with memscale.optimize(model, wrapper, QUIET.replace(use_8bit_optimizer=True), batch):
        assert is_patched(wrapper) and is_patched(optimizer)
    assert not is_patched(optimizer)
    assert take_over(wrapper) == "" and is_patched(optimizer)
    train(model, wrapper, 2)
    assert (
        all(entry["memscale_step"] == 2 for entry in optimizer.state.values()) and len(optimizer.state) == 6
    )
    state = wrapper.state_dict()
    give_back(optimizer)
    train(model, wrapper, 1)
    wrapper.load_state_dict(state)
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def test_looking_changes_no_bit_of_the_state() -> None:
    model, batch = network(), torch.ones(4, 24)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    config = QUIET.replace(use_8bit_optimizer=True)
    assert memscale.verify(model, batch, optimizer, config).passed
    memscale.plan(model, optimizer, config, batch)
    counted = memscale.predict(model, optimizer, config, batch).by_category["optimizer_state"]
    assert type(optimizer) is torch.optim.AdamW
    after = optimizer.state_dict()
    assert all(
        torch.equal(value, after["state"][index][name])
        for index, entry in before["state"].items()
        for name, value in entry.items()
    )
    take_over(optimizer)
    assert counted == sum(entry["memscale_state"].nbytes for entry in optimizer.state.values())


def test_an_optimizer_of_two_models_is_given_back_with_the_last() -> None:
    models, batch = [network(), network()], torch.ones(4, 24)
    optimizer = torch.optim.AdamW([value for model in models for value in model.parameters()])
    for model in models:
        memscale.wrap(model, QUIET.replace(use_8bit_optimizer=True), batch, optimizer=optimizer)
    memscale.detach(models[0])
    assert is_patched(optimizer)
    memscale.detach(models[1])
    assert type(optimizer) is torch.optim.AdamW


def test_wrapped_again_without_it_the_optimizer_is_given_back() -> None:
    model, batch = network(), torch.ones(4, 24)
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, QUIET.replace(use_8bit_optimizer=True), batch, optimizer=optimizer)
    assert is_patched(optimizer)
    memscale.wrap(model, QUIET, batch, optimizer=optimizer)
    assert not is_patched(optimizer)
    memscale.detach(model)
