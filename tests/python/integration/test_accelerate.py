# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate around a wrapped model: the bits of the same run without MemScale."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from zoo.blocks import Block, Stack, inputs
from zoo.models import Case, case, mean_square
from zoo.training import SMALLEST, built, call, same_bits

accelerate = pytest.importorskip("accelerate")  # requirements/test.txt has it

STACK = Case("stack", functools.partial(Stack, functools.partial(Block, 0.1)), inputs, mean_square)
RUNS = [  # case, precision, batches per step, with a sample
    (STACK, "no", 1, True),
    (STACK, "bf16", 2, False),
    (case("convnet"), "bf16", 1, False),
    (case("convnet"), "no", 2, True),
    (case("gpt2"), "bf16", 2, False),
]


def trained(
    case: Case, when: str | None, precision: str = "no", accumulate: int = 1, sample: bool = False
) -> tuple[list[Tensor], nn.Module]:
    """Losses, gradients and weights of four batches; `when` is the moment of the wrap."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    model = built(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = case.batch(0) if sample else None
    if when == "before":
        memscale.wrap(model, SMALLEST, batch)
    model, optimizer = accelerator.prepare(model, optimizer)
    if when == "after":
        memscale.wrap(model, SMALLEST, batch)
    torch.manual_seed(5)
    values = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = case.loss(call(model, case.batch(step)))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    values += [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    return values, model


reference = functools.lru_cache(maxsize=32)(trained)


def assert_equal(plain: list[Tensor], planned: list[Tensor]) -> None:
    assert len(plain) == len(planned) > 0
    assert all(same_bits(a, b) for a, b in zip(plain, planned, strict=True))


def active(model: nn.Module) -> list[Any]:
    plan = memscale.executor_of(model).plan
    return [] if plan is None else plan.active


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0].name}-{run[1]}-{run[2]}")
def test_prepared(run: tuple[Case, str, int, bool], when: str) -> None:
    case, precision, accumulate, sample = run
    plain, _ = reference(case, None, precision, accumulate)
    planned, model = trained(case, when, precision, accumulate, sample)
    assert_equal(plain, planned)
    assert active(model)


@pytest.mark.parametrize("keep", [True, False], ids=["keep_amp", "drop_amp"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_unwrapped_models_run_as_a_plain_one_does(when: str, keep: bool) -> None:
    """Accelerate rebinds forwards by `__func__` and `__wrapped__`."""

    def output(when: str | None) -> Tensor:
        _, model = trained(STACK, when, "bf16")
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        inner = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
        assert inner is model
        torch.manual_seed(3)
        result: Tensor = call(inner, STACK.batch(0))
        return result.detach()

    assert same_bits(output(None), output(when))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_of_a_prepared_model_runs_on_its_own_weights(when: str) -> None:
    """An averaged model, for instance. A copied closure would run the original."""
    results = []
    for moment in (None, when):
        _, model = trained(STACK, moment, "bf16")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.manual_seed(3)
        results.append(call(twin, STACK.batch(0)).detach())
    assert same_bits(*results) and results[1].abs().sum() > 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_detached_it_trains_as_the_plain_one(when: str, precision: str) -> None:
    def more(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(9)
        STACK.loss(call(model, STACK.batch(7))).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    _, plain = trained(STACK, None, precision)
    _, model = trained(STACK, when, precision)
    memscale.detach(model)
    assert not any(memscale.executor_of(module) is not None for module in model.modules())
    assert_equal(more(plain), more(model))


@pytest.mark.parametrize("when", [None, "before", "after"])
def test_states_are_saved_and_loaded(when: str | None, tmp_path: Any) -> None:
    _, model = trained(STACK, when)
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(kept) == list(built(STACK).state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    assert all(same_bits(value, kept[name]) for name, value in model.state_dict().items())


def test_a_smaller_batch_size_after_running_out_of_memory() -> None:
    """`find_executable_batch_size` runs the loop again, on the same wrapped model."""
    tried: list[int] = []

    def loop(batch_size: int, wrapped: bool) -> list[Tensor]:
        tried.append(batch_size)
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.free_memory()
        model = built(STACK)
        if wrapped:
            memscale.wrap(model, SMALLEST)
        model = accelerator.prepare(model)
        torch.manual_seed(5)
        output = model(inputs(0)[0][:batch_size])
        if batch_size > 100:
            raise RuntimeError("CUDA out of memory.")
        mean_square(output).backward()
        assert not wrapped or active(model)
        return [parameter.grad.clone() for parameter in model.parameters()]

    results = [
        accelerate.utils.find_executable_batch_size(
            functools.partial(_first, loop, wrapped), starting_batch_size=128
        )()
        for wrapped in (False, True)
    ]
    assert_equal(*results)
    assert len(tried) > 2


def _first(loop: Any, wrapped: bool, batch_size: int) -> Any:
    return loop(batch_size, wrapped)
