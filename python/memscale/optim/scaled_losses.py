# SPDX-License-Identifier: Apache-2.0
"""Tells whether a backward began at a loss that `torch.amp.GradScaler` has scaled.

A step in backward would use such gradients as they are, and the scaler comes to unscale them, or to skip the
step, when it is too late. So while somebody asks, `GradScaler.scale` puts a hook on what it returns, which
notes the backward that passes it, before any gradient is complete.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PASSED: Final[deque[int]] = deque(maxlen=16)
"""The latest backwards that began so. PyTorch never uses a number again."""

_askers: list[object] = []
_original: Callable[..., Any] | None = None


def watch() -> object:
    """Looks at scaled losses from now on. Returns what `unwatch` is to be given."""
    global _original
    if not _askers:
        _original = torch.amp.GradScaler.scale
        torch.amp.GradScaler.scale = _noted(_original)  # type: ignore[method-assign]
    asker = object()
    _askers.append(asker)
    return asker


def unwatch(asker: object) -> None:
    """See `watch`. What was given already, or never: nothing."""
    if asker not in _askers:
        return
    _askers.remove(asker)
    if not _askers and hasattr(torch.amp.GradScaler.scale, "_memscale_notes"):
        torch.amp.GradScaler.scale = _original  # type: ignore[method-assign, assignment]


def is_scaled() -> bool:
    """Whether the backward that runs began at a scaled loss."""
    return torch._C._current_graph_task_id() in _PASSED


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        made = original(self, outputs)
        for leaf in tree_leaves(made) if self.is_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_note)
        return made

    scale._memscale_notes = True  # type: ignore[attr-defined]
    return scale


def _note(gradient: Tensor) -> None:
    _PASSED.append(torch._C._current_graph_task_id())
