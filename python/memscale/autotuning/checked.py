# SPDX-License-Identifier: Apache-2.0
"""Checks arguments that several of this room's classes have."""

from __future__ import annotations

import operator
from typing import Any

from memscale.config.checks import show


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """A whole number; NumPy's too.

    Raises:
        TypeError: it is none.
        ValueError: it is below `least`.
    """
    allowed = f"allowed: a whole number, {least} or more"
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; {allowed}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {show(value)}; {allowed}") from None
    if number < least:
        raise ValueError(f"{name} is {number}; {allowed}")
    return number
