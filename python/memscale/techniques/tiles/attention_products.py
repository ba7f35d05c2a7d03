# SPDX-License-Identifier: Apache-2.0
"""Products of batches of matrices, in the ways that attention is written: `@`, `bmm`, `baddbmm`, `einsum`."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """`left @ right`, or `alpha * (left @ right) + beta * added`.

    Attributes:
        left: [..., rows, inner].
        right: [..., inner, columns].
        order: dimensions of the result that is asked for; None: as they are.
        added: what `baddbmm` adds, times `beta`; None for the others.
        alpha: what it multiplies the product by.
        beta: see `added`.
    """

    left: Tensor
    right: Tensor
    order: tuple[int, ...] | None = None
    added: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0


def product_of(func: Any, args: Any, kwargs: Any, left: Tensor | None = None) -> Product | None:
    """The product that a function makes; None if it is no product of batches of matrices.

    Args:
        func: one of `FUNCTIONS`.
        args: its arguments.
        kwargs: by keyword.
        left: has to be the left operand as it is, without another order of its dimensions.
    """
    made = _made(func, args, kwargs, left)
    if made is None or min(made.left.dim(), made.right.dim()) < 3:
        return None
    if made.left.shape[-1] != made.right.shape[-2] or (left is not None and made.left is not left):
        return None
    return made


def _made(func: Any, args: Any, kwargs: Any, left: Tensor | None) -> Product | None:
    if func is torch.einsum:
        return None if kwargs else _einsum(args, left)
    if func in (torch.baddbmm, Tensor.baddbmm):
        return _baddbmm(*args, **kwargs) if "out" not in kwargs and len(args) < 4 else None
    if kwargs or len(args) != 2 or not all(isinstance(value, Tensor) for value in args):
        return None
    return Product(*args)


def _baddbmm(
    input: Any, batch1: Any = None, batch2: Any = None, beta: Any = 1, alpha: Any = 1
) -> Product | None:
    if not all(isinstance(value, Tensor) for value in (input, batch1, batch2)):
        return None
    if not all(isinstance(value, (int, float)) for value in (beta, alpha)):
        return None
    return Product(batch1, batch2, None, input, alpha, beta)


def _einsum(args: Any, left: Tensor | None) -> Product | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    letters, arrow, result = "".join(equation.split()).partition("->")
    names = letters.split(",")
    if "..." in letters:
        names, result = _spelled_out(names, result, operands)
    if not arrow or len(names) != 2 or not all(part.isalpha() for part in (*names, result)):
        return None
    for first in (0, 1) if left is None else (0,):
        one, other = operands[first], operands[1 - first]
        order = _orders(names[first], names[1 - first], result)
        if order is None or one.dim() != len(names[first]) or other.dim() != len(names[1 - first]):
            continue
        turned, right, back = order
        whole = back == tuple(range(len(back)))
        if left is None and whole:
            return Product(one.permute(turned), other.permute(right))
        if left is not None and turned == tuple(range(len(turned))):
            return Product(one, other.permute(right), None if whole else back)
    return None


def _spelled_out(names: list[str], result: str, operands: list[Any]) -> tuple[list[str], str]:
    """Letters in place of an ellipsis that stands for as many dimensions in all three."""
    free = [letter for letter in string.ascii_uppercase if letter not in "".join([*names, result])]
    left = [operand.dim() - len(name) + 3 for name, operand in zip(names, operands, strict=False)]
    some = "".join(free[: left[0]])
    if len(set(left)) > 1 or not all("..." in name for name in (*names, result)):
        return [], ""
    return [name.replace("...", some) for name in names], result.replace("...", some)


def _orders(one: str, other: str, result: str) -> tuple[tuple[int, ...], ...] | None:
    """Dimensions of the operands as [batch, rows, inner] and [batch, inner, columns], and of the result."""
    rows = [name for name in one if name not in other]
    columns = [name for name in other if name not in one]
    inner = [name for name in one if name in other and name not in result]
    if not len(rows) == len(columns) == len(inner) == 1:
        return None
    batch = [name for name in result if name not in (*rows, *columns)]
    lefts, rights, made = [*batch, *rows, *inner], [*batch, *inner, *columns], [*batch, *rows, *columns]
    if sorted(lefts) != sorted(one) or sorted(rights) != sorted(other) or sorted(made) != sorted(result):
        return None
    return (
        tuple(map(one.index, lefts)),
        tuple(map(other.index, rights)),
        tuple(map(made.index, result)),
    )


def product_dtype(left: torch.dtype, right: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Dtype of a product under the autocast in force; None where plain PyTorch refuses."""
    kind = device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (left, right):
        return torch.get_autocast_dtype(kind)
    return left if left == right else None


FUNCTIONS = frozenset(
    (
        torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm,
        torch.einsum,
    )
)  # fmt: skip
"""What `product_of` takes."""
