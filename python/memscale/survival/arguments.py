# SPDX-License-Identifier: Apache-2.0
"""A forward's arguments as they were when it began, for one that is repeated.

The forward gets the very objects that its caller gave. It may fill or empty containers among them, and
write to tensors; so may the caller before backward. Containers are noted by what they hold, tensors by
version, storage, value and attributes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from memscale.state.module_notes import Stamp, stamp_of
from memscale.state.value_tables import differs
from memscale.techniques.checkpoint.given_arguments import may_be_given_again
from memscale.techniques.checkpoint.recompute_check import Fingerprint, fingerprint
from memscale.torchkit.torch_settings import has_modes, without_modes

_SEQUENCES: Final = (list, deque)
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)
_TENSORS: Final = (Tensor, nn.Parameter)


class _Before(NamedTuple):
    """A tensor as it was."""

    tensor: Tensor
    stamp: Stamp
    value: Fingerprint
    attributes: dict[str, Any]


class Arguments:
    """Those of one call.

    Args:
        args: positional ones.
        kwargs: by name.

    Attributes:
        leaves: what is in no container.
        refusal: why a forward that is given these cannot begin anew; "": it can.
        needs_gradient: one of them needs a gradient.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.leaves: list[Any] = []
        self.refusal = ""
        self._held: dict[int, tuple[Any, Any]] = {}  # id → container, what it held
        for value in (*args, *kwargs.values()):
            self._note(value)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.needs_gradient = any(tensor.requires_grad for tensor in tensors)
        self._before: list[_Before] = []
        if not self.refusal:
            self._before = [
                _Before(tensor, stamp_of(tensor), _value(tensor), tensor.__dict__.copy())
                for tensor in tensors
            ]

    def _note(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._held:
            return
        if kind in _SEQUENCES or kind in _MAPPINGS:
            held = copy.copy(value)
            self._held[id(value)] = (value, held)
            for item in held.values() if kind in _MAPPINGS else held:
                self._note(item)
        elif isinstance(value, tuple):
            for item in value:
                self._note(item)
        else:
            self.leaves.append(value)
            known = kind in _TENSORS if isinstance(value, Tensor) else _is_plain(value)
            if not known and not self.refusal:
                self.refusal = f"it is given a {kind.__name__}, which it may change"

    def changed(self) -> str:
        """What has been written to since the call began; "": nothing."""
        for tensor, stamp, value, attributes in self._before:
            kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
            if stamp_of(tensor) != stamp or _value(tensor) != value:
                return f"an argument, {kind}, has been written to"
            now = tensor.__dict__
            if now.keys() != attributes.keys() or any(differs(now[key], attributes[key]) for key in now):
                return f"attributes of an argument, {kind}, have changed"
        return ""

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the caller gave."""
        return self._args, self._kwargs

    def put_back(self) -> None:
        """Makes the caller's containers hold what they held."""
        for container, held in self._held.values():
            _fill(container, held)

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same, with containers of their own that hold what the caller's held."""
        made: dict[int, Any] = {}
        args = tuple(self._again(value, made) for value in self._args)
        return args, {name: self._again(value, made) for name, value in self._kwargs.items()}

    def _again(self, value: Any, made: dict[int, Any]) -> Any:
        if id(value) in made:
            return made[id(value)]
        if id(value) in self._held:
            container = made[id(value)] = copy.copy(self._held[id(value)][1])
            _fill(container, with_each(container, lambda item: self._again(item, made)))
            return container
        if isinstance(value, tuple):
            return with_each(value, lambda item: self._again(item, made))
        return value


def _is_plain(value: Any) -> bool:
    """Whether a value is known to have no state: what a function has closed over may change, too."""
    if callable(value) and not isinstance(value, (type, nn.Module)):
        return isinstance(value, (FunctionType, BuiltinFunctionType)) and not getattr(
            value, "__closure__", None
        )
    return may_be_given_again(value)


def with_each(container: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same kind with what a function gives for each of its values."""
    if isinstance(container, dict):
        return [(key, function(item)) for key, item in container.items()]
    items = [function(item) for item in container]
    if not isinstance(container, tuple):
        return items
    if all(new is old for new, old in zip(items, container, strict=True)):
        return container
    return container._make(items) if hasattr(container, "_make") else type(container)(items)


def _fill(container: Any, values: Any) -> None:
    items: list[Any] = list(values.items() if isinstance(values, dict) else values)
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(items)


def _value(tensor: Tensor) -> Fingerprint:
    """On the host. What a card has would have to be waited for."""
    if not tensor.is_cpu:
        return None
    with without_modes() if has_modes() else nullcontext():
        return fingerprint(tensor.detach(), sampled=False)
