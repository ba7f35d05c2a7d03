# SPDX-License-Identifier: Apache-2.0
"""Keeps an optimizer's step from running out of memory when some weights have changed and others have not.

    before the update   missing state is made first: that may fail, and nothing has changed
                        what the update needs for a moment is taken and given back: the same
    the update          finds state and memory there
    a step that failed  all the same, after it had begun, is not passed over: the next forward raises

Adam's state comes from the optimizer's own `_init_group`. Our own state, and fused steps, take nothing for a
moment.

Source: torch/optim/optimizer.py and adam.py, torch 2.13.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.errors import MemScaleError
from memscale.optim.kinds import gradient_refusal, group_refusal, inner_of, parameter_refusal
from memscale.optim.patched_base import PatchedOptimizer
from memscale.optim.steps import entry_of
from memscale.survival.oom_errors import who_ran_out
from memscale.torchkit.step_hooks import after_steps, before_steps

if TYPE_CHECKING:
    from memscale.plans.plan import Plan


class StepGuard:
    """Guards the steps of a model's optimizers.

    Args:
        is_mine: whether an optimizer steps the model.
        plan: the plan in force, or None.
        failed: is given an error that says that memory has run out before anything has changed.
    """

    def __init__(
        self,
        is_mine: Callable[[torch.optim.Optimizer], bool],
        plan: Callable[[], Plan | None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._is_mine, self._plan, self._failed = is_mine, plan, failed
        self._under_way: set[int] = set()  # ids of optimizers whose update has begun
        self._hooks: list[Any] = []

    def put(self) -> None:
        """Begins."""
        self._hooks = [before_steps(self, StepGuard._before), after_steps(self, StepGuard._after)]

    def remove(self) -> None:
        """Ends."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._under_way = [], set()

    def check(self) -> None:
        """A forward is about to run.

        Raises:
            MemScaleError: the step before it has failed half-way.
        """
        if self._under_way:
            self._under_way = set()
            raise MemScaleError(
                "optimizer.step() has failed after it had begun: some weights may have changed and others "
                "not, which is no state to train on from. Load the latest checkpoint"
            )

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_mine(optimizer) or torch.compiler.is_compiling():
            return
        if args[1:] or any(value is not None for value in kwargs.values()):
            return  # a closure: what it runs comes first
        optimizer = inner_of(optimizer)
        if optimizer._optimizer_step_pre_hooks:
            return  # these come after this one, and may drop gradients, or the step
        if id(optimizer) in self._under_way:
            self.check()
        weights = [value for group in optimizer.param_groups for value in group["params"]]
        try:
            self._make_room(optimizer, weights)
        except Exception as error:
            if who_ran_out(error) is None:
                raise
            self._failed(error)
            raise
        self._under_way.add(id(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._under_way.discard(id(inner_of(optimizer)))

    def _make_room(self, optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
        try:
            _make_state(optimizer)
            self._reserve(optimizer, weights)
        except Exception as error:
            if who_ran_out(error) is None:
                raise
            failure = error
        else:
            return
        del failure
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        _make_state(optimizer)
        self._reserve(optimizer, weights)

    def _reserve(self, optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
        """Takes what the update needs for a moment, and gives it back."""
        plan = self._plan()
        size = 0 if plan is None else plan.predicted.timeline.rise_bytes({"optimizer"})
        size += _late_state_bytes(optimizer)
        if size and weights:
            torch.empty(size, dtype=torch.uint8, device=weights[0].device)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes state that the step would make, with the values that it would have."""
    if isinstance(optimizer, PatchedOptimizer):
        for group in optimizer.param_groups:
            if group_refusal(optimizer._memscale_kind, group):
                continue
            for weight in group["params"]:
                gradient = weight.grad
                if gradient is None or parameter_refusal(weight) or gradient_refusal(weight, gradient):
                    continue
                entry_of(optimizer, weight)
        return
    begin = getattr(optimizer, "_init_group", None)
    if begin is None or not type(optimizer).__module__.startswith("torch.optim"):
        return
    lists = len(inspect.signature(begin).parameters) - 1
    for group in optimizer.param_groups:
        new = [value for value in group["params"] if value.grad is not None and value not in optimizer.state]
        if not new:
            continue
        try:
            with torch.no_grad():
                begin(group, *([] for _ in range(lists)))
        except BaseException:
            for weight in new:  # else a later step takes a half for a whole
                optimizer.state.pop(weight, None)
            raise


def _late_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of state that is made in the middle of the update: momentum of SGD, in its first step."""
    if not isinstance(optimizer, torch.optim.SGD) or isinstance(optimizer, PatchedOptimizer):
        return 0
    return sum(
        weight.nbytes
        for group in optimizer.param_groups
        if group["momentum"]
        for weight in group["params"]
        if weight.grad is not None and optimizer.state.get(weight, {}).get("momentum_buffer") is None
    )
