# SPDX-License-Identifier: Apache-2.0
"""Memory of the card that the C tests' stand-in driver has (tests/fake_cuda), and tensors in it.

The build of PyTorch at hand may have no cards, so a tensor on the card is one without data that says where it
lies.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILT = Path(__file__).parents[2] / "build/gcc/tests/fake_cuda"
DRIVER, COMPILER = BUILT / "libfake_cuda.so", BUILT / "libfake_nvrtc.so"
BYTES = 1 << 20
IS_BUILT = DRIVER.exists() and COMPILER.exists()


class OnCard(Tensor):
    """A tensor of the stand-in's card."""

    address: int
    ordinal: int
    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.ordinal


class Memory:
    """A block of the stand-in's card, which is memory of this process."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL(str(DRIVER))
        self._context, self.address = ctypes.c_void_p(), ctypes.c_uint64()
        self._done("cuInit", 0)
        self._done("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._current("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(BYTES))

    def end(self) -> None:
        self._current("cuMemFree_v2", self.address)
        self._done("cuDevicePrimaryCtxRelease_v2", 0)

    def put(self, value: Tensor, at: int = 0, ordinal: int = 0) -> Any:
        """A tensor there, with the bytes and strides of one here."""
        storage = value.untyped_storage()
        ctypes.memmove(self.address.value + at, storage.data_ptr(), storage.nbytes())
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta").as_subclass(
            OnCard
        )
        made.address = self.address.value + at + value.storage_offset() * value.element_size()
        made.ordinal = ordinal
        return made

    def _current(self, name: str, *args: Any) -> None:
        popped = ctypes.c_void_p()
        self._done("cuCtxPushCurrent_v2", self._context)
        self._done(name, *args)
        self._done("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def _done(self, name: str, *args: Any) -> None:
        assert getattr(self._driver, name)(*args) == 0, name
