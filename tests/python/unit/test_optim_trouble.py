# SPDX-License-Identifier: Apache-2.0
"""Our optimizer state where something is odd: handled as PyTorch handles it, or refused with a reason."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calls import beside, failing
from memscale.optim import convert_state, give_back, is_patched, take_over
from memscale.optim.steps import CoreStep
from optim_samples import OPTIMIZERS, Lion, equal, network, train

NAMES = ["adamw", "sgd", "lion"]


def adamw(*parameters: Tensor, moments: str = "fp32", **more: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, **more)
    assert take_over(optimizer, moments) == ""
    return optimizer


def step(optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def ours(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return "memscale_state" in optimizer.state[parameter]


# ---- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nan_goes_where_pytorch_lets_it_go(name: str) -> None:
    weights = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))]
    for weight, taken in zip(weights, (False, True), strict=True):
        optimizer = OPTIMIZERS[name]([weight])
        if taken:
            take_over(optimizer)
        step(optimizer)
        weight.grad = torch.ones(300)
        weight.grad[7] = float("nan")
        optimizer.step()
    assert weights[1].isnan().nonzero().tolist() == [[7]]
    assert bool(weights[0].isnan()[7]) is (name != "lion")  # where PyTorch takes the sign of NaN for 0


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-20, 1e18, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_no_nan_of_zero_denormal_and_huge_gradients(name: str, dtype: torch.dtype, value: float) -> None:
    if name == "sgd":
        value = min(value, 1e37)  # its momentum is ten times as large
    weight = nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = OPTIMIZERS[name]([weight])
    take_over(optimizer)
    for sign in (1, -1, 1):
        weight.grad = (torch.linspace(-1, sign, 300) * value).to(dtype)
        optimizer.step()
    assert bool(weight.isfinite().all())


def test_sparse_gradients_are_left_to_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for taken in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if taken:
            assert take_over(optimizer, "fp32") == ""
        with caplog.at_level(logging.INFO, "memscale"):
            for index in range(3):
                model(torch.tensor([index, 3, 3])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([value.detach().clone() for value in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert not ours(optimizer, model[0].weight) and ours(optimizer, model[1].weight)
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer state: PyTorch's for some parameters (sparse gradients)"
    ]


def test_sparse_gradients_that_pytorch_refuses() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = adamw(weight)
    weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse"):
        optimizer.step()


@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_channels_last(moments: str) -> None:
    """Kernels and gradients in any order of dimensions are the same elements."""
    results = []
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 8, 4, 3, 3, generator=generator)
    for weight_form, gradient_form in (
        (torch.contiguous_format, torch.contiguous_format),
        (torch.channels_last, torch.channels_last),
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ):
        weight = nn.Parameter(torch.linspace(-1, 1, 288).view(8, 4, 3, 3).to(memory_format=weight_form))
        optimizer = adamw(weight, moments=moments)
        for gradient in gradients:
            weight.grad = gradient.to(memory_format=gradient_form)
            optimizer.step()
        average = optimizer.state_dict()["state"][0]["exp_avg"]
        assert average.stride() == weight.stride()
        results.append([weight.detach().contiguous(), average.contiguous()])
    assert equal(results[0], results[2]) and equal(results[1], results[3])
    if moments == "fp32":
        assert equal(results[0], results[1])
    else:
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0.03)


def test_a_gradient_of_another_type() -> None:
    weight, plain = nn.Parameter(torch.ones(300, dtype=torch.bfloat16)), nn.Parameter(torch.ones(300))
    optimizer, standard = adamw(weight), torch.optim.AdamW([plain], lr=1e-2)
    for _ in range(3):
        plain.grad = torch.linspace(-1, 1, 300)
        weight.grad = plain.grad.bfloat16()
        optimizer.step()
        standard.step()
    assert float((weight.float() - plain).detach().abs().max()) <= 2.0**-8


# ---- parameters that change --------------------------------------------------------------------------


def test_groups_that_are_added_and_parameters_that_are_frozen() -> None:
    results = []
    for taken in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        if taken:
            take_over(optimizer, "fp32")
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
        train(model, optimizer, 2, seed=2)
        model[0].weight.requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        results.append(train(model, optimizer, 2, seed=3))
        assert torch.equal(model[0].weight, frozen) and len(optimizer.state) == 4
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_group_that_is_switched_to_what_we_have_not(caplog: pytest.LogCaptureFixture) -> None:
    weight, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = adamw(weight)
    optimizer.add_param_group({"params": [other], "lr": torch.tensor(0.1)})
    with caplog.at_level(logging.INFO, "memscale"):
        step(optimizer)
        step(optimizer)
    assert ours(optimizer, weight) and set(optimizer.state[other]) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(caplog.records) == 1 and "lr is a tensor" in caplog.records[0].getMessage()
    optimizer.param_groups[1]["lr"] = 0.1
    step(optimizer)
    assert ours(optimizer, other) and optimizer.state[other]["memscale_step"] == 3
    give_back(optimizer)
    assert optimizer.state[other]["step"] == 3


@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_a_parameter_that_gets_another_dtype(moments: str) -> None:
    layer = nn.Linear(30, 10, bias=False)
    optimizer = adamw(layer.weight, moments=moments)
    step(optimizer)
    for dtype in (torch.bfloat16, torch.float32):
        before = optimizer.state_dict()["state"][0]
        layer.to(dtype)
        convert_state(optimizer)
        after = optimizer.state_dict()["state"][0]
        assert torch.equal(before["exp_avg"], after["exp_avg"])
        assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])
        step(optimizer)
    assert optimizer.state[layer.weight]["memscale_step"] == 3
    layer.half()
    step(optimizer)
    entry = optimizer.state[layer.weight]
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"} and entry["exp_avg"].dtype == torch.float16
    layer.float()
    step(optimizer)
    assert optimizer.state[layer.weight]["memscale_step"] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_a_parameter_that_gets_another_order(moments: str, dtype: torch.dtype) -> None:
    layer = nn.Conv2d(4, 8, 3, bias=False).to(dtype)
    optimizer = adamw(layer.weight, moments=moments)
    layer.weight.grad = torch.randn(8, 4, 3, 3).to(dtype)
    optimizer.step()
    before = optimizer.state_dict()
    layer.to(memory_format=torch.channels_last)
    convert_state(optimizer)
    after = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq") if moments == "fp32" else ():
        assert torch.equal(before["state"][0][name], after["state"][0][name])
    if dtype is torch.bfloat16:
        rests = [state["memscale_optim"]["state"][0]["rest"] for state in (before, after)]
        assert torch.equal(*rests)
    assert after["state"][0]["exp_avg"].stride() == layer.weight.stride()
    optimizer.step()


def test_a_parameter_of_another_size() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = adamw(weight)
    step(optimizer)
    weight.data = torch.ones(9)
    weight.grad = torch.ones(9)
    with pytest.raises(ValueError, match=r"shape \(9,\); its optimizer state is for \(8,\)"):
        optimizer.step()
    assert bool((weight == 1).all())


def test_a_parameter_that_is_laid_out_as_none_that_it_steps() -> None:
    results = []
    for taken in (False, True):
        weight, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        optimizer = torch.optim.AdamW([weight, other], lr=1e-2)
        if taken:
            take_over(optimizer, "fp32")
        step(optimizer)
        weight.data = torch.empty(16)[::2].copy_(weight.detach())  # with gaps
        step(optimizer)
        results.append([weight.detach(), other.detach()])
        assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)
    assert ours(optimizer, other) and optimizer.state[weight]["step"] == 2


def test_nothing_at_all() -> None:
    weight, other = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(3))
    optimizer = adamw(weight, other, moments="code8")
    step(optimizer)
    state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].shape == (0, 3)
    optimizer.load_state_dict(state)
    step(optimizer)
    give_back(optimizer)
    step(optimizer)
    assert optimizer.state[weight]["step"] == 3


def test_parameters_that_share_memory() -> None:
    memory = torch.ones(12)
    optimizer = torch.optim.AdamW([nn.Parameter(memory[:8]), nn.Parameter(memory[4:])])
    assert take_over(optimizer) == "its parameters share memory"
    twice = nn.Parameter(memory)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([twice, twice])
    assert take_over(optimizer) == "its parameters share memory"
    assert take_over(torch.optim.AdamW([nn.Parameter(memory[:4]), nn.Parameter(memory[4:])])) == ""


# ---- processes and compilers -------------------------------------------------------------------------


def digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(ctypes.string_at(tensor.data_ptr(), 4 * tensor.numel())).digest()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_steps_on() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight = nn.Parameter(torch.linspace(-1, 1, 100_000))
        optimizer = adamw(weight, moments="code8")
        step(optimizer)
        there, here = os.pipe()
        child = os.fork()
        if child == 0:  # PyTorch's own threads are not there any more: nothing but the step
            status = 1
            try:
                optimizer.step()
                os.write(here, digest(weight))
                status = 0
            finally:
                os._exit(status)
        optimizer.step()
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(there, 32) == digest(weight)
        os.close(there)
        os.close(here)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_tracing_cannot_step_for_real(name: str) -> None:
    """Compilers run `_init_group` while they trace, and never again."""
    weight = nn.Parameter(torch.ones(8))
    optimizer = OPTIMIZERS[name]([weight])
    take_over(optimizer)
    weight.grad = torch.ones(8)
    with (
        torch._guards.tracing(torch._guards.TracingContext(None)),
        pytest.raises(RuntimeError, match="cannot be stepped by compiled code"),
    ):
        optimizer.step()
    assert bool((weight == 1).all())


def test_lion_leaves_what_we_cannot_to_its_own_step() -> None:
    results = []
    for taken in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
        optimizer = Lion(model.parameters(), lr=1e-2)
        if taken:
            assert take_over(optimizer, "fp32") == ""
        for _ in range(3):
            model[1](model[0](torch.ones(2, 3)).double()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([value.detach().clone() for value in model.parameters()])
    assert equal(*results) and is_patched(optimizer)
    assert ours(optimizer, model[0].weight) and not ours(optimizer, model[1].weight)


# ---- state ------------------------------------------------------------------------------------------


def test_state_of_another_implementation_is_refused() -> None:
    weight = nn.Parameter(torch.ones(300))
    optimizer = adamw(weight)
    step(optimizer)
    state = optimizer.state_dict()
    state["state"] = {0: {"step": 5, "state1": torch.zeros(300, dtype=torch.uint8)}}
    with pytest.raises(ValueError, match="has no exp_avg, but step, state1"):
        optimizer.load_state_dict(state)
    assert optimizer.state[weight]["memscale_step"] == 1


def test_state_that_does_not_fit_is_said_by_the_step() -> None:
    weights = [nn.Parameter(torch.ones(300)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    step(optimizer)
    optimizer.state[weights[1]]["exp_avg"] = torch.ones(200)
    assert take_over(optimizer) == ""
    before = weights[0].detach().clone()
    with pytest.raises(ValueError, match="exp_avg has shape"):
        step(optimizer)
    assert torch.equal(weights[0], before)
    give_back(optimizer)
    assert optimizer.state[weights[1]]["exp_avg"].shape == (200,)


def test_gradients_whose_sign_is_a_flag() -> None:
    results = []
    for taken in (False, True):
        weight = nn.Parameter(torch.ones(300))
        optimizer = adamw(weight) if taken else torch.optim.AdamW([weight], lr=1e-2)
        weight.grad = torch._neg_view(torch.ones(300))
        assert weight.grad.is_neg()
        optimizer.step()
        results.append(weight.detach())
    assert bool((results[0] > 1).all())
    assert torch.allclose(*results, rtol=1e-6, atol=0)


def test_a_group_that_shares_memory_with_another() -> None:
    memory = torch.ones(400)
    optimizer = adamw(nn.Parameter(memory[:300]))
    with pytest.raises(ValueError, match="share memory"):
        optimizer.add_param_group({"params": [nn.Parameter(memory[200:])]})
    optimizer.add_param_group({"params": [nn.Parameter(memory[300:])]})
    assert len(optimizer.param_groups) == 2


def test_a_group_function_of_its_own_is_respected() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(8))])
    optimizer._init_group = optimizer._init_group  # type: ignore[method-assign]
    assert take_over(optimizer) == "its step has been replaced"


def test_an_interrupt_between_two_calls_leaves_each_parameter_whole() -> None:
    weights = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = adamw(*weights)
    step(optimizer)
    values, versions = [value.detach().clone() for value in weights], [value._version for value in weights]
    with beside({CoreStep.run: failing(KeyboardInterrupt, at=2)}), pytest.raises(KeyboardInterrupt):
        step(optimizer)
    assert [optimizer.state[value]["memscale_step"] for value in weights] == [2, 1]
    assert [torch.equal(a, b) for a, b in zip(weights, values, strict=True)] == [False, True]
    assert [value._version for value in weights] == [versions[0] + 1, versions[1]]
