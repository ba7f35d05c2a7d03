# SPDX-License-Identifier: Apache-2.0
"""Layers around the one function of PyTorch's that every backward goes through.

    torch.autograd.backward, torch.autograd.grad ──► first layer ──► … ──► PyTorch's own

PyTorch replaces that function itself for its compiler's purposes. A backward that begins in C++ does not pass
it. While there is no layer, PyTorch's own function is in its place.

Source: torch/autograd/graph.py, `_engine_run_backward`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

_NAME: Final = "_engine_run_backward"

Backward = Callable[..., Any]
"""Takes roots, their gradients, retain_graph, create_graph, inputs, and keywords; see PyTorch's."""

Layer = Callable[..., Any]
"""A `Backward` with one more argument in front: the next one to call."""

run_backward: Final[Backward | None] = getattr(torch.autograd, _NAME, None)
"""PyTorch's own function, past all layers; None: this PyTorch has it not."""


def roots_of(thread: int) -> tuple[Any, ...]:
    """Where the innermost backward that a thread is in has begun: tensors, or edges of a graph; (): in none.

    Args:
        thread: its identifier. A card's gradients are computed on others.
    """
    code = getattr(run_backward, "__code__", None)
    frame = None if code is None else sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return () if frame is None else tuple(frame.f_locals.get("t_outputs", ()))


class _Door:
    """Stands in for PyTorch's function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward through all layers."""
        call: Any = run_backward
        for layer in reversed(_layers):
            call = functools.partial(layer, call)
        return call(*args, **kwargs)


_lock = threading.RLock()
_layers: tuple[Layer, ...] = ()
_DOOR: Final = _Door()


def add(layer: Layer, first: bool = False) -> None:
    """Puts a layer in, once; puts the door in again where somebody has put PyTorch's function back.

    Args:
        layer: compared by identity.
        first: before the others, not after them.
    """
    global _layers
    with _lock:
        if not any(item is layer for item in _layers):
            _layers = (layer, *_layers) if first else (*_layers, layer)
        _replace(run_backward, _DOOR)


def remove(layer: Layer) -> None:
    """Takes a layer out; after the last one PyTorch's function is in its place."""
    global _layers
    with _lock:
        _layers = tuple(item for item in _layers if item is not layer)
        if not _layers:
            _replace(_DOOR, run_backward)


def _replace(old: Any, new: Any) -> None:
    for module in (torch.autograd, torch.autograd.graph):
        if module.__dict__.get(_NAME) is old:  # not if somebody else's is on top
            setattr(module, _NAME, new)
