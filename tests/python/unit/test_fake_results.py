# SPDX-License-Identifier: Apache-2.0
"""Remembered results of operations on fakes: those of PyTorch's own mode, in every respect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from memscale.ops import fake_results
from zoo.models import case
from zoo.training import SMALLEST, built

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    fake_results.forget()
    yield
    fake_results.forget()


class Forgets(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Remembering(TorchDispatchMode):
    """Runs every operation by `fake_results`, in front of a mode of fakes; counts what reaches that."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not fake_results.knows(func, args, kwargs or {}):
            self.ran.append(func._schema.name)
        return fake_results.run(func, args, kwargs or {})


def form(value: Any, given: list[Tensor]) -> Any:
    """All that can be seen of a result; with the arguments whose memory it shares."""
    if isinstance(value, (list, tuple)):
        return type(value), [form(one, given) for one in value]
    if not isinstance(value, Tensor):
        return type(value), value
    storage = value.untyped_storage()
    return (
        type(value), value.shape, value.stride(), value.dtype, value.device, value.storage_offset(),
        value.layout, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference(),
        storage.nbytes(),
        [storage._cdata == tensor.untyped_storage()._cdata for tensor in given],
        [value is tensor for tensor in given],
        torch._C._dispatch_key_set(value),
    )  # fmt: skip


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


Call = Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]

