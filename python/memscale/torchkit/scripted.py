# SPDX-License-Identifier: Apache-2.0
"""Interoperability with TorchScript.

A scripted function counts its calls: the first is profiled, a later one is compiled, and the results of the
two differ in rounding. So a call that plain PyTorch does not make changes the bits of all that follow. While
a plan is made, scripts run uncompiled and count nothing; whatever calls one in its forward runs once.

    call 1     profiled       every operation as written
    call 2 …   compiled       fused, differentiated by TorchScript's own formulas
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_KINDS: Final[tuple[Any, ...]] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
"""What Python calls: scripted or traced functions, and methods of scripted or traced modules."""

_lock: Final = threading.Lock()
_watching: list[tuple[int, Callable[[], object]]] = []
"""Threads that want to know of their calls, the latest last. All exchange the methods once."""

_originals: list[Any] = []


@contextmanager
def uncounted_scripts() -> Iterator[None]:
    """Scripts that this thread calls inside the block run uncompiled, and do not know of it afterwards."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        yield


@contextmanager
def script_calls(note: Callable[[], object]) -> Iterator[None]:
    """Calls `note` before this thread calls a script inside the block.

    Args:
        note: what it raises ends the call.
    """
    entry = (threading.get_ident(), note)
    with _lock:
        if not _watching:
            _exchange()
        _watching.append(entry)
    try:
        yield
    finally:
        with _lock:
            _watching.remove(entry)
            if not _watching:
                _put_back()


def _exchange() -> None:
    originals = [kind.__dict__["__call__"] for kind in _KINDS]
    noting = [_noting(original) for original in originals]
    _originals[:] = originals
    for kind, call in zip(_KINDS, noting, strict=True):
        kind.__call__ = call


def _put_back() -> None:
    for kind, original in zip(_KINDS, _originals, strict=True):
        kind.__call__ = original
    _originals.clear()


def _noting(original: Any) -> Callable[..., Any]:
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        for watcher, note in reversed(_watching):
            if watcher == thread:
                note()
                break
        return original.__get__(script)(*args, **kwargs)

    return call
