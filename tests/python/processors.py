# SPDX-License-Identifier: Apache-2.0
"""The same plans on every processor."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
import torch

from memscale.cli import env
from memscale.core import devices
from memscale.hardware import host
from memscale.hardware.present_gpu import PresentGpu
from memscale.techniques.precision import mixed_precision


def use_flags(patch: pytest.MonkeyPatch, flags: Collection[str]) -> None:
    """The processor says that it has these instructions."""
    patch.setattr(host, "cpu_flags", lambda: frozenset(flags))


def use_bf16(patch: pytest.MonkeyPatch) -> None:
    """The processor has BF16 instructions. PyTorch computes BF16 on all processors."""
    use_flags(patch, host.cpu_flags() | {"avx512_bf16"})
    patch.setattr(mixed_precision, "onednn_has_bf16", lambda: True)


def use_gpu(patch: pytest.MonkeyPatch, gpu: PresentGpu) -> None:
    """The driver knows this card."""
    for user in (devices, env):
        patch.setattr(user, "present_gpu", lambda index=0: gpu)


def use_fp16(patch: pytest.MonkeyPatch) -> None:
    """The device computes in FP16 alone. PyTorch computes FP16 on all."""
    patch.setattr(mixed_precision, "dtype_for", lambda hardware: torch.float16)


@contextmanager
def with_bf16() -> Iterator[None]:
    """See `use_bf16`."""
    with pytest.MonkeyPatch.context() as patch:
        use_bf16(patch)
        yield


@functools.cache
def why_no_bf16_lstm() -> str:
    """What PyTorch says where its LSTM cannot compute in BF16; "" where it can."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.zeros(2, 2, 8))
    except RuntimeError as error:
        return f"PyTorch on this processor: {error}"
    return ""
