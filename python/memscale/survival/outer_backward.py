# SPDX-License-Identifier: Apache-2.0
"""Sees backwards of the loop: what they raise, and what a boundary wants to be run after them.

A layer of `torchkit.backward_calls`. A backward that begins in C++ does not pass it; a boundary in its graph
runs the model's graph at once, which gives the same bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from memscale.survival import uncaught
from memscale.survival.replay import Run, boundaries_behind
from memscale.torchkit import backward_calls
from memscale.torchkit.backward_calls import Backward
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.graph_task import in_backward


class Watch(Protocol):
    """What watches one wrapped model.

    Attributes:
        survives: it has steps repeated.
        latest: when its latest forward began, among those of all.
    """

    survives: bool
    latest: int

    def in_backward(self, error: Exception) -> None:
        """A backward of the loop has raised."""

    def elsewhere(self, error: BaseException) -> None:
        """An exception ends the program."""


_ARGUMENTS: Final = 4  # gradients of the roots, retain_graph, create_graph, inputs

_lock = threading.RLock()
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_calls: list[_Call] = []


class _Call:
    """A backward under way."""

    def __init__(self, accumulates: bool) -> None:
        self.is_inner = in_backward()
        self.accumulates = accumulates
        self.after: list[Callable[[], object]] = []

    def defer(self, what: Callable[[], object]) -> None:
        self.after.append(what)


def add(watch: Watch) -> None:
    """Backwards are seen for this model, too."""
    with _lock:
        _watches.add(watch)
    weakref.finalize(watch, _tidy).atexit = False
    backward_calls.add(_seen, first=True)
    uncaught.add(_notice_elsewhere)


def remove(watch: Watch) -> None:
    """They are seen for it no more."""
    with _lock:
        _watches.discard(watch)
    _tidy()


def _tidy() -> None:
    """After the last one nothing is in PyTorch's place, or Python's."""
    with _lock:
        if not list(_watches):  # its length counts those that have just gone
            backward_calls.remove(_seen)
            uncaught.remove(_notice_elsewhere)


def watches() -> list[Watch]:
    """Those of all wrapped models."""
    with _lock:
        return list(_watches)


def how() -> Run:
    """How the backward is run in which a boundary is."""
    call = backward_calls.run_backward
    assert call is not None  # without it there is no boundary
    with _lock:
        only = _calls[0] if len(_calls) == 1 and not _calls[0].is_inner else None
        if only is None:
            accumulates = not _calls or _calls[-1].accumulates
            return Run(call, None, accumulates)
        return Run(call, only.defer if only.accumulates else None, only.accumulates)


def _seen(original: Backward, roots: Any, *args: Any, **kwargs: Any) -> Any:
    accumulates = bool(kwargs.get("accumulate_grad", True))
    if len(args) >= _ARGUMENTS and (args[2] or args[3]):
        _refuse(roots, create_graph=bool(args[2]), inputs=args[3])
        accumulates = accumulates and not args[3]
    call = _Call(accumulates)
    with _lock:
        _calls.append(call)
    try:
        try:
            found = original(roots, *args, **kwargs)
        finally:
            with _lock:
                _calls.remove(call)
        while call.after:
            call.after.pop(0)()
    except Exception as error:
        if not call.is_inner:
            _notice(error)
        raise
    return found


def _refuse(roots: Iterable[Any], create_graph: bool, inputs: Iterable[Any]) -> None:
    """Raises for what cannot go through a boundary."""
    if not any(watch.survives for watch in watches()):
        return
    behind = boundaries_behind(roots)
    if not behind:
        return
    if create_graph:
        raise RuntimeError(_CANNOT.format("a backward with create_graph=True"))
    wanted = {id(item) for item in inputs}
    if any(not wanted.isdisjoint(replay.weight_ids) for replay in behind):
        raise RuntimeError(_CANNOT.format("a backward for single weights (autograd.grad, inputs=)"))


_CANNOT: Final = (
    '{} cannot be repeated when memory runs out: use Config(on_oom="report") for this model. Nothing has '
    "been computed"
)


def _notice(error: Exception) -> None:
    """Has the wrapped model report that is most likely at fault: the one that ran last."""
    watch = _latest()
    if watch is not None:
        watch.in_backward(error)


def _notice_elsewhere(error: BaseException) -> None:
    watch = _latest()
    if watch is not None:
        watch.elsewhere(error)


def _latest() -> Watch | None:
    return max(watches(), key=lambda watch: watch.latest, default=None)


never_compiled(_Call, _seen, how)
