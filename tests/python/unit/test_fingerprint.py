# SPDX-License-Identifier: Apache-2.0
"""`_core.fingerprint`: every layout and dtype of tensors, what it tells apart, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale._core import fingerprint

SEGMENT = 4096
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def tensor_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random bits of a dtype; of bool, zeros and ones."""
    size = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (random_bytes(size, seed) & 1).bool().view(shape)
    return random_bytes(size * dtype.itemsize, seed).view(dtype).view(shape)


def packed(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, once each, in memory of their own."""
    dims = [d for d in range(tensor.dim()) if tensor.stride(d) > 0 or tensor.size(d) == 1]
    for d in range(tensor.dim()):
        if d not in dims:
            tensor = tensor.narrow(d, 0, 1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: strides[d], reverse=True)
    return torch.empty_like(tensor.permute(order), memory_format=torch.contiguous_format).copy_(
        tensor.permute(order)
    )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels last": lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    "rows with gaps": lambda t: t[:, 1:4],
    "columns with gaps": lambda t: t[..., 2:7],
    "every second": lambda t: t[..., ::2],
    "every second, transposed": lambda t: t[::2, :, ::3].transpose(0, 1),
    "one column": lambda t: t[:, :, 3],
    "expanded": lambda t: t[:, :1].expand(-1, 9, -1),
    "one element": lambda t: t[1, 2, 3],
    "one element, expanded": lambda t: t[1, 2, 3].expand(4, 5),
    "empty": lambda t: t[:0],
    "at an odd address": lambda t: t.flatten()[1:],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_hashed_as_its_packed_elements(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](tensor_of(dtype, 6, 5, 11))
    assert fingerprint(tensor) == fingerprint(packed(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "empty"])
def test_one_changed_element_is_seen(dtype: torch.dtype, layout: str) -> None:
    base = tensor_of(dtype, 6, 5, 11)
    tensor = LAYOUTS[layout](base)
    index = tuple(size - 1 for size in tensor.shape)
    before = fingerprint(tensor)
    element = tensor[index]
    element.copy_(element.logical_not() if dtype is torch.bool else tensor_of(dtype, 1, seed=9)[0])
    assert fingerprint(tensor) != before


def test_bytes_outside_of_the_tensor_do_not_count() -> None:
    wide = torch.randn(50, 40)
    kept = wide[:, 5:30]
    before = fingerprint(kept)
    wide[:, :5] = float("nan")
    wide[:, 30:] = 7.0
    assert fingerprint(kept) == before


def test_what_is_not_part_of_it() -> None:
    x = torch.randn(4, 6)
    assert fingerprint(x) == fingerprint(x.view(24)) == fingerprint(x.view(torch.int32))
    z = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(z) == fingerprint(z.conj())
    assert fingerprint(z) != fingerprint(z.conj().resolve_conj())
    assert fingerprint(z.imag) == fingerprint(z.conj().imag)  # a view with the negative bit
    weight = torch.nn.Parameter(x)
    assert fingerprint(weight) == fingerprint(x)


class Subclass(Tensor):
    pass


def test_tensors_of_a_graph_and_of_subclasses() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert fingerprint(x * 1) == fingerprint(x.detach())
    assert fingerprint(x.detach().as_subclass(Subclass)) == fingerprint(x)
    with torch.inference_mode():
        assert fingerprint(x.detach().clone()) == fingerprint(x)


def test_the_value_never_changes() -> None:
    data = (torch.arange(5000) * 37 + 11).to(torch.uint8)
    assert fingerprint(data[:0]) == 0x45388E6EB6E2BE4D
    assert fingerprint(data[:4]) == 0xB6CC8D047406624D
    assert fingerprint(data) == 0x1B63FAF42C682B8B


DEFECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda x: x.view(torch.int32).bitwise_xor(torch.eye(64, 256, dtype=torch.int32)[:, :256]),
    "another order of sums": lambda x: (x.double() + 1e-7).float(),
    "a sign": lambda x: x * torch.where(torch.arange(256) == 17, -1.0, 1.0),
    "zeros' signs": lambda x: x.relu().neg().neg().neg(),
    "a mask dropped": lambda x: x,
    "rows rolled": lambda x: x.relu().roll(32, 0),
    "columns rolled": lambda x: x.relu().roll(1, 1),
    "two rows exchanged": lambda x: x.relu()[[1, 0, *range(2, 64)]],
    "reversed": lambda x: x.relu().flip(0),
    "one element late": lambda x: torch.cat([x.relu().flatten()[1:], x.new_zeros(1)]),
}


def test_defects_of_a_recompute_are_seen() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 256)
    made = {name: fingerprint(change(x).contiguous()) for name, change in DEFECTS.items()}
    made["the forward"] = fingerprint(x.relu())
    assert len(set(made.values())) == len(made)


@pytest.mark.parametrize("negated", ["all", "columns", "rows", "a pair"])
def test_negated_numbers_are_seen(negated: str) -> None:
    x = torch.ones(128, 96)
    before = fingerprint(x)
    part = {"all": x, "columns": x[:, ::2], "rows": x[::4], "a pair": x[:2, :1]}[negated]
    part.neg_()
    assert fingerprint(x) != before


# ---- samples ---------------------------------------------------------------------------------------------


def segments_read(tensor: Tensor) -> list[int]:
    before = fingerprint(tensor, sampled=True)
    read = []
    for index in range(tensor.numel() // SEGMENT):
        tensor[index * SEGMENT + 77] ^= 1
        if fingerprint(tensor, sampled=True) != before:
            read.append(index)
        tensor[index * SEGMENT + 77] ^= 1
    return read


def test_a_small_tensor_is_sampled_whole() -> None:
    for size in (0, 1, SEGMENT, 16 * SEGMENT):
        data = random_bytes(size)
        assert fingerprint(data, sampled=True) == fingerprint(data)
    assert fingerprint(random_bytes(16 * SEGMENT + 1), sampled=True) != fingerprint(
        random_bytes(16 * SEGMENT + 1)
    )


def test_samples_are_one_segment_of_sixteen() -> None:
    read = segments_read(random_bytes(160 * SEGMENT))
    assert [index // 16 for index in read] == list(range(10))
    assert read[0] == 0 and read[-1] == 159
    assert len({index % 16 for index in read}) > 4


def test_samples_follow_memory_and_not_the_gaps() -> None:
    wide = torch.randn(1000, 300)
    part = wide[:, 10:200]
    before = fingerprint(part, True)
    assert before == fingerprint(part.contiguous(), True)
    wide[:, 200:] = 0.0
    assert fingerprint(part, True) == before


# ---- what is large -----------------------------------------------------------------------------------------


def test_threads_do_not_change_the_value() -> None:
    large = random_bytes(24 << 20).view(3 << 10, 8 << 10)
    gaps = large[:, : (8 << 10) - 8]
    single = fingerprint(large), fingerprint(gaps)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (fingerprint(large), fingerprint(gaps)) == single
    finally:
        torch.set_num_threads(threads)
    assert fingerprint(large.flatten()) == single[0]


def test_several_threads_at_once() -> None:
    tensors = [random_bytes(1 << 20, seed) for seed in range(4)]
    wanted = [fingerprint(tensor) for tensor in tensors]
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        found[index] = [fingerprint(tensors[index]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [wanted[index]] * 20 for index in range(4)}


def test_inside_of_backward() -> None:
    x = torch.randn(1 << 17, requires_grad=True)
    seen: list[int] = []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(fingerprint(gradient)))
    (y * y).sum().backward()
    assert seen == [fingerprint(2 * y.detach())]


# ---- a PyTorch without the table -------------------------------------------------------------------------


SAMPLES = """
torch.manual_seed(3)
x = torch.randn(7, 9, 5, dtype=torch.bfloat16)
samples = [x, x[:, 1:3], x.transpose(0, 2), x[:0], x[0, 0, 0], x.to("meta"), x.to_sparse()]
"""

ATTRIBUTES = f"""
import torch
del torch.Tensor.__dlpack_c_exchange_api__
from memscale._core import fingerprint
{SAMPLES}
for sample in samples:
    try:
        print(fingerprint(sample))
    except ValueError as error:
        print(error)
"""


def value(tensor: Tensor) -> str:
    try:
        return str(fingerprint(tensor))
    except ValueError as error:
        return str(error)


def test_attributes_tell_the_same_as_the_table() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(SAMPLES, names)
    run = subprocess.run([sys.executable, "-c", ATTRIBUTES], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [value(sample) for sample in names["samples"]]
    assert run.stdout.count("a fingerprint needs bytes in") == 2


# ---- what is refused ---------------------------------------------------------------------------------------


def test_no_tensor() -> None:
    for wrong in (7, None, [1.0], "x", Tensor):
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            fingerprint(wrong)
    with pytest.raises(TypeError, match="sampled"):
        fingerprint(torch.ones(1), sampled="yes")  # type: ignore[arg-type]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(3)


WITHOUT_BYTES: dict[str, Callable[[], Any]] = {
    "fake": fake,
    "meta": lambda: torch.randn(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "no storage": lambda: torch.randn(3).to_mkldnn(),
}


@pytest.mark.parametrize("kind", WITHOUT_BYTES)
def test_a_tensor_without_bytes(kind: str) -> None:
    with pytest.raises(ValueError, match="a fingerprint needs bytes in"):
        fingerprint(WITHOUT_BYTES[kind]())


def test_inside_of_a_transform() -> None:
    def loss(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="a fingerprint needs bytes in"):
            fingerprint(x)
        return x.sum()

    torch.func.grad(loss)(torch.randn(3))
    torch.func.vmap(loss)(torch.randn(2, 3))
