# SPDX-License-Identifier: Apache-2.0
"""`_core.Optim`: what its arguments mean, and that wrong ones are refused before anything changes."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from memscale import _core
from memscale.errors import MemScaleError

CODE8 = {"kind": "adamw", "moments": "code8"}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES = ("gradient", "weight", "master", "moment1", "moment2", "scale1", "scale2")


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def array(tensor: Tensor) -> tuple[int, int, str]:
    return (*span(tensor), TYPES[tensor.dtype])


def tensor_of(count: int, step: int = 1, **arrays: Tensor) -> tuple[int, ...]:
    spans = [span(arrays[name]) if name in arrays else (0, 0) for name in NAMES]
    return (count, 0, step, *(number for pair in spans for number in pair))


def moments_of(count: int) -> dict[str, Tensor]:
    sizes = _core.Optim.sizes(CODE8, count)
    names = ("moment1", "moment2", "scale1", "scale2")
    return {name: torch.zeros(sizes[f"{name}_bytes"], dtype=torch.uint8) for name in names}


def test_sizes() -> None:
    sizes = _core.Optim.sizes({"kind": "adamw", "moments": "code8", "weights": "master_rest8"}, 129)
    assert sizes == {
        "gradient_bytes": 516,
        "weight_bytes": 258,
        "master_bytes": 129,
        "moment1_bytes": 129,
        "moment2_bytes": 129,
        "scale1_bytes": 2,
        "scale2_bytes": 2,
    }
    assert _core.Optim.sizes({"kind": "sgd"}, 8)["moment1_bytes"] == 0
    assert _core.Optim.sizes({"kind": "sgd", "momentum": 0.9}, 8)["moment1_bytes"] == 32


def test_life() -> None:
    optim = _core.Optim(threads=3, isa="scalar")
    assert (optim.threads, optim.isa) == (3, "scalar")
    assert _core.Optim().threads == 1 and _core.Optim().isa in ("scalar", "avx2", "avx512")
    for threads in (0, 257):
        with pytest.raises(ValueError, match="thread_count"):
            _core.Optim(threads)
    with pytest.raises(TypeError, match="threads must be an int"):
        _core.Optim("2")  # type: ignore[arg-type]
    with pytest.raises((ValueError, MemScaleError), match="isa"):
        _core.Optim(isa="mmx")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"card": object()}, TypeError, "card must be a Card, not <class .object.>"),
        ({"stream": 16}, ValueError, "stream is .*10, of no device"),
        ({"stream": -1}, ValueError, "stream"),
    ],
    ids=("no Card", "no device", "negative"),
)
def test_cards_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _core.Optim(**options)


def test_a_card_needs_a_driver() -> None:
    with pytest.raises(MemScaleError, match="cannot open NVIDIA's driver library: /nowhere/libcuda"):
        _core.Card(0, library="/nowhere/libcuda.so")
    with pytest.raises(MemScaleError, match="is not a driver library"):
        _core.Card(library="libc.so.6")
    with pytest.raises(ValueError, match="ordinal"):
        _core.Card(-1)


def test_a_step_is_that_of_pytorch() -> None:
    weight, gradient = torch.randn(1000), torch.randn(1000)
    mine = {"moment1": torch.zeros(1000), "moment2": torch.zeros(1000), "weight": weight.clone()}
    rule = {"kind": "adamw", "learning_rate": 0.1, "weight_decay": 0.2, "gradient_scale": 0.5}
    _core.Optim().step(rule, [tensor_of(1000, gradient=gradient, **mine)])
    reference = torch.nn.Parameter(weight.clone())
    reference.grad = gradient * 0.5
    torch.optim.AdamW([reference], lr=0.1, weight_decay=0.2).step()
    torch.testing.assert_close(mine["weight"], reference.data, rtol=0, atol=3e-7)
    assert not torch.equal(mine["weight"], weight)


def step_of(**change: Any) -> list[Any]:
    """Arguments of a step that is in order, but for a change."""
    arrays = {"gradient": torch.ones(8), "weight": torch.ones(8), **moments_of(8)}
    rule = {**CODE8, **change.pop("rule", {})}
    numbers = list(tensor_of(8, **arrays))
    for at, value in change.pop("numbers", {}).items():
        numbers[at] = value
    assert not change
    return [rule, [tuple(numbers)], arrays]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rule": {"learning_rate": -1.0}}, ValueError, "learning_rate is -1"),
        ({"rule": {"learning_rate": math.nan}}, ValueError, "learning_rate is nan"),
        ({"rule": {"learning_rate": "1"}}, TypeError, "learning_rate must be a number, not .*str"),
        ({"rule": {"beta1": 1.0}}, ValueError, r"beta1 is 1, allowed is \[0, 1\)"),
        ({"rule": {"kind": "adagrad"}}, ValueError, "kind is 'adagrad', allowed are adamw, adam, sgd, lion"),
        ({"rule": {"moments": 8}}, TypeError, "moments must be a str"),
        ({"rule": {"maximize": 1}}, TypeError, "maximize must be a bool"),
        ({"rule": {"amsgrad": True}}, ValueError, "rule has no key 'amsgrad'"),
        ({"rule": {"kind": "sgd", "nesterov": True}}, ValueError, "nesterov is 1 with momentum 0"),
        ({"numbers": {2: 0}}, ValueError, "step of tensor 0 is 0"),
        ({"numbers": {1: 64}}, ValueError, "first of tensor 0 is 64"),
        ({"numbers": {0: 9}}, ValueError, "gradient of tensor 0 has 32 bytes, it must have 36"),
        ({"numbers": {6: 31}}, ValueError, "weight of tensor 0 has 31 bytes, it must have 32"),
        ({"numbers": {8: 8}}, ValueError, "master of tensor 0 has 8 bytes, it must have 0"),
        ({"numbers": {14: 2}}, ValueError, "scale1 of tensor 0 has 2 bytes, it must have 1"),
        ({"numbers": {5: 0}}, ValueError, "weight of tensor 0 is NULL"),
        ({"numbers": {0: -1}}, ValueError, "count must be in 0 to"),
    ],
)
def test_what_is_refused_changes_nothing(change: Any, error: type[Exception], message: str) -> None:
    rule, tensors, arrays = step_of(**change)
    good = step_of()
    with pytest.raises(error, match=message):
        _core.Optim().step(rule, good[1] + tensors if "tensor 0" not in message else tensors)
    assert bool((arrays["weight"] == 1).all()) and bool((good[2]["weight"] == 1).all())
    assert not any(arrays[name].any() for name in moments_of(8))


@pytest.mark.parametrize(
    ("rule", "tensors"), [(None, []), ({}, []), (CODE8, None), (CODE8, [(1, 2)]), (CODE8, [[0] * 17])]
)
def test_arguments_of_another_kind(rule: Any, tensors: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        _core.Optim().step(rule, tensors)


def test_nothing_to_do() -> None:
    _core.Optim().step(CODE8, [])
    _core.Optim().step(CODE8, [(0, 0, 1) + (0,) * 14])


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients(dtype: torch.dtype) -> None:
    optim = _core.Optim(threads=2)
    gradient = torch.randn(1000).to(dtype)
    sums = torch.randn(1000)
    expected = sums + gradient.float()
    optim.accumulate(span(sums), array(gradient))
    assert torch.equal(sums, expected)
    total, bad = optim.norm([array(gradient), array(sums)], 0.5)
    assert bad == 0
    both = torch.cat([gradient.double(), sums.double()]) * 0.5
    assert total == pytest.approx(float(both.square().sum()), rel=1e-6)
    spoilt = torch.tensor([1.0, math.inf, math.nan, -math.inf, 2.0]).to(dtype)
    assert optim.norm([array(spoilt)]) == (5.0, 3)
    for other in TYPES:
        target = torch.empty(1000, dtype=other)
        optim.convert(array(target), array(gradient))
        assert torch.equal(target, gradient.to(other))


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_clip_factor_is_that_of_pytorch(most: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 2.0, 2.0])
    torch.nn.utils.clip_grad_norm_([parameter], most)
    factor = _core.Optim.clip_factor(9.0, most)
    assert torch.equal(parameter.grad, torch.tensor([1.0, 2.0, 2.0]) * factor)


def test_counts_are_checked() -> None:
    optim, three, four = _core.Optim(), torch.zeros(3), torch.zeros(4)
    with pytest.raises(ValueError, match="sums has 12 bytes, it must have 16"):
        optim.accumulate(span(three), array(four))
    with pytest.raises(ValueError, match="target has 3 elements, it must have 4"):
        optim.convert(array(three), array(four))
    with pytest.raises(ValueError, match="no whole number of fp32"):
        optim.norm([(four.data_ptr(), 7, "fp32")])
    with pytest.raises(ValueError, match="master has 12 bytes, it must have 6"):
        optim.split("master_rest16", span(three), (three.data_ptr(), 6), span(three))
    with pytest.raises(ValueError, match="form is 'rest', allowed are fp32, master_fp32"):
        optim.split("rest", span(three), span(three), span(three))
    with pytest.raises(ValueError, match="form is 0, allowed are 1 to 3"):
        optim.join("fp32", (four.data_ptr(), 8), span(four), (three.data_ptr(), 16))
    with pytest.raises(ValueError, match="moment1 has 12 bytes, it must have 16"):
        optim.moments_read(CODE8, tensor_of(4, **moments_of(4)), span(three), span(four))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("master_fp32", torch.float32), ("master_rest16", torch.int16), ("master_rest8", torch.int8)],
)
def test_masters(form: str, dtype: torch.dtype) -> None:
    whole = torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    weight, master = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=dtype)
    optim, joined = _core.Optim(), torch.empty(1000)
    optim.split(form, span(whole), span(weight), span(master))
    assert bool(((weight.double() - whole.double()).abs() <= whole.double().abs() * 2.0**-8).all())
    optim.join(form, span(weight), span(master), span(joined))
    bound = 2.0**-16 if form == "master_rest8" else 0.0
    assert bool(((joined.double() - whole.double()).abs() <= whole.double().abs() * bound).all())


def test_moments_come_out_as_they_were_put_in_once_rounded() -> None:
    optim, arrays = _core.Optim(), moments_of(1000)
    first, second = torch.randn(1000), torch.rand(1000)
    tensor = tensor_of(1000, **arrays)
    optim.moments_write(CODE8, tensor, span(first), span(second))
    read, again = [torch.empty(1000), torch.empty(1000)], [torch.empty(1000), torch.empty(1000)]
    optim.moments_read(CODE8, tensor, span(read[0]), span(read[1]))
    torch.testing.assert_close(read[1].sqrt(), second.sqrt(), rtol=1 / 64, atol=1 / 4096)
    optim.moments_write(CODE8, tensor, span(read[0]), span(read[1]))
    optim.moments_read(CODE8, tensor, span(again[0]), span(again[1]))
    assert torch.equal(read[0], again[0]) and torch.equal(read[1], again[1])


def test_other_threads_run_while_it_works() -> None:
    weight = torch.zeros(1 << 22)
    arrays = {"gradient": torch.ones(1 << 22), "moment1": torch.zeros(1 << 22)}
    rule = {"kind": "sgd", "momentum": 0.9}
    tensor = tensor_of(1 << 22, weight=weight, **arrays)
    optim, began, ticks = _core.Optim(), threading.Event(), []

    def work() -> None:
        began.set()
        for _ in range(60):
            optim.step(rule, [tensor])

    worker = threading.Thread(target=work)
    worker.start()
    began.wait()
    while worker.is_alive():
        ticks.append(float(weight[0]))
    worker.join()
    assert len(set(ticks)) > 3  # it was seen at several steps
