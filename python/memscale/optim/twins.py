# SPDX-License-Identifier: Apache-2.0
"""Copies of optimizers that share no dictionary with them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, Final

import torch

_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list)


def apart(value: Any) -> Any:
    """A copy of dictionaries and lists, and of those inside of them; all else is the same in both."""
    if type(value) not in _CONTAINERS:
        return value
    made = copy.copy(value)
    items = made.items() if isinstance(made, dict) else enumerate(made)
    for key, part in list(items):
        if type(part) in _CONTAINERS:
            made[key] = apart(part)
    return made


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As `copy.copy`, whose `__setstate__` writes to the dictionaries that both then have.

    PyTorch's adds "differentiable" to the defaults, and switches that have come since to the groups; Adam's
    makes tensors of step counters.
    """
    reduced: Any = () if hasattr(type(optimizer), "__copy__") else optimizer.__reduce_ex__(4)
    if len(reduced) < 3 or not isinstance(reduced[2], dict) or any(reduced[3:]):
        return copy.copy(optimizer)
    make, args, state = reduced[:3]
    made: Any = make(*args)
    made.__setstate__(apart(state))
    return made  # type: ignore[no-any-return]
