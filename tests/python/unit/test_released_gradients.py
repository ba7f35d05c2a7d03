# SPDX-License-Identifier: Apache-2.0
"""A released gradient is a gradient: whoever reads or writes it finds what plain PyTorch has."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradient_samples import PIECE, gradient_of, is_offloaded
from memscale.optim.release.gradient import ReleasedGradient, plain, release, start

VALUES = torch.linspace(-2, 3, 20 * 31).view(20, 31)  # five pieces, the last one short


def pair(values: Tensor = VALUES) -> tuple[Tensor, ReleasedGradient]:
    """A plain gradient, and the same, released."""
    weight = nn.Parameter(torch.zeros_like(values))
    (weight * values).sum().backward()
    assert weight.grad is not None
    return weight.grad, gradient_of(values)[0]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def differentiated(g: Tensor) -> Tensor:
    """By something that the gradient is multiplied with, so that autograd saves it."""
    factor = torch.ones_like(g, requires_grad=True)
    return torch.autograd.grad((factor * g).exp().sum(), factor)[0]


READS: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda g: float(g.sum()),
    "item": lambda g: g[3, 4].item(),
    "norm": lambda g: g.norm(),
    "vector norm": lambda g: torch.linalg.vector_norm(g, 1.5),
    "equal": lambda g: torch.equal(g, VALUES),
    "compare": lambda g: (g == VALUES).all(),
    "clone": torch.clone,
    "to": lambda g: g.to(torch.float64),
    "view": lambda g: g.view(-1)[7:90:2],
    "transpose": lambda g: g.T.contiguous(),
    "data": lambda g: g.data + 1,
    "detach": lambda g: g.detach() * 2,
    "into": lambda g: torch.empty_like(g).copy_(g),
    "out": lambda g: torch.add(g, g, out=torch.empty(20, 31)),
    "stack": lambda g: torch.stack([g, g]),
    "foreach norm": lambda g: torch._foreach_norm([g, VALUES], 2)[0],
    "foreach add": lambda g: torch._foreach_add([VALUES, g], [g, VALUES])[1],
    "list": lambda g: torch.tensor(g.tolist()),
    "dlpack": lambda g: torch.utils.dlpack.from_dlpack(g).clone(),
    "text": repr,
    "deep copy": copy.deepcopy,
    "copy": lambda g: copy.copy(g) + 0,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": saved,
    "autograd": lambda g: differentiated(g),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_readers_find_the_same_and_leave_nothing_behind(read: Callable[[Tensor], Any]) -> None:
    ordinary, offloaded = pair()
    expected, found = read(ordinary), read(offloaded)
    if isinstance(expected, Tensor):
        assert type(found) is type(expected) and found.dtype is expected.dtype
        assert found.stride() == expected.stride() and torch.equal(found, expected)
    else:
        assert found == expected
    del found
    assert torch.equal(offloaded, ordinary)
    assert is_offloaded(offloaded)


def in_a_view(g: Tensor) -> None:
    g[3] = 7.0
    g.view(-1)[5::3].mul_(2)
    g.data[4:6].zero_()
    g.detach().T.add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda g: g.mul_(0.3),
    "mul twice": lambda g: g.mul_(0.1).mul_(3.3).div_(7),
    "mul by a tensor": lambda g: g.mul_(torch.tensor(0.7)),
    "mul by a wider one": lambda g: g.mul_(torch.tensor(0.7, dtype=torch.float64)),
    "mul by all": lambda g: g.mul_(VALUES),
    "div": lambda g: g.div_(3),
    "floor": lambda g: g.div_(3, rounding_mode="floor"),
    "add": lambda g: g.add_(VALUES),
    "add a part": lambda g: g.add_(VALUES, alpha=0.3),
    "add a number": lambda g: g.add_(0.25),
    "add a transposed one": lambda g: g.add_(VALUES.T.contiguous().T),
    "zero": lambda g: g.zero_(),
    "zero, then add": lambda g: g.zero_().mul_(3).add_(VALUES),
    "add to a multiple": lambda g: g.mul_(0.3).add_(VALUES),
    "clamp": lambda g: g.clamp_(-0.5, 0.5),
    "clamp at zero": lambda g: g.clamp_(min=0),
    "clamp by tensors": lambda g: g.clamp_(torch.tensor(-0.5), torch.tensor(0.5)),
    "copy": lambda g: g.copy_(VALUES * 2),
    "fill": lambda g: g.fill_(3),
    "masked": lambda g: g.masked_fill_(g > 0, 1),
    "indexed": lambda g: g.__setitem__(g > 1, 0),
    "views": in_a_view,
    "foreach": lambda g: torch._foreach_mul_([g, torch.ones(3)], 0.3),
    "foreach by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "foreach by numbers": lambda g: torch._foreach_div_([torch.ones(2), g], [2.0, 3.0]),
    "foreach clamp": lambda g: torch._foreach_clamp_max_([g], 0.25),
    "foreach add": lambda g: torch._foreach_add_([g], [VALUES], alpha=2),
    "foreach zero": lambda g: torch._foreach_zero_([g]),
    "nan": lambda g: g.mul_(float("nan")).nan_to_num_(1.5),
    "data": lambda g: setattr(g, "data", VALUES * 3),
    "another storage": lambda g: g.set_(VALUES * 3),
    "transposed": lambda g: g.t_(),
    "another dimension": lambda g: g.unsqueeze_(0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writers_change_it_as_they_change_a_plain_one(write: Callable[[Tensor], Any]) -> None:
    ordinary, offloaded = pair()
    write(ordinary)
    write(offloaded)
    assert torch.equal(offloaded, ordinary)
    assert torch.equal(offloaded * 1, ordinary)  # and once more, after it has left again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    ordinary, offloaded = pair(VALUES.to(dtype))
    for gradient in (ordinary, offloaded):
        gradient.mul_(torch.tensor(0.37)).div_(3).add_(VALUES.to(dtype)).mul_(1 / 3)
    assert torch.equal(offloaded, ordinary)


def test_another_order_of_dimensions() -> None:
    values = VALUES.T
    ordinary, offloaded = pair(values)
    assert offloaded.stride() == ordinary.stride()
    part = torch.empty(2 * PIECE)
    start(offloaded, 0, 2 * PIECE, part)()
    assert torch.equal(part, VALUES.reshape(-1)[: 2 * PIECE])  # in the order of memory
    assert torch.equal(offloaded, ordinary)


def test_parts_are_those_of_the_data_that_it_was_given() -> None:
    _, offloaded = pair()
    offloaded.data = VALUES * 3
    part = torch.empty(2 * PIECE)
    start(offloaded, PIECE, 3 * PIECE, part)()
    assert torch.equal(part, 3 * VALUES.reshape(-1)[PIECE : 3 * PIECE])


def test_a_view_keeps_it_here_for_as_long_as_it_lives() -> None:
    _, offloaded = pair()
    view = offloaded[2:4]
    assert not is_offloaded(offloaded)
    offloaded.mul_(2)  # later operations do not take it away from under the view
    assert torch.equal(view, 2 * VALUES[2:4])
    view.zero_()
    del view
    float(offloaded.sum())
    assert is_offloaded(offloaded) and not offloaded[2:4].any()


def test_its_address_stays_once_it_is_known() -> None:
    _, offloaded = pair()
    address = offloaded.data_ptr()
    offloaded.mul_(2)
    assert not is_offloaded(offloaded) and offloaded.data_ptr() == address
    assert torch.equal(offloaded, 2 * VALUES)


def test_numpy_keeps_it_where_it_is() -> None:
    ordinary, offloaded = pair()
    array = offloaded.numpy()
    array[2] = 5
    ordinary[2] = 5
    del array
    assert torch.equal(offloaded * 1, ordinary) and torch.equal(torch.from_numpy(offloaded.numpy()), ordinary)
    assert not is_offloaded(offloaded)


def test_a_tensor_that_somebody_holds_is_not_taken_from_him() -> None:
    _, window = gradient_of(VALUES)
    gradient = VALUES.clone()
    view = gradient[1]
    made = release(gradient, window)
    assert made is not None
    window.note(made.memscale_bytes)
    window.clear()
    assert not is_offloaded(made)
    del view
    window.clear()
    assert not is_offloaded(made)  # the gradient as it was born
    del gradient
    window.clear()
    assert is_offloaded(made) and torch.equal(made, VALUES)


@pytest.mark.parametrize(
    "gradient",
    [
        VALUES[2:],
        VALUES[:, :4],
        torch.zeros(1).expand(5),
        VALUES.to_sparse(),
        VALUES.clone().requires_grad_(),
        torch.empty(0),
        nn.Parameter(VALUES, requires_grad=False),
    ],
    ids=["part", "gaps", "repeated", "sparse", "differentiable", "empty", "subclass"],
)
def test_what_is_not_released(gradient: Tensor) -> None:
    assert release(gradient, gradient_of(VALUES)[1]) is None


@pytest.mark.parametrize(
    ("begin", "end"), [(0, PIECE), (PIECE, 3 * PIECE), (512, 620), (5, 9), (100, 400), (0, 620)]
)
@pytest.mark.parametrize("state", ["offloaded", "here", "zero", "changed"])
def test_chunks(begin: int, end: int, state: str) -> None:
    ordinary, offloaded = pair()
    view = offloaded[0] if state == "here" else None
    for gradient in (ordinary, offloaded):
        if state == "zero":
            gradient.zero_()
        if state == "changed":
            gradient.mul_(torch.tensor(0.3)).clamp_(-0.5, 0.7)
    into = torch.full((end - begin,), float("nan"))
    wait = start(offloaded, begin, end, into)
    wait()
    assert torch.equal(into, ordinary.view(-1)[begin:end])
    assert is_offloaded(offloaded) or view is not None
    wait()  # does no harm
    assert torch.equal(offloaded, ordinary)


def test_a_chunk_that_is_on_its_way_is_no_obstacle() -> None:
    _, offloaded = pair()
    into, again = torch.empty(PIECE), torch.empty(PIECE)
    first, second = start(offloaded, 0, PIECE, into), start(offloaded, 0, PIECE, again)
    assert torch.equal(offloaded, VALUES)
    second()
    first()
    assert torch.equal(into, VALUES.view(-1)[:PIECE]) and torch.equal(again, into)


def test_as_a_plain_tensor_for_a_while() -> None:
    ordinary, offloaded = pair()
    for gradient in (ordinary, offloaded):
        with plain(gradient) as tensor:
            assert type(tensor) is Tensor and torch.equal(tensor, VALUES)
        del tensor
    float(offloaded.sum())
    assert is_offloaded(offloaded)


def test_its_blocks_go_with_it() -> None:
    offloaded, window = gradient_of(VALUES)
    counters = window.engine.counters()
    assert counters["block_count"] == 5 and counters["held_bytes_host"] == VALUES.nbytes
    offloaded.add_(1)
    assert window.engine.counters()["held_bytes_host"] == VALUES.nbytes
    assert torch.equal(offloaded, VALUES + 1)
    del offloaded
    gc.collect()
    assert window.engine.counters()["block_count"] == 0


def test_what_it_is() -> None:
    ordinary, offloaded = pair()
    mine, theirs = offloaded, ordinary
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_sparse", "nbytes"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.stride() == theirs.stride() and mine.is_contiguous() and mine.grad_fn is None
    assert mine.mul_(2) is mine
    before = mine._version
    mine.add_(1)
    assert mine._version == before + 1
