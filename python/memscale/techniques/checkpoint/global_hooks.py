# SPDX-License-Identifier: Apache-2.0
"""Global module hooks fire in forwards of the user, and not in recomputes and plans.

`torch.nn.modules.module` keeps hooks for every module of the process. A profiler that registers one counts
calls, so a recompute must not fire it again. A hook that changes values is another matter: the recompute
needs the change.

    forward of a region    observing    each hook fires; which of its calls changed values is recorded
    its recompute          silenced     no hook fires but those calls of those hooks, removed since or not
    a plan                 silenced     no hook fires

Other threads run other models meanwhile, and their hooks fire as ever. So the tables are not emptied: for the
time of the outermost block each hook in them is replaced by a `_Shim` under the same number. Handles go on to
remove it, and outside of such blocks the tables hold the user's own callables.

What a hook computes is no part of the region: the recompute does without it. So what it saves for backward
is held, not dropped, and its operations are not counted by selective checkpoints.

Hooks for backward fire in the graph of the forward, never in that of a recompute. But they would make modules
return views there, which in-place operations reject; so a recompute does not call them either.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memscale.techniques.checkpoint.checkpoint_state import check_version
from memscale.techniques.checkpoint.kept_outputs import detached, uncounted
from memscale.torchkit.compiled import never_compiled
from memscale.uninterrupted import uninterrupted

_Table = dict[int, Any]

_TABLES: tuple[_Table, ...] = (
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_forward_hooks,
    torch_modules._global_module_registration_hooks,
    torch_modules._global_parameter_registration_hooks,
    torch_modules._global_buffer_registration_hooks,
)
_FLAGS: tuple[_Table, ...] = (
    torch_modules._global_forward_hooks_with_kwargs,
    torch_modules._global_forward_hooks_always_called,
)
"""Of forward hooks, by the same numbers: there is an entry where it is true."""

_BACKWARD: tuple[_Table, ...] = (
    torch_modules._global_backward_pre_hooks,
    torch_modules._global_backward_hooks,
)


class _Shim:
    """Stands in for a hook in its table, and decides by the thread whether it fires.

    Attributes:
        hook: the user's.
        table: where it is registered.
        flags: those of `_FLAGS` that it has.
        place: in the table.
    """

    def __init__(
        self, hook: Callable[..., Any], table: _Table, flags: tuple[_Table, ...], place: int
    ) -> None:
        self.hook = hook
        self.table = table
        self.flags = flags
        self.place = place

    def __call__(self, *args: Any) -> Any:
        """Fires, or does not."""
        observers: list[tuple[_Observing, int]] = []
        frame = _thread.frame
        while isinstance(frame, _Observing):  # up to the recompute that they are part of
            observers.append((frame, frame.number_of(self)))
            frame = frame.outer
        if not self._fires(frame):
            return None
        if frame is None and not observers:
            return self.hook(*args)
        with _apart():
            if not observers:
                return self.hook(*args)
            before = _Values(args)
            result = self.hook(*args)
            if result is not None or before.changed(args):
                for observer, number in observers:
                    observer.record.note(self, number)
            return result

    def _fires(self, silence: _Silent | None) -> bool:
        """Whether the hook fires in this call, given the recompute or plan that it is part of."""
        return silence is None


class _Replay(_Shim):
    """A hook that has changed values in a forward, for the recompute of that forward and no one else.

    Args:
        shim: of the forward.
        calls: numbers of the calls in which it changed values.
        recompute: the frame.
    """

    def __init__(self, shim: _Shim, calls: frozenset[int], recompute: _Silent) -> None:
        super().__init__(shim.hook, shim.table, shim.flags, shim.place)
        self._calls = calls
        self._recompute = recompute
        self._next = 0

    def _fires(self, silence: _Silent | None) -> bool:
        if silence is not self._recompute:
            return False
        number, self._next = self._next, self._next + 1
        return number in self._calls


class Record:
    """Records the calls of hooks that changed values in one forward of a region."""

    __slots__ = ("changing",)

    def __init__(self) -> None:
        self.changing: dict[_Shim, set[int]] = {}

    def note(self, shim: _Shim, number: int) -> None:
        """A call of a hook has changed values."""
        self.changing.setdefault(shim, set()).add(number)


class _Observing:
    """The forward of a region, in its thread."""

    def __init__(self, outer: _Frame) -> None:
        self.outer = outer
        self.record = Record()
        self._numbers: dict[_Shim, int] = {}

    def number_of(self, shim: _Shim) -> int:
        """The number of a call that begins."""
        number = self._numbers.get(shim, 0)
        self._numbers[shim] = number + 1
        return number


class _Silent:
    """A recompute or a plan, in its thread."""

    def __init__(self, outer: _Frame) -> None:
        self.outer = outer


_Frame = _Observing | _Silent | None


class _Thread(threading.local):
    """What this thread is in the midst of, the innermost; None while a hook runs."""

    frame: _Frame = None


_thread = _Thread()


class _Values:
    """The tensors that a hook is given, to see whether it has changed any, or drawn random numbers."""

    def __init__(self, args: Any) -> None:
        self._leaves = _marked(args)
        self._cpu = torch.get_rng_state()
        devices = {
            leaf.get_device() for leaf, *_ in self._leaves if isinstance(leaf, Tensor) and leaf.is_cuda
        }
        self._cards = {device: torch.cuda.get_rng_state(device) for device in devices}

    def changed(self, args: Any) -> bool:
        """Whether anything is other than before."""
        leaves = _marked(args)
        return (
            len(leaves) != len(self._leaves)
            or any(
                old is not new or old_marks != marks
                for (old, *old_marks), (new, *marks) in zip(self._leaves, leaves, strict=True)
            )
            or not torch.equal(self._cpu, torch.get_rng_state())
            or any(not torch.equal(old, torch.cuda.get_rng_state(card)) for card, old in self._cards.items())
        )


def _marked(args: Any) -> list[tuple[Any, int, bool]]:
    """Leaves with what tells whether a tensor has been changed in place."""
    return [
        (leaf, leaf._version, leaf.requires_grad)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
        else (leaf, 0, False)
        for leaf in tree_leaves(args)
    ]


@contextmanager
def _apart() -> Iterator[None]:
    """For the time of a block this thread is in no region: a hook runs as in plain PyTorch."""
    frame, _thread.frame = _thread.frame, None
    try:
        with uncounted(), torch.autograd.graph.saved_tensors_hooks(_hold, _held):
            yield
    finally:
        _thread.frame = frame


def _hold(tensor: Tensor) -> tuple[Tensor, int]:
    # Not the tensor itself, which may be what the node makes, and would hold the node.
    value = tensor if isinstance(tensor, nn.Parameter) else detached(tensor)
    return value, value._version


def _held(saved: tuple[Tensor, int]) -> Tensor:
    check_version(*saved, "")
    return saved[0]


def _backward_hooks(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """In place of `Module._get_backward_hooks`: full ones and others."""
    if not _is_silent():
        return _own_backward_hooks(module)
    hooks = list(module._backward_hooks.values())
    return (hooks, []) if module._is_full_backward_hook else ([], hooks)


def _backward_pre_hooks(module: nn.Module) -> list[Any]:
    """In place of `Module._get_backward_pre_hooks`."""
    if not _is_silent():
        return _own_backward_pre_hooks(module)
    return list(module._backward_pre_hooks.values())


def _is_silent() -> bool:
    frame = _thread.frame
    while isinstance(frame, _Observing):
        frame = frame.outer
    return frame is not None


_own_backward_hooks: Callable[[nn.Module], tuple[list[Any], list[Any]]] = nn.Module._get_backward_hooks
_own_backward_pre_hooks: Callable[[nn.Module], list[Any]] = nn.Module._get_backward_pre_hooks


class _Installed:
    """The shims in the tables, and what stands in for methods of modules, while any block needs them.

    Blocks are held weakly: one that an interrupt has kept from beginning or ending is not waited for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: weakref.WeakSet[_Observing | _Silent] = weakref.WeakSet()
        self.shims: list[tuple[_Table, int, _Shim]] = []

    def begin(self, block: _Observing | _Silent) -> None:
        """Hooks that have no shim get one."""
        with self.lock:
            self.blocks.add(block)
            if any(_BACKWARD) and isinstance(block, _Silent):
                nn.Module._get_backward_hooks = _backward_hooks  # type: ignore[method-assign]
                nn.Module._get_backward_pre_hooks = _backward_pre_hooks  # type: ignore[method-assign]
            for table in _TABLES:
                for place, (number, hook) in enumerate(tuple(table.items())):
                    if not isinstance(hook, _Shim):
                        flags = _FLAGS if table is torch_modules._global_forward_hooks else ()
                        shim = _Shim(hook, table, tuple(flag for flag in flags if number in flag), place)
                        self.shims.append((table, number, shim))
                        _replace(table, number, shim)

    def end(self, block: _Observing | _Silent) -> None:
        """With the last one all is the user's own again."""
        with self.lock:
            self.blocks.discard(block)
            if self.blocks:
                return
            if nn.Module._get_backward_hooks is _backward_hooks:
                nn.Module._get_backward_hooks = _own_backward_hooks  # type: ignore[method-assign]
                nn.Module._get_backward_pre_hooks = _own_backward_pre_hooks  # type: ignore[method-assign]
            for table, number, shim in self.shims:
                _replace(table, number, shim.hook)
            self.shims.clear()


