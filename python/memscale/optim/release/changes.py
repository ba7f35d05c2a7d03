# SPDX-License-Identifier: Apache-2.0
"""Deferred operations on a released gradient: applied with today's values when it is back.

Only what computes each element from itself and numbers, with one rounding: then it does not matter whether it
runs on all elements or on a piece, nor which of them a kernel takes several at a time.

    x * number, x / number          clipping by norm, averaging
    clamp to numbers other than 0   clipping by value; of 0 and -0, which one wins depends on the kernel
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from memscale.optim.release.gradient_bytes import Change

_aten = torch.ops.aten

_PRODUCTS = frozenset(
    {_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar}
    | {_aten._foreach_mul_.Scalar, _aten._foreach_mul_.Tensor, _aten._foreach_mul_.ScalarList}
    | {_aten._foreach_div_.Scalar, _aten._foreach_div_.ScalarList}
    | ({_aten._foreach_div_.Tensor} if "Tensor" in _aten._foreach_div_.overloads() else set())
)
_CLAMPS = frozenset(
    {_aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default}
    | {_aten._foreach_clamp_min_.Scalar, _aten._foreach_clamp_max_.Scalar}
)
_ZEROS = frozenset({_aten.zero_.default, _aten._foreach_zero_.default})


def is_zeroing(func: Any) -> bool:
    """Whether an operation sets everything to zero."""
    return func in _ZEROS


def change_of(func: Any, args: Any, kwargs: Any) -> Change | None:
    """An operation on a gradient as something that can be done later; None where it is not that."""
    numbers, named = [_number(value) for value in args[1:]], {k: _number(v) for k, v in kwargs.items()}
    if any(value is _NO_NUMBER for value in (*numbers, *named.values())):
        return None
    if func in _CLAMPS:
        given = [value for value in (*numbers, *named.values()) if value is not None]
        if any(isinstance(value, Tensor) or value == 0 or math.isnan(value) for value in given):
            return None
    elif func not in _PRODUCTS:
        return None
    return functools.partial(_later, func, isinstance(args[0], (list, tuple)), numbers, named)


def _later(func: Any, in_list: bool, numbers: list[Any], named: dict[str, Any], elements: Tensor) -> None:
    given = [value.to(elements.device) if isinstance(value, Tensor) else value for value in numbers]
    func([elements] if in_list else elements, *given, **named)


def is_same_anywhere(change: Change, dtype: torch.dtype) -> bool:
    """Whether the host does a change from `change_of` with the bits of a card.

    Products are rounded once in FP32. A card divides by a number as it multiplies by its inverse, and the two
    round numbers of other types at different times.
    """
    assert isinstance(change, functools.partial)
    name = change.args[0].overloadpacket
    return dtype is torch.float32 and name in (_aten.mul_, _aten._foreach_mul_)


_NO_NUMBER = object()


def _number(value: Any) -> Any:
    """A number, or a tensor that is one, as it is now."""
    if type(value) is Tensor and value.dim() == 0 and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return [value[0]] if isinstance(value[0], (bool, int, float)) else _NO_NUMBER
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _NO_NUMBER
