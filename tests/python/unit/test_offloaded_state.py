# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a file: the same bits as in memory, the same object, whoever holds it, and back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gradient_samples import released
from memscale.optim import give_back, take_over
from memscale.optim.offload.attach import is_offloaded, offloaded_bytes, resident_state, send, take_back
from memscale.optim.offload.pieces import OFFLOADED
from offloaded_state_samples import CUT, PIECE, WHOLE, equal, opened, pair, parameters, step
from optim_samples import Lion

HOW: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same(both: Any, optimizers: Any) -> None:
    assert equal(both[0], both[1])
    plain, ours = (optimizer.state_dict() for optimizer in optimizers)
    assert equal(plain, ours)


# ---- the steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CUT)
def test_steps_are_those_of_pytorch(name: str, how: str) -> None:
    both, optimizers = pair(lambda p: CUT[name](p, **HOW[how]))
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert_same(both, optimizers)
    counted = [entry for entry in optimizers[1].state.values() if OFFLOADED in entry]
    assert len(counted) == 4  # the small one stays
    assert all(entry[OFFLOADED].layout.cut and len(entry[OFFLOADED].bounds) > 1 for entry in counted)
    assert not any(
        isinstance(value, Tensor) and value.numel() > 1 for entry in counted for value in entry.values()
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam", "nesterov"])
def test_other_dtypes(name: str, dtype: torch.dtype, how: str) -> None:
    if name == "nesterov" and how == "fused" and dtype is not torch.float64:
        pytest.skip("PyTorch's begins with what memory held")
    both, optimizers = pair(lambda p: CUT[name](p, **HOW[how]), dtype)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    for plain, ours in zip(*both, strict=True):
        assert torch.equal(plain.nan_to_num(), ours.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_two_threads(how: str, dtype: torch.dtype) -> None:
    """Each thread's share is odd."""
    make = CUT["adam" if how == "fused" else "sgd"]
    with threads(2):
        size = 2 * 32768 + 101
        torch.manual_seed(0)
        both = [nn.Parameter(torch.ones(size, dtype=dtype))], [nn.Parameter(torch.ones(size, dtype=dtype))]
        optimizers = [make(values, **HOW[how]) for values in both]
        assert send(optimizers[1], opened(), PIECE) == ""
        for values, optimizer in zip(both, optimizers, strict=True):
            step(values, optimizer, 2)
    assert_same(both, optimizers)


@pytest.mark.parametrize("name", WHOLE)
def test_other_optimizers_have_one_parameter_at_a_time(name: str) -> None:
    both, optimizers = pair(WHOLE[name])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert_same(both, optimizers)
    assert offloaded_bytes(optimizers[1]) > 0
    take_back(optimizers[1])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, seed=2)
    assert_same(both, optimizers)


@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_our_own_state(name: str, dtype: torch.dtype, moments: str) -> None:
    make: Any = {**CUT, **WHOLE}[name]
    both = parameters(dtype), parameters(dtype)
    optimizers = [make(values) for values in both]
    for optimizer in optimizers:
        assert take_over(optimizer, moments) == ""
    assert send(optimizers[1], opened(), PIECE) == ""
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    assert_same(both, optimizers)
    take_back(optimizers[1])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, seed=2)
        give_back(optimizer)
    assert_same(both, optimizers)


class Counting(torch.optim.Optimizer):
    """Counts steps for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] += 1
            for value in group["params"]:
                value.sub_(value.grad, alpha=group["lr"] / group["step"])


class Normed(torch.optim.Optimizer):
    """Each parameter's step depends on all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            norm = sum(value.grad.norm() for value in group["params"])
            for value in group["params"]:
                self.state[value]["seen"] = value.grad / norm
                value.sub_(self.state[value]["seen"])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (lambda p: torch.optim.LBFGS(p), "one state for all parameters"),
        (lambda p: torch.optim.SparseAdam(p), "sparse gradients only"),
        (Counting, "changes more than parameters and their state"),
        (Normed, "differently where others are stepped with it"),
    ],
)
def test_what_is_refused(kind: Any, why: str) -> None:
    optimizer = kind(parameters())
    before = type(optimizer)
    assert why in send(optimizer, opened())
    assert type(optimizer) is before


# ---- whatever a loop does ----------------------------------------------------------------------------


def test_a_loop_with_everything() -> None:
    """Groups, a schedule, clipping, a scaler, a closure, hooks, a frozen parameter, one without gradient."""

    def run(offloaded: bool) -> tuple[list[Tensor], list[str]]:
        values, seen = parameters(), list[str]()
        optimizer = torch.optim.AdamW([{"params": values[:2], "lr": 0.1}, {"params": values[2:4]}], lr=0.01)
        if offloaded:
            assert send(optimizer, opened(), PIECE) == ""
            assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
        optimizer.add_param_group({"params": values[4:]})
        schedule = LambdaLR(optimizer, lambda index: 1 / (1 + index))
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for index in range(5):
            if index == 2:
                values[3].requires_grad_(False)
            loss = torch.stack(
                [((value + index).sin() ** 2).mean() for value in values if value.requires_grad]
            ).sum()
            scaler.scale(loss).backward()
            if index == 3:
                values[0].grad = None
            if index == 4:
                assert values[2].grad is not None
                values[2].grad[0] = float("inf")  # this step is skipped
            scaler.unscale_(optimizer)
            if index != 4:
                nn.utils.clip_grad_norm_(values, 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)

        def closure() -> Tensor:
            seen.append("closure")
            optimizer.zero_grad()
            loss = torch.stack([value.square().mean() for value in values if value.requires_grad]).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        take_back(optimizer)
        return [value.detach() for value in values], seen

    assert equal(run(False), run(True))


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_schedule_from_before(name: str) -> None:
    def run(offloaded: bool) -> list[Tensor]:
        values = parameters()
        optimizer = {**CUT, **WHOLE}[name](values)
        schedule = LambdaLR(optimizer, lambda index: 1 / (1 + index))
        if offloaded:
            assert send(optimizer, opened(), PIECE) == ""
        for index in range(3):
            step(values, optimizer, 1, seed=index)
            schedule.step()
        take_back(optimizer)
        step(values, optimizer, 1, seed=9)
        return [value.detach() for value in values]

    assert equal(run(False), run(True))


