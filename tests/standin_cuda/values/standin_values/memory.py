# SPDX-License-Identifier: Apache-2.0
"""The bytes of device tensors, as tensors of the CPU: the stand-in's device memory is this process's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_runtime = ctypes.CDLL("libcudart.so.13")  # the one that is loaded already
_begin = _runtime.standin_begin_compute
_begin.argtypes = [ctypes.c_void_p]
_begin.restype = None
_accesses = _runtime.standin_accesses
_accesses.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
_checked = bool(os.environ.get("STANDIN_LATE"))


def _stream() -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return stream


def begin(name: bytes, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """Does what was submitted to the current stream before, so that a computation may read and write.

    Raises:
        RuntimeError: another stream's work on the same bytes has no order with it (STANDIN_LATE).
    """
    _begin(_stream())
    if _checked:
        touch(name, read, False)
        touch(name, written, True)


def touch(name: bytes, tensors: Iterable[Tensor], written: bool) -> None:
    """Notes what the computation reads or writes; `name` has to stay."""
    numbers: list[int] = []
    for tensor in tensors:
        if tensor.is_cuda and tensor.numel() > 0:
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            numbers += (tensor.data_ptr(), (last + 1) * tensor.element_size(), written)
    array = (ctypes.c_uint64 * len(numbers))(*numbers)
    if _accesses(_stream(), name, ctypes.addressof(array), len(numbers) // 3) >= 0:
        raise RuntimeError(f"stand-in CUDA: {name.decode()}: no order with another stream, see stderr")


class Aliases:
    """CPU tensors over the same bytes as device tensors; tensors of one storage share one here too."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The device tensor's bytes as a CPU tensor with its dtype, shape and strides."""
        made = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel() == 0:
            return made.new_empty_strided(tensor.shape, tensor.stride())
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        shared = self._storages.get(at)
        if shared is None:
            shared = torch._C._construct_storage_from_data_pointer(at, _CPU, storage.nbytes())
            self._storages[at] = shared
        made.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())
        made = made.conj() if tensor.is_conj() else made
        return made._neg_view() if tensor.is_neg() else made
