# SPDX-License-Identifier: Apache-2.0
"""What the case files of `scratch.py` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
Case = tuple[str, Callable[[], object]]


def leaf(*shape: int, dtype: torch.dtype = FP32, grad: bool = True) -> Tensor:
    """A random tensor."""
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def through(make: Callable[[], Any]) -> Callable[[], object]:
    """Forward, then backward of the sum of all outputs that need one."""

    def run() -> None:
        made = make()
        outputs = [item for item in tree_leaves(made) if isinstance(item, Tensor) and item.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.randn_like(item) for item in outputs])

    return run


def module_case(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = FP32) -> Callable[[], object]:
    """Forward and backward of a module in `dtype`."""
    module.to(dtype).train()
    return through(lambda: module(*inputs))
