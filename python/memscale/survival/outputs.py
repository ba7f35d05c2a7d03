# SPDX-License-Identifier: Apache-2.0
"""What a forward has returned: which tensors of it have a graph, and others in their places.

Lists, dictionaries, dataclasses and transformers' key/value caches stay the objects that they are, since the
model may hold them, too; tuples are made anew.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.survival.arguments import with_each
from memscale.torchkit.leaves import tensors_of

_KINDS: Final = (Tensor, nn.Parameter)
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)
_LIBRARIES: Final = ("transformers.", "diffusers.")
"""Their outputs are dictionaries whose attributes follow; other objects there hold tensors as attributes."""

_NODES_OF_CONTEXTS: Final = ("hamt", "hamt_array_node", "hamt_bitmap_node", "hamt_collision_node")
"""Types of CPython's that a `contextvars.Context` consists of."""

_MOST_HOLDERS: Final = 64


class CannotCutError(Exception):
    """The model's graph cannot be parted from the loop's; the message says why."""


Path = tuple[Any, ...]
"""Where a tensor is in an output: keys, places, names of attributes."""


def graph_outputs(output: Any) -> dict[Path, Tensor]:
    """The tensors of an output that have a graph, each once, by the first place where it is.

    Raises:
        CannotCutError: one cannot be exchanged: of a special type, in an object, or two on one memory.
    """
    found: dict[Path, Tensor] = {}
    _collect(output, found, set(), ())
    storages = {tensor.untyped_storage()._cdata for tensor in found.values()}
    if len(storages) < len(found):
        raise CannotCutError("two outputs lie on the same memory")
    return found


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


def check_holders(output: Any, found: dict[Path, Tensor]) -> None:
    """Whether outputs are held by what was returned alone: through others the loop would get past a boundary.

    It asks the garbage collector, which looks at all objects of the process.

    Args:
        output: of a forward.
        found: `graph_outputs` of it; nothing else of the caller's holds them.

    Raises:
        CannotCutError: one is held by an attribute, or by what a function has closed over.
    """
    holders: list[Any] = [found]
    _note_holders(output, holders)
    known = set(map(id, holders))
    for tensor in found.values():
        referrers = gc.get_referrers(tensor)
        for holder in referrers:
            if id(holder) not in known and not _is_passing(holder, referrers):
                raise CannotCutError("an output is held elsewhere as well, by an attribute, say")


def _is_passing(holder: Any, asked: list[Any]) -> bool:
    """Whether the loop has no way to a holder: a frame that is about to end, or the context of a recompute.

    A list that a forward collects outputs in is in the context that its blocks' recomputes get.

    Args:
        holder: of a tensor.
        asked: a list of the caller's that has it, too.
    """
    waiting, mine = [holder], {id(asked)}
    mine.add(id(waiting))
    while waiting:
        item = waiting.pop()
        if isinstance(item, (FrameType, Context)) or type(item).__name__ in _NODES_OF_CONTEXTS:
            continue
        if type(item) not in (list, dict) or len(mine) > _MOST_HOLDERS:
            return False
        referrers = gc.get_referrers(item)
        waiting += [other for other in referrers if id(other) not in mine]
        mine.update(map(id, referrers))
        mine.add(id(referrers))
        del item, referrers
    return True


def exchanged(output: Any, others: dict[int, Tensor]) -> Any:
    """An output with other tensors.

    Args:
        output: that `graph_outputs` has looked at.
        others: by the ids of those in whose places they come.
    """
    return _exchanged(output, others, set())


def _collect(value: Any, found: dict[Path, Tensor], seen: set[int], path: Path) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.grad_fn is None:
            return
        if type(value) not in _KINDS or value.layout is not torch.strided:
            raise CannotCutError(f"an output is a {type(value).__name__}, {value.layout}")
        if value.__dict__ or value._backward_hooks or value.retains_grad:
            raise CannotCutError("an output has attributes, hooks, or keeps its gradient")
        found[path] = value
        return
    parts = _parts_of(value)
    if parts is None:
        held = list(value.values()) if isinstance(value, dict) else value
        if any(part.grad_fn is not None for part in tensors_of(held)):
            raise CannotCutError(f"the output has tensors in a {type(value).__name__}")
        return
    for key, part in parts:
        _collect(part, found, seen, (*path, key))


def _parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a value that `_exchanged` can put something else into; None: nothing can be put there."""
    kind = type(value)
    if kind in _MAPPINGS or (isinstance(value, dict) and kind.__module__.startswith(_LIBRARIES)):
        return list(value.items())
    if kind in (list, tuple) or hasattr(kind, "_make"):
        return list(enumerate(value))
    return _attributes(value)


def _attributes(value: Any) -> list[tuple[str, Any]] | None:
    """Those of an object that holds tensors in nothing else; None: it may, or they cannot be set."""
    kind = type(value)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None:
        names = () if parameters.frozen else dataclasses.fields(value)
        return [(item.name, getattr(value, item.name, None)) for item in names] or None
    setter: Any = object.__setattr__
    is_plain = kind.__setattr__ is setter and not isinstance(value, (dict, list, tuple, set, frozenset))
    if is_plain and kind.__module__.startswith(_LIBRARIES) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return None


def _note_holders(value: Any, holders: list[Any]) -> None:
    parts = None if isinstance(value, Tensor) else _parts_of(value)
    if parts is None or any(value is holder for holder in holders):
        return
    holders += [value, getattr(value, "__dict__", None)]
    for _, part in parts:
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
    else:
        _set_each(_attributes(value) or (), partial(setattr, value), others, seen)
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
