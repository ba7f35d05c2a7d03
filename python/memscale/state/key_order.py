# SPDX-License-Identifier: Apache-2.0
"""Reads and writes dict subclasses as plain dictionaries, in order.

An `OrderedDict` has an order beside that of the dictionary which it is: which one is meant decides the class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import dropwhile
from typing import Any


def base_of(place: dict[Any, Any]) -> Any:
    """The class whose methods read and write it and run no code of its own."""
    return OrderedDict if isinstance(place, OrderedDict) else dict


def items_of(place: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What it holds, in order."""
    return list(base_of(place).items(place))


def put_in_order(place: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Puts keys that it has into this order, behind its others."""
    if isinstance(place, OrderedDict):
        for key in keys:
            OrderedDict.move_to_end(place, key)
        return
    for key in keys:
        dict.__setitem__(place, key, dict.pop(place, key))


def put_back_in_order(place: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Likewise, where it has no others. What comes in order already stays where it is."""
    present = iter(list(base_of(place).keys(place)))
    late = [key for _, key in dropwhile(lambda pair: pair[0] == pair[1], zip(present, keys, strict=False))]
    put_in_order(place, late)


def refill(place: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Makes it hold these and nothing else."""
    base = base_of(place)
    base.clear(place)
    for key, value in values.items():
        base.__setitem__(place, key, value)
