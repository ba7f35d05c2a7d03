# SPDX-License-Identifier: Apache-2.0
"""Tensors that are copied before each call that is to be recomputed, since they may be changed in place.

Plain PyTorch may not need such a scalar or table any more when it changes. A recompute reads it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

_SMALL_BYTES: Final = 4096


def is_copied(tensor: Tensor) -> bool:
    """Whether what a tensor holds may be copied for each call that reads it: scalars, mostly."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.numel() * tensor.element_size() <= _SMALL_BYTES
    )


def bytes_of_copies(tensors: Iterable[Tensor | None]) -> int:
    """Of all that are copied among the tensors."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if tensor is not None and is_copied(tensor)
    )
