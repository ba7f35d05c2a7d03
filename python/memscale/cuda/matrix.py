# SPDX-License-Identifier: Apache-2.0
"""Scratch of CUDA matrix products: copies of operands whose layout cuBLAS cannot take.

cuBLAS wants matrices whose rows or columns are contiguous. PyTorch copies any other operand first: the
gradient of a sum, which is one number expanded, or every second column of a matrix. Sources:
aten/src/ATen/native/cuda/ cuBlasCommonArgs.h (`prepare_matrix_for_cublas`) and Blas.cpp
(`prepare_batch_matrix_for_cublas`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from memscale.hardware.target import Target
from memscale.torchkit.extents import is_dense

LT_WORKSPACE_BYTES: Final = 1 << 20
"""Workspace of cuBLASLt, which adds the bias of a linear layer: taken at its first use in a thread, kept."""


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _matrix(tensor: Tensor) -> list[int]:
    rows, columns = tensor.shape
    if is_dense(tensor):
        return []
    step, inner = tensor.stride()
    if (step == 1 and inner >= max(1, rows)) or (inner == 1 and step >= max(1, columns)):
        return []
    return [_bytes(tensor)]


def matrix_product(args: Sequence[Any], outputs: Sequence[Tensor], card: object) -> list[int]:
    """`mm(a, b)` and `addmm(bias, a, b)`."""
    left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return _matrix(left) + _matrix(right)


def _batch(tensor: Tensor, transposed: bool, rows: int, columns: int) -> list[int]:
    fast, leading = (2, 1) if transposed else (1, 2)
    stride = tensor.stride()
    if stride[fast] == 1 and stride[leading] >= max(1, rows):
        return []
    if stride[leading] == 1 and stride[fast] >= max(1, columns):
        return []
    usable = tensor.is_contiguous() and stride[1] != 0 and stride[2] != 0
    return [] if usable else [_bytes(tensor)]


def batched_product(args: Sequence[Any], outputs: Sequence[Tensor], card: object) -> list[int]:
    """`bmm(a, b)` and `baddbmm(c, a, b)`."""
    first, second = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    _, rows, columns = outputs[0].shape
    inner = int(first.shape[2])
    transposed = not (outputs[0].stride(1) == 1 and (columns == 1 or outputs[0].stride(2) >= max(1, rows)))
    if transposed:
        return _batch(second, True, columns, inner) + _batch(first, True, inner, rows)
    return _batch(first, False, rows, inner) + _batch(second, False, inner, columns)


def matrix_vector(args: Sequence[Any], outputs: Sequence[Tensor], card: object) -> list[int]:
    """`mv(a, x)`: a vector without a stride is copied."""
    matrix, vector = args[-2:]
    copied = [_bytes(vector)] if vector.stride(0) == 0 and vector.numel() > 1 else []
    return copied + _matrix(matrix)


def workspace_bytes(target: Target) -> int:
    """What one thread that multiplies matrices keeps for cuBLAS: the target's, or what the environment says.

    CUBLAS_WORKSPACE_CONFIG is ":SIZE:COUNT" one or more times, in KiB; ":0:0" is none. As in
    aten/src/ATen/cuda/CublasHandlePool.cpp, what cannot be read leaves the default.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    if not pairs:
        return target.gemm_workspace_bytes
    return sum(1024 * int(size) * int(count) for size, count in pairs)
