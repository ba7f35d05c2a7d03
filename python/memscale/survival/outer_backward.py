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

from torch import Tensor

from memscale.survival import uncaught
from memscale.survival.replay import OuterGraph, Replay, Run
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
        self.thread = threading.get_ident()
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
    me = threading.get_ident()
    with _lock:
        mine = [item for item in _calls if item.thread == me]
        # On a card nodes run in a thread of PyTorch's own: whose backward it is shows if there is one alone.
        known = mine or (_calls if len(_calls) == 1 else [])
    if not known:
        return Run(call, None, all(item.accumulates for item in _calls))
    last = known[-1]
    defers = last.accumulates and not last.is_inner
    return Run(call, last.defer if defers else None, last.accumulates)


def _seen(original: Backward, roots: Any, *args: Any, **kwargs: Any) -> Any:
    accumulates = bool(kwargs.get("accumulate_grad", True))
    create_graph, inputs = (args[2], args[3]) if len(args) >= _ARGUMENTS else (False, ())
    accumulates = accumulates and not inputs
    shared = _shared(roots, bool(create_graph), inputs, accumulates)
    call = _Call(accumulates)
    with _lock:
        _calls.append(call)
    try:
        try:
            found = _with_shared(shared, call, original, roots, *args, **kwargs)
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


_Shared = list[tuple[Replay, Tensor]]


def _with_shared(shared: _Shared, call: _Call, original: Backward, *args: Any, **kwargs: Any) -> Any:
    """Runs the outer graph. What it has for weights of a model behind a boundary goes to that one's graph."""
    before = [(replay, weight, weight.grad) for replay, weight in shared]
    for _, weight, _ in before:
        weight.grad = None
    try:
        found = original(*args, **kwargs)
        for replay, weight, _ in before:
            if weight.grad is not None:
                replay.from_outside[weight] = weight.grad
        if before and not call.after:
            raise RuntimeError(_CANNOT_BESIDE)
    finally:
        for _, weight, gradient in before:
            weight.grad = gradient
    return found


def _shared(roots: Iterable[Any], create_graph: bool, inputs: Iterable[Any], accumulates: bool) -> _Shared:
    """Weights that the outer graph uses, too. Raises for what cannot go through a boundary."""
    if not any(watch.survives for watch in watches()):
        return []
    outer = OuterGraph(roots)
    if not outer.replays:
        return []
    if create_graph:
        raise RuntimeError(_CANNOT.format("a backward with create_graph=True"))
    wanted = {id(item) for item in inputs}
    shared: _Shared = []
    for replay in outer.replays:
        if not wanted.isdisjoint(replay.weight_ids):
            raise RuntimeError(_CANNOT.format("a backward for single weights (autograd.grad, inputs=)"))
        used = [outer.uses[key] for key in sorted(replay.weight_ids & outer.uses.keys())]
        if accumulates and used:
            before = any(number < replay.number for _, number in used)
            if before or replay.sources or in_backward():
                raise RuntimeError(_CANNOT.format("a loss that uses weights of the model before its forward"))
            shared += [(replay, weight) for weight, _ in used]
    return shared


_CANNOT: Final = (
    '{} cannot be repeated when memory runs out: use Config(on_oom="report") for this model. Nothing has '
    "been computed"
)


_CANNOT_BESIDE: Final = (
    "several threads run backward at once, and the loss of one uses weights of the model: gradients of this "
    'step are incomplete. Use Config(on_oom="report")'
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
