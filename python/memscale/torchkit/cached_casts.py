# SPDX-License-Identifier: Apache-2.0
"""The casts of weights that autocast has cached, kept as they are while something else uses its cache.

    with torch.autocast("cpu"):
        a = model(x)    each weight is cast, and autocast keeps the cast until the outermost block ends
        b = model(y)    takes the same casts: one node for each weight, where both gradients are added in BF16

PyTorch only tells how to drop all of them. A weight that is cast once more has a second node: the gradients
are added in FP32, and have other bits. So a trace, which has to drop its own casts, puts the caller's back.

The cache is asked by an operation that autocast casts for, under a mode that computes nothing: the mode sees
either the weight that is to be cast or the cast from the cache. What the mode gives as the cast is cached.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = ("cpu", "cuda")

_CASTS = frozenset({torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default})


class _Asked(Exception):  # noqa: N818 - no error: the question is answered
    """The mode has seen what there is to see."""


class _Question(TorchDispatchMode):
    """Sees which cast an operation takes, and ends it.

    Args:
        answer: what is given as the cast where autocast asks for one; None: it is not made.
    """

    def __init__(self, answer: Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer = answer
        self.found: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CASTS:
            self.found = args[0]
        elif self.answer is not None:
            return self.answer
        raise _Asked


def _ask(weight: Tensor, answer: Tensor | None = None) -> Tensor | None:
    """The cast that the cache has of a weight, or None. With an answer: that is the cast from now on."""
    question = _Question(answer)
    try:
        # Beneath autograd, for which the cast has the node that it has.
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd(), question:
            torch.mm(weight, weight)
    except _Asked:
        pass
    return question.found


def is_open() -> bool:
    """Whether a block of autocast is open, at whose end the cache is dropped."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 or any(map(torch.is_autocast_enabled, _KINDS))


@contextmanager
def _asking() -> Iterator[None]:
    """Autocast for every device, with its cache, for the time of a block without any other effect."""
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(True)
        for kind in _KINDS:
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, True)
        yield


def _may_be_cached(value: Any) -> bool:
    if not issubclass(type(value), Tensor):
        return False
    kind = value.dtype is torch.float32 and value.layout is torch.strided and value.device.type in _KINDS
    return kind and value.requires_grad and value.is_leaf and not value._is_view()


def _cached(tensors: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Which of them have been cast, and their casts."""
    with _asking():
        for tensor in tensors:
            cast = _ask(tensor) if _may_be_cached(tensor) else None
            if cast is not None and cast is not tensor:
                yield tensor, cast


def first(tensors: Iterable[Any]) -> Tensor | None:
    """The first of them that the cache has the cast of; None: it has none."""
    return next((tensor for tensor, _ in _cached(tensors)), None)


def has_any(tensors: Iterable[Any]) -> bool:
    """Whether the cache has the cast of one of them."""
    return any(True for _ in _cached(tensors))


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """An empty cache for the time of a block; afterwards it is as before.

    Args:
        model: whose weights are looked at in any case. Those of others are as far as the garbage collector
            shows them: it hides what the program has frozen.
    """
    if not is_open():
        yield
        return
    # No list display: it would be among the objects, and hold itself and all of them until a collection.
    alive = itertools.chain(gc.get_objects(), model.parameters())
    known = {id(tensor): tensor for tensor in alive if _may_be_cached(tensor)}
    del alive
    before = list(_cached(known.values()))
    del known
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        with _asking():
            for tensor, cast in before:
                _ask(tensor, cast)
