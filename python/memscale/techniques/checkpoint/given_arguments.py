# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call that a second one can be given."""

from __future__ import annotations

from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.techniques.checkpoint.given_caches import keeps_nothing

_PLAIN_ARGUMENTS: Final = (
    Tensor, type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, torch.Generator, nn.Module, type, FunctionType, MethodType,
    BuiltinFunctionType,
)  # fmt: skip
"""Arguments that a recompute can be given again. Anything else may have been changed by the first."""


def may_be_given_again(value: Any) -> bool:
    """Whether a second forward may be given an argument that is in no container: the first cannot change it.

    Beside plain values these are objects that say of themselves that they do not change, and configurations.
    """
    if isinstance(value, _PLAIN_ARGUMENTS) or keeps_nothing(value):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return (
        bool(parameters is not None and parameters.frozen)
        or callable(value)
        or type(value).__name__.endswith("Config")
    )
