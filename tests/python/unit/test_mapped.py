# SPDX-License-Identifier: Apache-2.0
"""State dicts of optimizers whose state is offloaded: the same bits, apart from it, and in no memory."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from disks import files_up_to
from memscale.optim import take_over
from memscale.optim.mapped import mapped_in
from memscale.optim.master_hooks import hooks_for
from memscale.optim.masters import to_bf16
from memscale.optim.offload.attach import send
from memscale.optim.offload.pieces import LEAST_BYTES
from offloaded_state_samples import CUT, PIECE, WHOLE, equal, opened, parameters, step
from zoo.training import peak_bytes

SIDE = 1500  # 8.6 MiB of weights, and twice as much state


def large(
    moments: str | None = None, dtype: torch.dtype = torch.float32, folder: str = tempfile.gettempdir()
) -> Any:
    """One large parameter, its optimizer, stepped once, its state offloaded; `moments` of ours."""
    value = nn.Parameter(torch.linspace(-1, 1, SIDE * SIDE, dtype=dtype).view(SIDE, SIDE))
    optimizer = torch.optim.AdamW([value], lr=1e-2)
    if moments is not None:
        assert take_over(optimizer, moments) == ""
    assert send(optimizer, opened(directory=folder), 1 << 16) == ""
    step([value], optimizer, 1)
    value.grad = None
    return value, optimizer


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in a file that has no name any more."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("(deleted)")
    return False


# ---- the tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_as_any_other(dtype: torch.dtype, tmp_path: Path) -> None:
    size, stride = (300, 40, 8), (320, 1, 40)
    made = mapped_in(str(tmp_path))(size, stride, dtype=dtype)
    assert (made.dtype, tuple(made.shape), made.stride()) == (dtype, size, stride)
    assert made.untyped_storage().nbytes() == made.nbytes and is_mapped(made)
    values = torch.arange(made.numel()).view(size).to(dtype)
    made.copy_(values)
    assert torch.equal(made, values) and torch.equal(made.clone().add_(1), values + 1)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other, made) and other.stride() == stride and not is_mapped(other)
    assert not list(tmp_path.iterdir())
    assert not [path for path in map(_target, Path("/proc/self/fd").iterdir()) if str(tmp_path) in path]
    part = made[1]
    del made
    assert str(tmp_path) in Path("/proc/self/maps").read_text() and torch.equal(part, values[1])
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    few = mapped_in("")((LEAST_BYTES - 1,), (1,), dtype=torch.uint8)
    assert not is_mapped(few)


def test_without_a_folder_it_is_that_of_the_c_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = mapped_in("")((LEAST_BYTES,), (1,), dtype=torch.uint8)
    assert made.numel() == LEAST_BYTES and str(tmp_path) not in Path("/proc/self/maps").read_text()


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # that of the listing
        return ""


# ---- state dicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [None, "code8", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad", "lion"])
def test_a_state_dict_is_a_copy(name: str, dtype: torch.dtype, moments: str | None) -> None:
    """Later steps leave it alone; what is written into it does not reach the optimizer."""
    if moments is not None and name == "adagrad":
        pytest.skip("we have no state for it")
    make: Any = {**CUT, **WHOLE}[name]
    if moments is not None and name == "adam":
        make = torch.optim.Adam  # amsgrad stays PyTorch's
    both = parameters(dtype), parameters(dtype)
    optimizers = [make(values) for values in both]
    for optimizer in optimizers if moments is not None else ():
        assert take_over(optimizer, moments) == ""
    assert send(optimizers[1], opened(), PIECE) == ""
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2)
    plain, ours = (optimizer.state_dict() for optimizer in optimizers)
    assert equal(plain, ours)
    for one, other in zip(tensors(plain), tensors(ours), strict=True):
        assert one.stride() == other.stride() and other.storage_offset() == 0
        assert other.untyped_storage().nbytes() == other.nbytes
        assert is_mapped(other) or other.nbytes < LEAST_BYTES
    kept = copy.deepcopy(ours)
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2, seed=2)
    assert equal(kept, ours)
    for value in tensors(ours):
        value.zero_()
    assert equal(*(optimizer.state_dict() for optimizer in optimizers)) and equal(*both)


@pytest.mark.parametrize(
    ("moments", "dtype"), [(None, torch.float32), ("code8", torch.float32), ("code8", torch.bfloat16)]
)
def test_saving_and_loading_take_no_memory(moments: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither of PyTorch's allocator, nor what the system would have to keep."""
    value, optimizer = large(moments, dtype, str(tmp_path))
    path, state_bytes = tmp_path / "state.pt", 8 * value.numel()
    before = anonymous_bytes()
    peaks = [peak_bytes(lambda: memscale.save(optimizer.state_dict(), path))]
    kept = optimizer.state_dict()
    assert anonymous_bytes() - before < state_bytes // 4
    assert path.stat().st_size > state_bytes
    weights = value.detach().clone()
    step([value], optimizer, 1, seed=2)
    expected, value.grad = value.detach().clone(), None
    value.data.copy_(weights)
    before = anonymous_bytes()
    loaded = torch.load(path, mmap=True)
    peaks.append(peak_bytes(partial(optimizer.load_state_dict, loaded)))
    assert anonymous_bytes() - before < state_bytes // 4
    assert equal(kept, optimizer.state_dict())
    assert max(peaks) < state_bytes // 8, peaks
    del loaded, kept
    step([value], optimizer, 1, seed=2)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_masters_of_bf16_weights_take_no_memory(moments: str, tmp_path: Path) -> None:
    models = nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        assert take_over(optimizer, moments) == ""
        for hook in hooks_for(model.parameters(), model):
            hook.put()
        to_bf16(optimizer, model.weight)
        if model is models[1]:
            assert send(optimizer, opened(directory=str(tmp_path)), 1 << 16) == ""
        step([model.weight], optimizer, 2)
    kept: list[Any] = []
    peak = peak_bytes(lambda: kept.append(models[1].state_dict()))
    rest_bytes = model.weight.numel() * (1 if moments == "code8" else 2)
    assert peak <= 2 * rest_bytes + (1 << 20)
    assert kept[0]["weight"].dtype is torch.float32 and is_mapped(kept[0]["weight"])
    assert equal(dict(models[0].state_dict()), dict(kept[0]))


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    pytest.skip("the system does not say")