def _replace(table: _Table, number: int, hook: Callable[..., Any]) -> None:
    """Exchanges a hook, unless it has been removed.

    One call into C: between a question and an assignment another thread could remove the hook, and the
    assignment would bring it back.
    """
    any(map(table.__setitem__, filter(table.__contains__, (number,)), (hook,)))


_installed = _Installed()


@contextmanager
def _in_force(block: _Observing | _Silent) -> Iterator[None]:
    """Makes this thread's hooks go by a block."""
    try:
        _installed.begin(block)
        _thread.frame = block
        yield
    finally:
        with uninterrupted():
            _thread.frame = block.outer
            _installed.end(block)


@contextmanager
def _observed(block: _Observing) -> Iterator[Record]:
    with _in_force(block):
        yield block.record


@contextmanager
def _replayed(block: _Silent, record: Record) -> Iterator[None]:
    """Puts in again what has changed values, in order, whatever is registered by now."""
    handles = []
    with _in_force(block):
        try:
            for shim in sorted(record.changing, key=lambda shim: shim.place):
                handle = RemovableHandle(shim.table, extra_dict=list(shim.flags))
                handles.append(handle)
                for flag in shim.flags:
                    flag[handle.id] = True
                shim.table[handle.id] = _Replay(shim, frozenset(record.changing[shim]), block)
            yield
        finally:
            with uninterrupted():
                for handle in handles:
                    handle.remove()


def observing() -> AbstractContextManager[Record | None]:
    """Around a region's forward. What it gives is for `silenced`, around the recompute."""
    return _observed(_Observing(_thread.frame)) if any(_TABLES) else nullcontext()


def silenced(record: Record | None = None) -> AbstractContextManager[None]:
    """Around what repeats a forward, or what no user has called: hooks do not fire in this thread.

    Args:
        record: of the forward. What has changed values there fires again, in the same calls.
    """
    if record is not None and record.changing:
        return _replayed(_Silent(_thread.frame), record)
    return _in_force(_Silent(_thread.frame)) if any(_TABLES) or any(_BACKWARD) else nullcontext()


def _forget_threads() -> None:
    """In a child of fork: threads that held the lock, or were in a block, are not there."""
    _installed.lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)
never_compiled(_Shim, _Replay, _Values, _Installed, _Observing, _backward_hooks, _backward_pre_hooks)
never_compiled(_is_silent, _marked, _apart, _hold, _held, observing, silenced, _in_force)
