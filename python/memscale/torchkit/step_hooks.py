# SPDX-License-Identifier: Apache-2.0
"""Hooks on the steps of all optimizers, which may come and go at any moment.

PyTorch walks its dictionary of such hooks while it calls them. One that is put there or taken away meanwhile,
by another thread that trains or by garbage collection within a hook, ends the step of an optimizer that has
nothing to do with it: "RuntimeError: OrderedDict mutated during iteration". So PyTorch gets one pair of
hooks, once and for good, and they walk a tuple, which is replaced and never changed. A hook ends with its
owner without any code being run.

Source: torch/optim/optimizer.py, `Optimizer.profile_hook_step`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Call = Callable[[Any, torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
"""Given the owner, the optimizer, and what its `step` was called with."""


class StepHook:
    """What is called for an owner, while it lives. Made by `before_steps` and `after_steps`.

    Args:
        owner: held weakly.
        call: for instance a method of its class, unbound.
    """

    def __init__(self, owner: object, call: Call) -> None:
        self._owner: weakref.ref[object] | None = weakref.ref(owner)
        self._call = call

    @property
    def is_over(self) -> bool:
        """Whether it was removed, or its owner has gone."""
        owner = self._owner
        return owner is None or owner() is None

    def run(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns; None when it is over."""
        held = self._owner
        owner = None if held is None else held()
        return None if owner is None else self._call(owner, optimizer, args, kwargs)

    def remove(self) -> None:
        """Ends it. Once is enough, more does nothing."""
        self._owner = None
        with _lock:
            _put(_before, _after)


_lock = threading.RLock()
_before: tuple[StepHook, ...] = ()
_after: tuple[StepHook, ...] = ()


def before_steps(owner: object, call: Call) -> StepHook:
    """Has something called before each step of any optimizer, in the order in which they were put.

    Args:
        owner: for whom it is called. The hook ends with it.
        call: may return (args, kwargs) for the step, as PyTorch's own hooks may.
    """
    hook = StepHook(owner, call)
    with _lock:
        _put((*_before, hook), _after)
    return hook


def after_steps(owner: object, call: Call) -> StepHook:
    """Has something called after each step of any optimizer; see `before_steps`."""
    hook = StepHook(owner, call)
    with _lock:
        _put(_before, (*_after, hook))
    return hook


def _put(before: tuple[StepHook, ...], after: tuple[StepHook, ...]) -> None:
    """Puts these in place of those that are there, but for those that are over."""
    global _before, _after
    _before = tuple(hook for hook in before if not hook.is_over)
    _after = tuple(hook for hook in after if not hook.is_over)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    walk = _outside_before if torch.compiler.is_compiling() else _walk_before
    return walk(optimizer, args, kwargs) if _before else None


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    walk = _outside_after if torch.compiler.is_compiling() else _walk_after
    if _after:
        walk(optimizer, args, kwargs)


def _walk_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = None
    for hook in _before:
        result = hook.run(optimizer, args, kwargs)
        if result is not None:
            changed = args, kwargs = result
    return changed


def _walk_after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for hook in _after:
        hook.run(optimizer, args, kwargs)


# A step that is compiled is left for them: they ask what the compiler cannot follow.
_outside_before, _outside_after = _disable_dynamo(_walk_before), _disable_dynamo(_walk_after)
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