def test_copies_take_memory_once() -> None:
    value, optimizer = large()
    copies: list[Any] = []
    peak = peak_bytes(lambda: copies.append(copy.deepcopy(optimizer)))
    assert 12 * value.numel() <= peak < 13 * value.numel()  # with the parameter
    assert equal(copies[0].state_dict(), optimizer.state_dict())
    assert not any(is_mapped(item) for item in tensors(dict(copies[0].state)))


# ---- no room -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [None, "code8"])
def test_no_room_for_a_state_dict(moments: str | None) -> None:
    """The error says what there is no room for, and the optimizer goes on."""
    both = parameters(), parameters()
    optimizers = [CUT["adamw"](values) for values in both]
    for values, optimizer in zip(both, optimizers, strict=True):
        if moments is not None:
            assert take_over(optimizer, moments) == ""
        if values is both[1]:
            assert send(optimizer, opened(), PIECE) == ""
        step(values, optimizer, 2)
    for work in (optimizers[1].state_dict, partial(pickle.dumps, optimizers[1])):
        with (
            files_up_to(100_000),
            pytest.raises(OSError, match=r"no room for \d+ bytes of a state") as caught,
        ):
            work()
        assert caught.value.errno == errno.EFBIG
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2, seed=2)
    assert equal(*both) and equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_no_room_for_what_is_loaded() -> None:
    """PyTorch's state stays in memory, ours is not loaded: either way no bit is wrong."""
    for moments in (None, "code8"):
        values = parameters()
        optimizer = CUT["adamw"](values)
        if moments is not None:
            assert take_over(optimizer, moments) == ""
        assert send(optimizer, opened(), PIECE) == ""
        step(values, optimizer, 2)
        before = copy.deepcopy(optimizer.state_dict())
        other = copy.deepcopy(before)
        for entry in other["state"].values():
            entry["exp_avg"].mul_(2)
        with files_up_to(50_000):
            if moments is None:
                optimizer.load_state_dict(other)
                before = other
            else:
                with pytest.raises(OSError, match="no room"):
                    optimizer.load_state_dict(other)
        assert equal(before, optimizer.state_dict())
