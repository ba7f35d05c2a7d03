# SPDX-License-Identifier: Apache-2.0
"""A lock per model: one thread at a time exchanges the tensors in its modules.

Recomputes put parameters, buffers and flags back for a while; tiles, and heads in tiles, run on stand-ins
for parameters. A thread that does that holds the lock of the model for as long, and so does a
thread that notes what is there:

    thread A   tile    lock │ stand-ins in … parameters back │ free
    thread B   recompute     waits ………………………………………………………│ lock │ what differs in … and out │ free

Where nothing differs nothing is exchanged, and nobody waits: a recompute inside of a tile's backward, which
may be in another of autograd's threads, finds the stand-ins that it has written down.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from memscale.torchkit.compiled import never_compiled

_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Beside the modules, not on them: copies and files of a model know nothing of it."""

_sharing = threading.RLock()


def lock_of(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """What is held while modules have something exchanged, and while what they have is written down.

    One for all of a wrapped model, and so for any of its parts. A module without one gets that of the first
    of the others that has one. Two models that had one each, and then became parts of a third, keep theirs:
    a thread that needs both takes them in one order, and no part of what it runs needs another one.

    Args:
        modules: with all that is in them.
    """
    found = _known(modules)
    if None in found:
        share_lock(modules)
        found = _known(modules)
    if len(found) > 1:
        return _held(sorted(found, key=id))
    lock: AbstractContextManager[Any] = next(iter(found), nullcontext())
    return lock


def _known(modules: Sequence[nn.Module]) -> set[Any]:
    """Their locks; None for what has none."""
    known: dict[Any, Any] = _locks.data  # type: ignore[attr-defined]  # which `_locks.get` asks, one by one
    return set(map(known.get, map(weakref.ref, modules)))


def share_lock(modules: Sequence[nn.Module]) -> None:
    """Modules of one model: those that have no lock yet get one for all."""
    with _sharing:
        known = filter(None, map(_locks.get, modules))
        lock = next(known, None) or threading.RLock()
        for module in modules:
            _locks.setdefault(module, lock)


@contextmanager
def _held(locks: Iterable[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


def _forget_locks() -> None:
    """In a child of fork: threads that held them are not there."""
    global _sharing
    _locks.clear()
    _sharing = threading.RLock()


os.register_at_fork(after_in_child=_forget_locks)
never_compiled(lock_of, share_lock)
