# SPDX-License-Identifier: Apache-2.0
"""Sees backwards of the loop: what they raise, and which forwards' graphs they lead to.

A layer of `torchkit.backward_calls`. A backward that begins in C++ does not pass it, and cannot go through a
boundary.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, Protocol

from torch import Tensor

from memscale.survival import uncaught
from memscale.survival.eligibility import Eligibility
from memscale.survival.outer_graph import OuterGraph
from memscale.survival.replay import Cut, Generators, InnerBackward, Replay, boundary_of
from memscale.torchkit import backward_calls
from memscale.torchkit.backward_calls import Backward
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.graph_task import in_backward


class Watch(Protocol):
    """What watches one wrapped model.

    Attributes:
        survives: it has steps repeated.
        latest: when its latest forward began, among those of all.
        eligibility: of its forwards.
    """

    survives: bool
    latest: int
    eligibility: Eligibility

    def in_backward(self, error: Exception) -> None:
        """A backward of the loop has raised."""

    def elsewhere(self, error: BaseException) -> None:
        """An exception ends the program."""


_ARGUMENTS: Final = 4  # gradients of the roots, retain_graph, create_graph, inputs

_lock = threading.RLock()
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_cut: weakref.WeakSet[Replay] = weakref.WeakSet()
_calls: list[_Call] = []
_nested = 0  # backwards that have run within others and may have added to gradients


class _Call:
    """A backward under way.

    Attributes:
        cuts: what it has come to.
        keep: their graphs are to be kept.
    """

    def __init__(self) -> None:
        self.is_inner = in_backward()
        self.thread = threading.get_ident()
        self.cuts: list[Cut] = []
        self.keep = False


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
    """After the last one nothing is in PyTorch's place, or Python's.

    A boundary that is still alive needs the layer: without it the model's graph would be passed over.
    """
    with _lock:
        if not list(_watches) and not list(_cut):  # their lengths count those that have just gone
            backward_calls.remove(_seen)
            uncaught.remove(_notice_elsewhere)


def watches() -> list[Watch]:
    """Those of all wrapped models."""
    with _lock:
        return list(_watches)


def note_cut(replay: Replay) -> None:
    """A forward has a boundary."""
    with _lock:
        _cut.add(replay)
    weakref.finalize(replay, _tidy).atexit = False


def come_to(replay: Replay, grads: tuple[Tensor | None, ...], keep: bool) -> None:
    """A backward has come to a boundary.

    Args:
        replay: what is behind it.
        grads: of its outputs.
        keep: its graph is to be kept.

    Raises:
        RuntimeError: nobody knows which backward.
    """
    me = threading.get_ident()
    with _lock:
        mine = [item for item in _calls if item.thread == me]
        # On a card nodes run in a thread of PyTorch's own: whose backward it is shows if there is one alone.
        known = mine or (_calls if len(_calls) == 1 else [])
        if not known:
            raise RuntimeError(_CANNOT.format("a backward that begins in C++, or beside others,"))
        known[-1].cuts.append((replay, grads))
        known[-1].keep = keep


def _seen(original: Backward, roots: Any, *args: Any, **kwargs: Any) -> Any:
    global _nested
    call = _Call()
    _nested += call.is_inner and bool(kwargs.get("accumulate_grad", True))
    try:
        return _seen_with(call, original, roots, *args, **kwargs)
    except Exception as error:
        if not call.is_inner:
            _notice(error)
        raise


def _seen_with(call: _Call, original: Backward, roots: Any, *args: Any, **kwargs: Any) -> Any:
    observing = [watch.eligibility for watch in watches() if watch.eligibility.observed]
    with _lock:
        cut = list(_cut)
    if not observing and not cut:
        return original(roots, *args, **kwargs)
    create_graph, inputs = (args[2], args[3]) if len(args) >= _ARGUMENTS else (False, ())
    roots = tuple(roots)
    windows = [window for item in observing for window in item.observed] + [item.window for item in cut]
    outer = OuterGraph(roots, windows, boundary_of)
    for item in observing:
        mine = [window for window in item.observed if window in outer.reached | outer.leaks]
        if mine:
            item.has_seen(mine, outer.why_not(mine, create_graph, inputs))
    replays: list[Replay] = outer.boundaries
    behind = [replay.window for replay in replays]
    leaking = [replay.window for replay in cut if replay.window in outer.leaks]
    if not behind and not leaking:
        return original(roots, *args, **kwargs)
    reason = outer.why_not([*behind, *leaking], create_graph, inputs)
    if reason:
        raise RuntimeError(_CANNOT.format(f"this step ({reason})"))
    return _cut_in_two(call, len(replays) > 1, original, roots, *args, **kwargs)


def _cut_in_two(call: _Call, has_several: bool, original: Backward, *args: Any, **kwargs: Any) -> Any:
    """Runs the outer graph, and then what is behind its boundaries.

    Of several forwards the later one's graph would run before what the loop has made of the earlier one's
    outputs: only draws of random numbers could tell.
    """
    with _lock:
        _calls.append(call)
    before = Generators() if has_several else None
    try:
        found = original(*args, **kwargs)
    finally:
        with _lock:
            _calls.remove(call)
    if not call.cuts:
        return found
    if before is not None and not before.are_present():
        raise RuntimeError(_CANNOT_DRAW)
    assert backward_calls.run_backward is not None  # without it there is no boundary
    InnerBackward(backward_calls.run_backward, call.cuts, call.keep, lambda: _nested).run()
    with _lock:
        _cut.difference_update([replay for replay, _ in call.cuts if replay.is_over])
    return found


_CANNOT: Final = (
    '{} cannot be repeated when memory runs out: use Config(on_oom="report") for this model. Nothing has '
    "been computed"
)


_CANNOT_DRAW: Final = (
    "a hook draws random numbers in a backward through several forwards, between those that their own may "
    'draw: use Config(on_oom="report") for this model. Gradients of this step are incomplete'
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


never_compiled(_Call, _seen, _seen_with, _cut_in_two, come_to)
