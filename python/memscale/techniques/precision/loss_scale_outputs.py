# SPDX-License-Identifier: Apache-2.0
"""Replaces FP16 outputs of a model by FP32 copies, so that the loss is computed in FP32.

Nesting and types stay: tuples, named tuples, lists, mappings (those of transformers among them), dataclasses.
A tensor that is returned twice is copied once. What holds tensors in a way of its own, such as a key/value
cache, stays as it is, and so does what no gradient goes to.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def in_fp32(output: Any) -> Any:
    """The output with FP32 copies of FP16 tensors; the same object where there are none."""
    return _converted(output, {}, _is_fp16_result)


def evaluated_in_fp32(output: Any) -> Any:
    """The output of an evaluation with FP32 copies of BF16 tensors."""
    return _converted(output, {}, lambda value: value.dtype is torch.bfloat16)


def evaluated(kind: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward with BF16 weights that is not trained, where nobody has opened autocast: as this computes it.

    Args:
        kind: of the weights' device.
        forward: runs the model.
        args: positional part of the batch.
        kwargs: keyword part.
    """
    if torch.is_autocast_enabled(kind):
        return forward(*args, **kwargs)
    with torch.autocast(kind, dtype=torch.bfloat16):
        output = forward(*args, **kwargs)
    return evaluated_in_fp32(output)


def _is_fp16_result(value: Tensor) -> bool:
    """A leaf is no result: the forward hands on what it was given."""
    return value.dtype is torch.float16 and value.requires_grad and not value.is_leaf


def _converted(value: Any, done: dict[int, Any], wanted: Callable[[Tensor], bool]) -> Any:
    if isinstance(value, Tensor):
        if not wanted(value):
            return value
        if id(value) not in done:
            done[id(value)] = value.float()
        return done[id(value)]
    if isinstance(value, (tuple, list)):
        items = [_converted(item, done, wanted) for item in value]
        return value if _unchanged(items, value) else _sequence(value, items)
    if isinstance(value, Mapping):
        named = {key: _converted(item, done, wanted) for key, item in value.items()}
        return value if _unchanged(named.values(), value.values()) else _mapping(value, named)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        named = {name: _converted(item, done, wanted) for name, item in fields.items()}
        return value if _unchanged(named.values(), fields.values()) else _dataclass(value, named)
    return value


def _unchanged(items: Any, before: Any) -> bool:
    return all(item is old for item, old in zip(items, before, strict=True))


def _sequence(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple takes them one by one
        return type(value)(*items)
    return type(value)(items)


def _mapping(value: Any, named: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(named)
    made = copy.copy(value)
    for key, item in named.items():
        made[key] = item
    return made


def _dataclass(value: Any, named: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for name, item in named.items():
        object.__setattr__(made, name, item)  # a frozen one too
    return made
