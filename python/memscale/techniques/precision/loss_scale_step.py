# SPDX-License-Identifier: Apache-2.0
"""Skips the steps of an optimizer whose gradients are not finite, as `torch.amp.GradScaler` does.

Before a step that uses scaled backwards, all of the optimizer's gradients are looked at, on their device, and
one number is read. If one of them is infinite or NaN, the optimizer finds no gradients at all, and leaves
weights, state and step counts alone; afterwards they are there again. Every `torch.optim.Optimizer` that
trains the model is watched, whichever it is. With a closure the same happens when the closure returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memscale.techniques.precision.loss_scale import active, optimizer_refusal, weights_of
from memscale.torchkit.step_hooks import after_steps, before_steps
from memscale.weights.placed_gradients import set_gradient


class _Watch:
    """In force while it lives."""


_Hidden = tuple[_Watch, list[tuple[Tensor, Tensor]]]
_hidden: weakref.WeakKeyDictionary[Optimizer, _Hidden] = weakref.WeakKeyDictionary()
"""Gradients that are put back after the step that is skipped, and who does that: it has to live so long."""


_watch: _Watch | None = None


def install() -> None:
    """Watches every optimizer from now on."""
    global _watch
    if _watch is None:
        _watch = _Watch()
        before_steps(_watch, _before_step)
        after_steps(_watch, _after_step)


def is_installed() -> bool:
    """Whether optimizers are watched."""
    return _watch is not None


def uninstall() -> None:
    """No longer, where no scale is in force any more. Garbage collection may call it within a step."""
    global _watch
    if not active():
        _watch = None


def _before_step(watch: _Watch, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = weights_of(optimizer)
    if any(isinstance(value, FakeTensor) for value in weights[:1]):  # a trace
        return None
    if not any((scale.armed or scale.is_due(optimizer)) and scale.concerns(weights) for scale in active()):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _judge(watch, optimizer)
        return None
    refusal = optimizer_refusal(optimizer)
    if refusal:
        raise RuntimeError(f"mixed precision in FP16: {refusal}; switch use_mixed_precision off")
    return (optimizer,), {**kwargs, "closure": _judging(watch, optimizer, closure)}


def _judging(watch: _Watch, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def judged() -> Any:
        loss = closure()
        with torch.no_grad():
            _judge(watch, optimizer)
        return loss

    return judged


def _judge(watch: _Watch, optimizer: Optimizer) -> None:
    """Drops the gradients if they are not finite and have not been checked yet."""
    weights = weights_of(optimizer)
    pairs = [(value, value.grad) for value in weights if value.grad is not None]
    due = [scale for scale in active() if scale.is_due(optimizer) and scale.concerns(weights)]
    if not due or not pairs:
        return
    _hidden.pop(optimizer, None)  # left by a step that was broken off
    finite = are_finite([grad for _, grad in pairs])
    for scale in due:
        scale.judge(optimizer, finite)
    if not finite:
        _hidden[optimizer] = watch, pairs
        for value, _ in pairs:
            value.grad = None


def _after_step(watch: _Watch, optimizer: Optimizer, *unused: Any) -> None:
    _, pairs = _hidden.pop(optimizer, (watch, []))
    for value, grad in pairs:
        set_gradient(value, grad)


def are_finite(grads: Sequence[Tensor], check: str = "_amp_foreach_non_finite_check_and_unscale_") -> bool:
    """Whether no number in them is infinite or NaN. One number is read from each device.

    Args:
        grads: of any devices and dtypes.
        check: PyTorch's own kernel, where it has it.
    """
    found: dict[torch.device, list[Tensor]] = {}
    for (device, dtype), group in _grouped(grads).items():
        if dtype.is_complex or not hasattr(torch, check):
            found.setdefault(device, []).extend((~grad.isfinite()).any().float() for grad in group)
            continue
        flag = torch.zeros((), device=device)
        getattr(torch, check)(group, flag, torch.ones((), device=device))  # times one: they stay
        found.setdefault(device, []).append(flag)
    return not any(bool(torch.stack(flags).amax()) for flags in found.values())


def _grouped(grads: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        groups.setdefault((values.device, values.dtype), []).append(values)
    return groups
