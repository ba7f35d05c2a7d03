# SPDX-License-Identifier: Apache-2.0
"""Tensors in what goes into a model and comes out of it, also in objects that PyTorch's trees end at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEEPEST = 3

_LONGEST = 1024
"""Entries of a container in an object; a longer one is a data set that a batch knows, and not looked into."""


def tensors_of(value: Any, depth: int = _DEEPEST) -> list[Tensor]:
    """The tensors in a batch or an output, in order.

    Args:
        value: of any structure.
        depth: how many objects deep to look: dataclasses, mappings and namespaces that are no node of
            PyTorch's trees, and instances that hold tensors as attributes, such as a batch of graphs.
    """
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth:
            found += tensors_of(_parts(leaf), depth - 1)
    return found


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, (str, bytes, int, float, complex, type, nn.Module)) or leaf is None:
        return []
    if isinstance(leaf, Mapping):
        return [] if len(leaf) > _LONGEST else list(filter(_is_short, leaf.values()))
    if dataclasses.is_dataclass(leaf):
        parts = (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
        return list(filter(_is_short, parts))
    own = getattr(leaf, "__dict__", None)
    return [] if callable(leaf) or not isinstance(own, dict) else list(filter(_is_short, own.values()))


def _is_short(part: Any) -> bool:
    return not isinstance(part, (list, tuple, dict)) or len(part) <= _LONGEST
