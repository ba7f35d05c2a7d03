# SPDX-License-Identifier: Apache-2.0
"""Hooks that a forward registers as it runs: on its input, on a weight, on a node of the graph.

    def forward(self, x):
        x.register_hook(lambda gradient: gradient * 0.5)

A recompute would register them again, on tensors whose gradients are still to come. Every kind of hook that
Python registers has a handle, so those that come in a recompute are taken off when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

_lock = threading.Lock()
_made: dict[int, list[RemovableHandle]] = {}
"""By thread: handles that were made since its recompute began."""

_init = RemovableHandle.__init__


def _noting(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    made = _made.get(threading.get_ident())
    if made is not None:
        made.append(self)


@contextmanager
def hooks_taken_off() -> Iterator[None]:
    """Takes the hooks off, as the block ends, that this thread has registered in it."""
    me = threading.get_ident()
    with _lock:
        around = _made.get(me)
        made: list[RemovableHandle] = []
        _made[me] = made
        RemovableHandle.__init__ = _noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            if around is None:
                del _made[me]
            else:
                _made[me] = around
            if not _made:
                RemovableHandle.__init__ = _init  # type: ignore[method-assign]
        for handle in reversed(made):
            handle.remove()
