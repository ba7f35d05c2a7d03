# SPDX-License-Identifier: Apache-2.0
"""The same plans on every processor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from memscale.hardware import host
from memscale.techniques.precision import mixed_precision


@contextmanager
def with_bf16() -> Iterator[None]:
    """Inside the block the processor has BF16 instructions. PyTorch computes BF16 on all processors."""
    flags = host.cpu_flags() | {"avx512_bf16"}
    with (
        patch.object(host, "cpu_flags", lambda: flags),
        patch.object(mixed_precision, "_onednn_has_bf16", lambda: True),
    ):
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
