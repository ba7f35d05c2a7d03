# SPDX-License-Identifier: Apache-2.0
"""What a forward has returned: which tensors of it have a graph, and others in their places.

Lists, dictionaries and dataclasses stay the objects that they are, since the model may hold them, too; tuples
are made anew.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.survival.arguments import with_each
from memscale.torchkit.leaves import tensors_of

_KINDS: Final = (Tensor, nn.Parameter)
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)
_LIBRARIES: Final = ("transformers.", "diffusers.")
"""Their outputs are dictionaries whose attributes follow."""


class CannotCutError(Exception):
    """The model's graph cannot be parted from the loop's; the message says why."""


def graph_outputs(output: Any) -> list[Tensor]:
    """The tensors of an output that have a graph, each once.

    Raises:
        CannotCutError: one cannot be exchanged: of a special type, in an object, or two on one memory.
    """
    found: dict[int, Tensor] = {}
    _collect(output, found, set())
    storages = {tensor.untyped_storage()._cdata for tensor in found.values()}
    if len(storages) < len(found):
        raise CannotCutError("two outputs lie on the same memory")
    return list(found.values())


def check_own_memory(made: Iterable[Tensor], others: Iterable[Any]) -> None:
    """Whether outputs lie on memory of their own.

    Raises:
        CannotCutError: one lies on that of a weight, a buffer or an argument.
    """
    theirs = {
        tensor.untyped_storage()._cdata
        for tensor in others
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and type(tensor) in _KINDS
    }
    if any(tensor.untyped_storage()._cdata in theirs for tensor in made):
        raise CannotCutError("an output is a view of a weight, a buffer or an argument")


def check_holders(output: Any, made: Sequence[Tensor]) -> None:
    """Whether outputs are held by what was returned alone: through others the loop would get past a boundary.

    It asks the garbage collector, which looks at all objects of the process.

    Raises:
        CannotCutError: one is held by an attribute, or by what a function has closed over.
    """
    holders: list[Any] = [made]
    _note_holders(output, holders)
    known = set(map(id, holders))
    for tensor in made:
        for holder in gc.get_referrers(tensor):
            if id(holder) not in known and not isinstance(holder, FrameType):
                raise CannotCutError("an output is held elsewhere as well, by an attribute, say")


def exchanged(output: Any, others: dict[int, Tensor]) -> Any:
    """An output with other tensors.

    Args:
        output: that `graph_outputs` has looked at.
        others: by the ids of those in whose places they come.
    """
    return _exchanged(output, others, set())


def _collect(value: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.grad_fn is None:
            return
        if type(value) not in _KINDS or value.layout is not torch.strided:
            raise CannotCutError(f"an output is a {type(value).__name__}, {value.layout}")
        if value.__dict__ or value._backward_hooks or value.retains_grad:
            raise CannotCutError("an output has attributes, hooks, or keeps its gradient")
        found[id(value)] = value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts = _parts_of(value)
    if parts is None:
        held = list(value.values()) if isinstance(value, dict) else value
        if any(part.grad_fn is not None for part in tensors_of(held)):
            raise CannotCutError(f"the output has tensors in a {type(value).__name__}")
        return
    for part in parts:
        _collect(part, found, seen)


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What is in a value that `_exchanged` can put something else into; None: nothing can be put there."""
    kind = type(value)
    if kind in _MAPPINGS or (isinstance(value, dict) and kind.__module__.startswith(_LIBRARIES)):
        return list(value.values())
    if kind in (list, tuple) or hasattr(kind, "_make"):
        return value  # type: ignore[no-any-return]
    if _is_open(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _is_open(value: Any) -> bool:
    """Whether this is a dataclass's instance whose fields can be set."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen


def _note_holders(value: Any, holders: list[Any]) -> None:
    parts = None if isinstance(value, Tensor) else _parts_of(value)
    if parts is None or any(value is holder for holder in holders):
        return
    holders += [value, parts, getattr(value, "__dict__", None)]
    for part in parts:
        _note_holders(part, holders)


def _exchanged(value: Any, others: dict[int, Tensor], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if id(value) in seen:
        return value
    if isinstance(value, tuple):
        return with_each(value, lambda item: _exchanged(item, others, seen))
    seen.add(id(value))
    if isinstance(value, dict):
        _set_each(value.items(), value.__setitem__, others, seen)
    elif isinstance(value, list):
        _set_each(enumerate(value), value.__setitem__, others, seen)
    elif _is_open(value):
        fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
        _set_each(fields, lambda name, new: setattr(value, name, new), others, seen)
    return value


def _set_each(
    items: Iterable[tuple[Any, Any]],
    put: Callable[[Any, Any], None],
    others: dict[int, Tensor],
    seen: set[int],
) -> None:
    for key, item in list(items):
        new = _exchanged(item, others, seen)
        if new is not item:
            put(key, new)