USUAL: dict[str, Call] = {
    "add": lambda: (aten.add.Tensor, (x(4, 1), x(3)), {}),
    "add with a number": lambda: (aten.add.Tensor, (x(4, dtype=torch.int64), 1.5), {}),
    "of transposed": lambda: (aten.mul.Tensor, (x(3, 4).t(), x(4, 3)), {}),
    "mm": lambda: (aten.mm.default, (x(4, 5), x(5, 6)), {}),
    "addmm": lambda: (aten.addmm.default, (x(6), x(4, 5), x(6, 5).t()), {}),
    "cast": lambda: (aten._to_copy.default, (x(4, 5),), {"dtype": torch.bfloat16}),
    "layer norm": lambda: (aten.native_layer_norm.default, (x(2, 4), [4], x(4), x(4), 1e-5), {}),
    "without weight": lambda: (aten.native_layer_norm.default, (x(2, 4), [4], None, None, 1e-5), {}),
    "cat": lambda: (aten.cat.default, ([x(2, 3), x(4, 3)],), {}),
    "embedding": lambda: (aten.embedding.default, (x(9, 4), x(2, 3, dtype=torch.int64)), {}),
    "softmax": lambda: (aten._softmax.default, (x(2, 3), -1, False), {}),
    "convolution": lambda: (
        aten.convolution.default,
        (x(2, 3, 8, 8), x(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
    "channels last": lambda: (aten.relu.default, (x(2, 3, 8, 8).to(memory_format=torch.channels_last),), {}),
    "new zeros": lambda: (aten.new_zeros.default, (x(2), [3, 4]), {"dtype": torch.int32}),
    "empty like": lambda: (aten.empty_like.default, (x(2, 3).t(),), {"memory_format": torch.preserve_format}),
    "no elements": lambda: (aten.mul.Tensor, (x(0, 4), x(4)), {}),
    "a number": lambda: (aten.sum.default, (x(3, 4),), {}),
    "view": lambda: (aten.view.default, (x(3, 4), [2, 6]), {}),
    "transposed": lambda: (aten.t.default, (x(3, 4),), {}),
    "of a part": lambda: (aten.transpose.int, (x(6, 4)[2:], 0, 1), {}),
    "expanded": lambda: (aten.expand.default, (x(3, 1), [3, 4]), {}),
    "slice": lambda: (aten.slice.Tensor, (x(6, 4), 0, 2, 5), {}),
    "split": lambda: (aten.split.Tensor, (x(6, 4), 2), {}),
    "unbind": lambda: (aten.unbind.int, (x(3, 4),), {}),
    "detach": lambda: (aten.detach.default, (x(3, 4),), {}),
    "another name for the memory": lambda: (aten._unsafe_view.default, (x(3, 4), [12]), {}),
    "in place": lambda: (aten.add_.Tensor, (x(3, 4), x(4)), {}),
    "in place by a number": lambda: (aten.mul_.Tensor, (x(3, 4), 0.5), {}),
}

UNUSUAL: dict[str, Call] = {
    "complex": lambda: (aten.mul.Tensor, (x(3, dtype=torch.complex64), x(3)), {}),
    "conjugate": lambda: (aten._conj.default, (x(3, dtype=torch.complex64),), {}),
    "resized": lambda: (aten.resize_.default, (x(3), [5]), {}),
    "on other memory": lambda: (aten.set_.source_Tensor, (x(3), x(3)), {}),
    "transposed in place": lambda: (aten.t_.default, (x(3, 4),), {}),
    "into another": lambda: (aten.add.out, (x(3), x(3)), {"out": x(3)}),
    "a larger storage": lambda: (aten.empty_strided.default, ([2, 2], [9, 1]), {}),
    "from no tensor": lambda: (aten.zeros.default, ([3, 4],), {}),
}


def tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    fake_results.collect(values, found)
    return found


def outcome(run: Callable[..., Any], call: Call) -> Any:
    func, args, kwargs = call()
    given = tensors((*args, *kwargs.values()))
    result = run(func, args, kwargs)
    return form(result, given), [form(tensor, given) for tensor in given]


def plainly(func: Any, args: Any, kwargs: Any) -> Any:
    if not fake_results.is_usual(func, args, kwargs):
        return func(*args, **kwargs)
    return fake_results.laid_out(func, args, kwargs)


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_the_same_as_the_modes_own(name: str) -> None:
    call = (USUAL | UNUSUAL)[name]
    with FakeTensorMode():
        expected = outcome(plainly, call)
        for _ in range(3):
            assert outcome(fake_results.run, call) == expected


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_runs_once(name: str) -> None:
    with FakeTensorMode(), Remembering() as mode:
        func, args, kwargs = USUAL[name]()
        mode.ran.clear()
        for _ in range(3):
            func(*args, **kwargs)
        assert [name for name in mode.ran if name != "prim::device"] == [func._schema.name]


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_runs_every_time(name: str) -> None:
    with FakeTensorMode(), Remembering() as mode:
        for _ in range(3):
            func, args, kwargs = UNUSUAL[name]()
            before = len(mode.ran)
            func(*args, **kwargs)
            assert len(mode.ran) > before


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    with FakeTensorMode():
        whole = x(3, dtype=torch.int32)
        for _ in range(2):
            dtypes = [
                fake_results.run(aten.mul.Tensor, (whole, number), {}).dtype for number in (1, 1.0, True)
            ]
            assert dtypes == [torch.int32, torch.float32, torch.int32]


def test_the_default_dtype_counts() -> None:
    def dtype() -> torch.dtype:
        result: Tensor = fake_results.run(aten.mul.Tensor, (x(3, dtype=torch.int32), 1.5), {})
        return result.dtype

    before = torch.get_default_dtype()
    with FakeTensorMode():
        assert dtype() is torch.float32
        try:
            torch.set_default_dtype(torch.float64)
            assert dtype() is torch.float64
        finally:
            torch.set_default_dtype(before)
        assert dtype() is torch.float32


def test_inference_mode_has_its_own_tensors() -> None:
    with FakeTensorMode():
        call = USUAL["add"]
        usual = outcome(fake_results.run, call)
        with torch.inference_mode():
            assert outcome(fake_results.run, call) == outcome(plainly, call) != usual


def test_a_fake_with_a_value_keeps_it() -> None:
    """`item()` of a number that was made of a real one answers; a remembered result has no number."""
    with FakeTensorMode():
        number = torch.tensor(3)
        for _ in range(2):
            assert fake_results.run(aten.add.Tensor, (number, 1), {}).item() == 4


def test_fakes_of_two_modes_do_not_mix() -> None:
    with FakeTensorMode():
        one = x(3)
        fake_results.run(aten.add.Tensor, (one, one), {})
    with FakeTensorMode(), pytest.raises(AssertionError, match="ixing fake modes"):
        fake_results.run(aten.add.Tensor, (one, x(3)), {})


def test_each_mode_gets_its_own_fakes() -> None:
    for _ in range(2):
        with FakeTensorMode() as mode:
            made = fake_results.run(aten.add.Tensor, (x(3), x(3)), {})
            assert isinstance(made, FakeTensor) and made.fake_mode is mode


def test_real_tensors_are_computed() -> None:
    assert fake_results.run(aten.add.Tensor, (torch.ones(2), 2), {}).tolist() == [3, 3]
    assert not fake_results.remembered_count()


def test_memory_of_its_own_has_the_size_that_is_asked_for() -> None:
    with FakeTensorMode() as mode:
        form = (torch.Size([2, 3]), (1, 4), torch.bfloat16, torch.device("cpu"), 5)
        made = fake_results.on_memory_of_its_own(mode, form, 100)
        assert made.untyped_storage().nbytes() == 100 and made.storage_offset() == 5
        assert (made.shape, made.stride(), made.dtype, made.device.type) == (form[0], (1, 4), form[2], "cpu")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "MOST", 10)
    with FakeTensorMode():
        for size in range(1, 40):
            fake_results.run(aten.relu.default, (x(size),), {})
            assert fake_results.remembered_count() <= 10


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "t5", "convnet", "lstm", "mixtral", "mamba"])
def test_plans_are_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = case(name)
    model, batch = built(chosen), chosen.batch(0)

    def planned() -> tuple[str, int]:
        plan = memscale.plan(model, None, SMALLEST, batch)
        return plan.digest, plan.predicted.allocated_peak_bytes

    first, second = planned(), planned()  # the second has all remembered
    monkeypatch.setattr(fake_results, "_known", Forgets())
    assert first == second == planned()
