# SPDX-License-Identifier: Apache-2.0
"""Our optimizer state on a card, from Python: the same bits as on the CPU, and what goes in and out of it.

Runs on a card, and on the stand-in of tests/standin_cuda, whose kernels are these compiled for the host.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside
from memscale.optim import arrays, cards, give_back, is_patched, take_over
from memscale.optim.eight_bit import is_8bit, with_8bit_state
from memscale.optim.master_residuals import prepare
from memscale.optim.masters import is_half, master_of, to_bf16, to_fp32
from memscale.techniques.optimizer.eight_bit_layout import layout_of

SHAPES = ((64, 33), (1000,), (7,), (3, 5, 7, 2), (130, 129))
STEPS = 20

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

RULES: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, maximize=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.1),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Without NVIDIA's compiler there is nothing to test here."""
    reason = cards.why_not(torch.device("cuda", 0)) if torch.cuda.is_available() else "no card"
    if reason:
        pytest.skip(reason)


def weights(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters, always with the same values; one in channels_last."""
    source = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=source).to(dtype) for shape in SHAPES]
    made[3] = made[3].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(device)) for value in made]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Gradients, always the same in a step, of sizes from 1e-4 to 10."""
    source = torch.Generator().manual_seed(step)
    for value in parameters:
        gradient = torch.randn(value.shape, generator=source) * 10.0 ** -(step % 5 - 1)
        gradient = torch.empty_like(value, device="cpu", requires_grad=False).copy_(gradient)
        value.grad = gradient.to(device=value.device, dtype=value.dtype)


def optimizer_of(make: Make, parameters: list[nn.Parameter], moments: str | None) -> torch.optim.Optimizer:
    """In two groups; with our state unless `moments` is None."""
    made = make([{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 3e-3}])
    assert moments is None or take_over(made, moments) == ""
    return made


def assert_same(here: list[Tensor], there: list[Tensor], what: str) -> None:
    for index, (a, b) in enumerate(zip(here, there, strict=True)):
        assert torch.equal(a.detach(), b.detach().cpu()), f"{what} {index}"


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The bytes of all state, in the parameters' order."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    return [optimizer.state[value][arrays.BYTES] for value in parameters]


def assert_same_values(here: Any, there: Any, path: str = "") -> None:
    """Two state dicts, value by value."""
    if isinstance(here, dict):
        assert here.keys() == there.keys(), path
        for key, value in here.items():
            assert_same_values(value, there[key], f"{path}.{key}")
    elif isinstance(here, Tensor):
        assert torch.equal(here.cpu(), there.cpu()), path
    else:
        assert here == there, path


class TestSteps:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("moments", ["code8", "fp32"])
    @pytest.mark.parametrize("rule", RULES)
    def test_have_the_bits_of_the_cpu(self, rule: str, moments: str, dtype: torch.dtype) -> None:
        here, there = weights("cpu", dtype), weights("cuda", dtype)
        first, second = (optimizer_of(RULES[rule], values, moments) for values in (here, there))
        for step in range(1, STEPS + 1):
            set_gradients(here, step)
            set_gradients(there, step)
            first.step()
            second.step()
        assert_same(here, there, "weight")
        assert_same(state_of(first), state_of(second), "state")
        assert {state.device for state in state_of(second)} == {there[0].device}
        assert [value._version for value in here] == [value._version for value in there]

    def test_lion(self) -> None:
        class Lion(torch.optim.Optimizer):
            """Settings of lion-pytorch. Its step would show that ours did not run."""

            def __init__(self, params: Any, lr: float = 1e-2) -> None:
                super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                assert not any(group["params"] for group in self.param_groups)

        here, there = weights("cpu"), weights("cuda")
        for values in (here, there):
            optimizer = optimizer_of(Lion, values, "code8")
            for step in range(1, STEPS + 1):
                set_gradients(values, step)
                optimizer.step()
        assert_same(here, there, "weight")

    def test_gradients_in_another_order(self) -> None:
        here, there = weights("cpu"), weights("cuda")
        for values in (here, there):
            optimizer = optimizer_of(RULES["adamw"], values, "code8")
            for step in range(1, 4):
                set_gradients(values, step)
                for value in values:
                    gradient = value.grad
                    assert gradient is not None
                    value.grad = gradient.contiguous(memory_format=torch.contiguous_format)
                optimizer.step()
        assert_same(here, there, "weight")

    def test_a_scaler_skips_steps(self) -> None:
        here, there = weights("cpu"), weights("cuda")
        for values in (here, there):
            optimizer = optimizer_of(RULES["adamw"], values, "code8")
            scaler = torch.amp.GradScaler(values[0].device.type, init_scale=64.0)
            for step in range(1, 5):
                set_gradients(values, step)
                scaler.scale(torch.ones((), device=values[0].device))  # makes the scale
                for value in values:
                    assert value.grad is not None
                    value.grad.mul_(float("inf") if step == 3 else scaler.get_scale())
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(values, 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert {optimizer.state[value][arrays.STEP] for value in values} == {3}
        assert_same(here, there, "weight")

    def test_a_parameter_may_move(self) -> None:
        here, moving = weights("cpu"), weights("cpu")
        first, second = (optimizer_of(RULES["adamw"], values, "code8") for values in (here, moving))
        for step in range(1, 7):
            if step in (3, 5):
                for value in moving:
                    value.data = value.data.to("cuda" if step == 3 else "cpu")
            set_gradients(here, step)
            set_gradients(moving, step)
            first.step()
            second.step()
        assert_same(here, moving, "weight")
        assert_same(state_of(first), state_of(second), "state")

    def test_parameters_on_both(self) -> None:
        here, mixed = weights("cpu"), [*weights("cpu")[:3], *weights("cuda")[3:]]
        for values in (here, mixed):
            optimizer = optimizer_of(RULES["adam"], values, "code8")
            for step in range(1, 5):
                set_gradients(values, step)
                optimizer.step()
        assert_same(here, mixed, "weight")

    def test_goes_to_the_current_stream(self) -> None:
        values = weights("cuda")
        optimizer = optimizer_of(RULES["adamw"], values, "code8")
        set_gradients(values, 1)
        seen: list[tuple[int | None, int]] = []

        def noted(stream: int, device: torch.device) -> None:
            seen.append((device.index, stream))

        with beside(after={cards.current_stream: noted}):
            optimizer.step()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.step()
        torch.cuda.synchronize()
        assert {at[1] for at in seen} == {torch.cuda.default_stream().cuda_stream, side.cuda_stream}
        assert {at[0] for at in seen} == {values[0].device.index}

    def test_takes_nothing_beside_the_state(self) -> None:
        values = weights("cuda")
        optimizer = optimizer_of(RULES["adamw"], values, "code8")
        layout = layout_of(optimizer)
        assert layout is not None
        told = sum(
            -(-sum(layout.state(number, index)) // 512) * 512
            for number, group in enumerate(optimizer.param_groups)
            for index in range(len(group["params"]))
        )
        set_gradients(values, 1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.memory_allocated() - before == told
        assert torch.cuda.max_memory_allocated() - before == told
        set_gradients(values, 2)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() == before


class TestWhatStays:
    def test_sparse_gradients(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[Tensor] = []
        module = sys.modules[torch.optim.SGD.__module__]
        monkeypatch.setattr(module, "sgd", lambda values, *_, **__: seen.extend(values))
        monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
        caplog.set_level(logging.INFO, "memscale")
        table = nn.Parameter(torch.ones(10, 4, device="cuda"))
        optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
        assert take_over(optimizer) == ""
        index = torch.tensor([[1, 3]], device="cuda")
        values = torch.ones(2, 4, device="cuda")
        table.grad = torch.sparse_coo_tensor(index, values, (10, 4), check_invariants=False)
        optimizer.step()
        assert [value is table for value in seen] == [True]
        assert "PyTorch's for some parameters (sparse gradients)" in caplog.text

    def test_a_graph_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values = weights("cuda")
        optimizer = optimizer_of(RULES["momentum"], values, "code8")
        set_gradients(values, 1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="CUDA graph"):
            optimizer.step()

    def test_without_a_compiler_there_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMSCALE_NVRTC", "/nowhere/libnvrtc.so")
        monkeypatch.setattr(cards, "why_not", cards.Cards().why_not)  # as in a new process
        values = weights("cuda")
        optimizer = torch.optim.AdamW(values)
        same, line = with_8bit_state(optimizer)
        assert "no kernels for cuda:0: cannot open /nowhere/libnvrtc.so" in line and "\n" not in line
        assert is_8bit(same) or same is optimizer
        assert not is_patched(optimizer)


class TestInAndOut:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("rule", ["adamw", "momentum"])
    def test_a_state_dict_is_that_of_the_cpu(self, rule: str, dtype: torch.dtype) -> None:
        here, there = weights("cpu", dtype), weights("cuda", dtype)
        optimizers = [optimizer_of(RULES[rule], values, "code8") for values in (here, there)]
        for step in range(1, 4):
            for values, optimizer in zip((here, there), optimizers, strict=True):
                set_gradients(values, step)
                optimizer.step()
        states = [optimizer.state_dict() for optimizer in optimizers]
        assert_same_values(*states)
        moments = [value for entry in states[1]["state"].values() for value in entry.values()]
        assert {value.device.type for value in moments if isinstance(value, Tensor)} == {"cpu"}

    @pytest.mark.parametrize("goes", ["cpu-to-card", "card-to-cpu"])
    def test_a_run_goes_on_elsewhere(self, goes: str) -> None:
        places = ("cpu", "cuda") if goes == "cpu-to-card" else ("cuda", "cpu")
        whole = weights(places[0], torch.bfloat16)
        optimizer = optimizer_of(RULES["adamw"], whole, "code8")
        other = weights(places[1], torch.bfloat16)
        resumed = optimizer_of(RULES["adamw"], other, "code8")
        for step in range(1, 7):
            if step == 4:
                with torch.no_grad():
                    for value, now in zip(other, whole, strict=True):
                        value.copy_(now)
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                resumed.load_state_dict(torch.load(file, map_location="cpu"))
            set_gradients(whole, step)
            optimizer.step()
            if step >= 4:
                set_gradients(other, step)
                resumed.step()
        assert_same([value.cpu() for value in whole], other, "weight")
        assert_same([value.cpu() for value in state_of(optimizer)], state_of(resumed), "state")

    def test_pytorch_takes_it_and_gives_it_back(self) -> None:
        values, others = weights("cuda"), weights("cuda")
        optimizer = optimizer_of(RULES["adamw"], values, "fp32")
        plain = optimizer_of(RULES["adamw"], others, None)
        for step in range(1, 4):
            set_gradients(values, step)
            optimizer.step()
        state = optimizer.state_dict()
        plain.load_state_dict(state)
        loaded = plain.state[others[0]]["exp_avg"]
        assert loaded.device == others[0].device
        again = optimizer_of(RULES["adamw"], weights("cuda"), "fp32")
        again.load_state_dict(plain.state_dict())
        assert_same([value.cpu() for value in state_of(optimizer)], state_of(again), "state")
        give_back(optimizer)
        moments = optimizer.state[values[0]]["exp_avg"]
        assert moments.device == values[0].device and torch.equal(moments.cpu(), loaded.cpu())

    def test_copies(self) -> None:
        values = weights("cuda")
        optimizer = optimizer_of(RULES["adamw"], values, "code8")
        set_gradients(values, 1)
        optimizer.step()
        twin = copy.deepcopy(optimizer)
        assert_same([value.cpu() for value in state_of(optimizer)], state_of(twin), "state")
        assert {state.device for state in state_of(twin)} == {values[0].device}


class TestMasters:
    def test_train_with_the_bits_of_the_cpu(self) -> None:
        results = []
        for device in ("cpu", "cuda"):
            values = weights(device)
            for moments in ("fp32", "code8"):
                optimizer = optimizer_of(RULES["adamw"], values, moments)
                for value in values:
                    to_bf16(optimizer, value)
                for step in range(1, 6):
                    set_gradients(values, step)
                    optimizer.step()
                masters = [master_of(value) for value in values]
                shown = [master.shown() for master in masters if master is not None]
                assert {value.device.type for value in shown} == {"cpu"}
                results.append([value.cpu() for value in shown])
                for value in values:
                    to_fp32(value)
                    assert not is_half(value) and value.dtype is torch.float32
                give_back(optimizer)
        half = len(results) // 2
        for here, there in zip(results[:half], results[half:], strict=True):
            assert_same(here, there, "master")

    def test_to_bf16_and_back_loses_nothing(self) -> None:
        values, before = weights("cuda"), weights("cpu")
        optimizer = optimizer_of(RULES["adamw"], values, "fp32")
        for value in values:
            to_bf16(optimizer, value)
            prepare(optimizer, optimizer.param_groups[0])  # type: ignore[arg-type]
            assert value.dtype is torch.bfloat16
            to_fp32(value)
        assert_same(before, values, "weight")


@pytest.fixture
def small_model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 4)).cuda()


class TestFromOutside:
    def test_apply_all_optimizations(self, small_model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(small_model.parameters(), lr=1e-3)
        config = memscale.Config(use_8bit_optimizer=True, enable_logging=False)
        _, used = memscale.apply_all_optimizations(small_model, optimizer, config)
        assert used is optimizer and is_patched(optimizer)
        batch = torch.randn(5, 32, device="cuda")
        small_model(batch).sum().backward()
        optimizer.step()
        assert optimizer.state[small_model[0].weight][arrays.BYTES].is_cuda
        memscale.detach(small_model)
        assert not is_patched(optimizer) and optimizer.state[small_model[0].weight]["exp_avg"].is_cuda

    def test_optimize(self, small_model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(small_model.parameters(), lr=1e-3)
        config = memscale.Config(use_8bit_optimizer=True, enable_logging=False)
        batch = torch.randn(5, 32, device="cuda")
        with memscale.optimize(small_model, optimizer, config, sample_input=batch):
            assert is_patched(optimizer)
            small_model(batch).sum().backward()
            optimizer.step()
        assert not is_patched(optimizer)
