# SPDX-License-Identifier: Apache-2.0
"""Key/value caches among the arguments of a call: which keep what they are given, and which keep nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_MARK = "_memscale_keeps_nothing"


def mark(cache: Any) -> None:
    """This cache keeps nothing from now on."""
    setattr(cache, _MARK, True)


def keeps_nothing(value: Any) -> bool:
    """Whether this is a cache that keeps nothing, so that a recompute may be given it again."""
    return getattr(value, "__dict__", {}).get(_MARK, False) is True


def is_cache(value: Any) -> bool:
    """Whether this is a cache of transformers, of any kind."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


_PLAIN = (type(None), bool, int, float, str)


def are_filled(values: Iterable[Any]) -> bool:
    """Whether a cache that keeps what it is given is among the arguments of a call.

    A recompute would fill it a second time. Plans know of those that the trace has seen; this is for what
    comes later: a cache that is switched on, a part of the model that is called by itself.
    """
    return any(
        not isinstance(value, _PLAIN) and is_cache(value) and not keeps_nothing(value) for value in values
    )


def _apart(tensor: Tensor) -> Tensor:
    """The same values, and a graph that begins here."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _places(args: Any, kwargs: Any) -> Iterator[dict[Any, Any]]:
    """Where caches among the arguments of a call have their tensors: attributes, and tables of them."""
    pending = [leaf for leaf in tree_leaves((args, kwargs)) if is_cache(leaf)]
    while pending:
        attributes = vars(pending.pop())
        yield attributes
        for name, value in list(attributes.items()):
            if is_cache(value):
                pending.append(value)
            elif isinstance(value, dict):
                yield value
            elif name == "layers":
                pending += value


def exchange(args: Any, kwargs: Any, made: Callable[[Tensor], Tensor]) -> None:
    """Puts something else in the place of the tensors in caches; inside `preserved` only."""
    for place in _places(args, kwargs):
        place.update({name: made(value) for name, value in place.items() if isinstance(value, Tensor)})


@contextmanager
def preserved(args: Any, kwargs: Any) -> Iterator[None]:
    """For a trace, which fills caches among its arguments, and runs backward from what is in them.

    In the block they have the same content without the graph that has made it. Afterwards they have what they
    had before.
    """
    before = [(place, dict(place)) for place in _places(args, kwargs)]
    for _, was in before:
        if "layers" in was:
            was["layers"] = list(was["layers"])
    exchange(args, kwargs, _apart)
    try:
        yield
    finally:
        for present, was in before:
            present.clear()
            present.update(was)