def test_fused_steps_under_a_scaler() -> None:
    def run(offloaded: bool) -> list[Tensor]:
        values = parameters()
        optimizer = torch.optim.AdamW(values, lr=0.01, fused=True)
        if offloaded:
            assert send(optimizer, opened(), PIECE) == ""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for index in range(4):
            scaler.scale(torch.stack([(value + index).square().mean() for value in values]).sum()).backward()
            if index == 2:
                assert values[0].grad is not None
                values[0].grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [value.detach() for value in values]

    assert equal(run(False), run(True))


def test_gradients_of_other_forms() -> None:
    """Another order of dimensions, sparse, none: whoever can steps them, with the state that there is."""

    def run(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(500, 64))
        values = [*parameters(), table]
        optimizer = torch.optim.SGD(values, lr=0.1, momentum=0.9)
        if offloaded:
            assert send(optimizer, opened(), PIECE) == ""
        for index in range(4):
            step(values, optimizer, 1, seed=index)
            picture = values[4]
            picture.grad = torch.randn(picture.shape)
            table.grad = torch.eye(500, 64).to_sparse()
            values[0].grad = None
            optimizer.step()
        return [value.detach() for value in values]

    assert equal(run(False), run(True))


# ---- saving ------------------------------------------------------------------------------------------


def test_resume_with_and_without() -> None:
    both, optimizers = pair(CUT["adamw"])
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer)
    saved = io.BytesIO()
    torch.save(optimizers[1].state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved)
    expected = parameters()
    for value, start in zip(expected, both[0], strict=True):
        value.data.copy_(start.data)
    resumed = [CUT["adamw"](expected), CUT["adamw"](copy.deepcopy(expected))]
    assert send(resumed[1], opened(), PIECE) == ""
    for optimizer in resumed:
        optimizer.load_state_dict(copy.deepcopy(state))
    assert OFFLOADED in resumed[1].state[resumed[1].param_groups[0]["params"][0]]
    every = [*optimizers, *resumed]
    for optimizer in every:
        step(optimizer.param_groups[0]["params"], optimizer, seed=2)
    for optimizer in every[1:]:
        assert equal(every[0].param_groups[0]["params"], optimizer.param_groups[0]["params"])
        assert equal(every[0].state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("moments", [None, "code8"])
def test_copies_are_as_before(moments: str | None) -> None:
    (_, values), (_, optimizer) = pair(CUT["adamw"])
    if moments:
        with resident_state(optimizer):
            assert take_over(optimizer, moments) == ""
    step(values, optimizer)
    before = optimizer.state_dict()
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not is_offloaded(made)
        assert type(made) is (
            torch.optim.AdamW if moments is None else type(optimizer)._memscale_offload_base
        )
        assert equal(made.state_dict(), before)
        step(made.param_groups[0]["params"], made, seed=2)
    step(values, optimizer, seed=2)
    assert equal(made.param_groups[0]["params"], values)


def test_taken_back_it_is_what_it_was() -> None:
    values = parameters()
    optimizer = torch.optim.AdamW(values)
    step(values, optimizer, 1)
    before, attributes = copy.deepcopy(optimizer.state_dict()), set(vars(optimizer))
    offload = opened()
    assert send(optimizer, offload, PIECE) == ""
    assert "already" in send(optimizer, offload)
    held = offload.counters()["held_bytes_file"]
    assert (
        held == offloaded_bytes(optimizer) >= 8 * sum(value.numel() for value in values if value.numel() > 77)
    )
    take_back(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert set(vars(optimizer)) == attributes
    assert equal(optimizer.state_dict(), before)
    assert offload.counters()["block_count"] == 0


def test_a_parameter_is_forgotten_with_its_blocks() -> None:
    offload = opened()
    values = parameters()
    optimizer = Lion(values)
    assert send(optimizer, offload, PIECE) == ""
    step(values, optimizer, 1)
    blocks = offload.counters()["block_count"]
    del optimizer.state[values[0]]
    assert offload.counters()["block_count"] == blocks - 1


@pytest.mark.parametrize("piece", [512, 1 << 14])
@pytest.mark.parametrize("kind", ["fused", "lists"])
def test_what_a_step_writes_to_offloaded_gradients(kind: str, piece: int) -> None:
    found = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(150, 401), nn.Tanh(), nn.Linear(401, 150))
        how: dict[str, Any] = {"fused": True} if kind == "fused" else {"foreach": True, "nesterov": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, **how)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        with released(model) if elsewhere else nullcontext() as made:
            if made is not None:
                assert send(optimizer, opened(), PIECE) == ""
                made.window.piece_elements = piece
            for number in range(4):
                scaler.scale(model(torch.full((3, 150), 0.1 * number)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append([value.grad.clone() for value in model.parameters()])
            found.append([value.detach() for value in model.parameters()])
    assert equal(found[:5], found[5:])
