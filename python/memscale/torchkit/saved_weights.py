# SPDX-License-Identifier: Apache-2.0
"""A weight that a custom autograd function saves comes out of `ctx.saved_tensors` as itself.

PyTorch makes a new tensor of what saved-tensor hooks return: the same memory, but another object, without
the weight's attributes and with a `.grad` of its own. A backward that asks more of a weight than its values
goes wrong without a word: `weight.grad += …`, `getattr(weight, "lr_mult", 1.0)`, a table by identity. While
models are attached, `saved_tensors` therefore gives the parameter or buffer of theirs that lies where the
saved tensor does. Without hooks PyTorch gives the object that was saved, and so it does here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_plain: Any = torch._C._FunctionBase.saved_tensors
_lock = threading.Lock()
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_known: dict[int, list[weakref.ref[Tensor]]] | None = None
"""By storage: tensors of the models. None: to be looked up anew."""


def watch(model: nn.Module) -> None:
    """From now on the weights of a model come out as themselves."""
    with _lock:
        _models.add(model)
        BackwardCFunction.saved_tensors = property(_saved)  # type: ignore[assignment]
    stale()


def forget(model: nn.Module) -> None:
    """Ends `watch`. With the last model, PyTorch's class has nothing of ours any more."""
    with _lock:
        _models.discard(model)
        if not _models and "saved_tensors" in BackwardCFunction.__dict__:
            del BackwardCFunction.saved_tensors
    stale()


def stale() -> None:
    """A forward begins: the models may have other tensors than before."""
    global _known
    _known = None


@contextmanager
def exchanged() -> Iterator[None]:
    """Runs the block while models have other tensors in the place of their own."""
    stale()
    try:
        yield
    finally:
        stale()


def _saved(ctx: Any) -> tuple[Any, ...]:
    saved = _plain.__get__(ctx)
    return tuple(_itself(value) if isinstance(value, Tensor) and value.is_leaf else value for value in saved)


def _itself(saved: Tensor) -> Tensor:
    """The model's tensor that a saved one is, or the saved one."""
    try:
        place = _place(saved)
    except (RuntimeError, NotImplementedError):  # it has no storage
        return saved
    for ref in _tensors().get(place[0], ()):
        own = ref()
        if own is not None and (own is saved or (_place(own) == place and own.is_leaf)):
            return own
    return saved


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how it is read."""
    storage = tensor.untyped_storage()._cdata
    return (
        storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad,
    )  # fmt: skip


def _tensors() -> dict[int, list[weakref.ref[Tensor]]]:
    global _known
    known = _known
    if known is None:
        known = {}
        for model in list(_models):
            for tensor in (*model.parameters(), *model.buffers()):
                try:
                    known.setdefault(tensor.untyped_storage()._cdata, []).append(weakref.ref(tensor))
                except (RuntimeError, NotImplementedError):
                    continue
        _known = known
    return known
