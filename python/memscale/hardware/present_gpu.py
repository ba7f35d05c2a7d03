# SPDX-License-Identifier: Apache-2.0
"""Finds the card in this machine, without touching it.

PyTorch's own questions make a CUDA context, which takes half a GiB of the card. The driver's management
library (NVML) answers without one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from memscale.errors import MemScaleError

_LIBRARIES: Final = ("libnvidia-ml.so.1", "nvml.dll")
_NAME_BYTES: Final = 96
_NO_INDEX: Final = -1


@dataclass(frozen=True)
class PresentGpu:
    """A card as NVML describes it.

    Attributes:
        name: such as "NVIDIA GeForce RTX 3090".
        total_bytes: all of its memory; some percent more than a program gets.
        capability: CUDA compute capability, major and minor.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def present_gpu(index: int = 0) -> PresentGpu:
    """Describes a card of this machine. Neither memory of it nor a context is taken.

    Args:
        index: ordinal among the cards that `CUDA_VISIBLE_DEVICES` leaves.

    Raises:
        MemScaleError: there is no driver, no such card, or the card is divided (MIG).
    """
    with _nvml() as nvml:
        handle = ctypes.c_void_p()
        _by_identity(nvml, identity(index), handle)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        memory = _Memory()
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)), "the card's name")
        _check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "the card's memory")
        capability = nvml.nvmlDeviceGetCudaComputeCapability
        _check(capability(handle, ctypes.byref(major), ctypes.byref(minor)), "the card's compute capability")
        return PresentGpu(name.value.decode(), int(memory.total), (major.value, minor.value))


def identity(index: int) -> int | bytes:
    """The index or UUID by which NVML knows the card that CUDA calls `index`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    entries = [entry.strip() for entry in visible.split(",")]
    known: list[int | bytes] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            raise MemScaleError(
                f"cannot describe {entry}, a part of a card: name a device or its memory ('20GiB')"
            )
        number = int(entry) if entry.lstrip("-").isdigit() else _NO_INDEX
        if number < 0 and not entry.startswith("GPU-"):
            break  # as CUDA does: what follows is not visible
        known.append(entry.encode() if number < 0 else number)
    if index >= len(known):
        raise MemScaleError(f"there is no CUDA device {index}: CUDA_VISIBLE_DEVICES is {visible!r}")
    return known[index]


@contextmanager
def _nvml() -> Iterator[Any]:
    for name in _LIBRARIES:
        try:
            nvml = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        raise MemScaleError("there is no CUDA device here: no NVIDIA driver is installed")
    _check(nvml.nvmlInit_v2(), "the driver")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _by_identity(nvml: Any, identity: int | bytes, handle: ctypes.c_void_p) -> None:
    if isinstance(identity, bytes):
        status = nvml.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(identity), ctypes.byref(handle))
    shown = identity.decode() if isinstance(identity, bytes) else identity
    _check(status, f"CUDA device {shown}")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise MemScaleError(f"cannot read {what}: the NVIDIA driver answers with error {status}")
