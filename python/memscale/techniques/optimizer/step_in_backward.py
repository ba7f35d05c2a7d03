# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step inside of backward: when a gradient is complete its parameter is stepped, and it goes.

Only where the caller has promised (`Config.step_in_backward`) that nothing happens to gradients between
backward and the optimizer's step. What is left of gradients at the peak is the largest; nothing is copied,
and nothing is computed otherwise. `optim/backward_step.py` has the steps, and refuses what breaks the
promise.

    hooks    behind all others of a parameter: they see its gradient, and then it is used
             in front of the optimizer's own step, which finishes
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.optim import scaled_losses
from memscale.optim.alone import why_not_alone
from memscale.optim.backward_step import BackwardStep, works_in_lists
from memscale.optim.kinds import inner_of
from memscale.optim.masters import planned_dtypes
from memscale.optim.offload.attach import is_offloaded
from memscale.optim.patched import share_memory
from memscale.optim.patched_base import is_patched
from memscale.techniques.checkpoint import card_check
from memscale.techniques.precision.mixed_precision import dtype_for
from memscale.torchkit import sharding
from memscale.torchkit.replicas import replicas_of
from memscale.torchkit.weak_call import WeakCall, remove_dead

if TYPE_CHECKING:
    from memscale.techniques.base import Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn

NAME: Final = "step_in_backward"

_WINDOW_SHARE = 32  # of all gradients, which are a third of a step's memory at most

_UNKNOWN = "the optimizer is not known: pass it to wrap, or use optimize"
_SHARDED = "gradients of sharded parameters belong to FSDP's own schedule"
_REPLICATED = "DistributedDataParallel averages gradients over processes when they are complete here"
_MAY_SKIP = "mixed precision in FP16 looks at all gradients before a step, which it may skip"
_REPLACED = "the optimizer's step has been replaced"
_DIFFERENTIABLE = "a group of the optimizer is differentiable"
_OVERLAP = "parameters share memory: one would change while backward needs the other"
_NONE = "the optimizer steps no parameter of the model"
_SPARSE = "sparse gradients change the kernels of the whole list on a card: give the optimizer foreach=False"


def find(model: nn.Module, around: Surroundings) -> Sequence[StepInBackward]:
    """The technique for a model, if it was asked for and can be."""
    optimizer = around.optimizer
    if not around.config.step_in_backward or optimizer is None or _reason(model, optimizer, around):
        return ()
    return (StepInBackward(model, optimizer),)


def why_not(model: nn.Module, around: Surroundings) -> str:
    """Why a model cannot have it; "" where nobody asked."""
    if not around.config.step_in_backward:
        return ""
    return _UNKNOWN if around.optimizer is None else _reason(model, around.optimizer, around)


def takes_place(model: nn.Module, around: Surroundings) -> bool:
    """Whether gradients are used and gone in backward; others have nothing to do with them then."""
    return bool(find(model, around))


def _reason(model: nn.Module, optimizer: torch.optim.Optimizer, around: Surroundings) -> str:
    inner = inner_of(optimizer)
    parameters = stepped_by(model, inner)
    if not parameters:
        return _NONE
    if replicas_of(model):
        return _REPLICATED
    if any(sharding.is_sharded(value) for value in model.parameters()):
        return _SHARDED
    if around.config.use_mixed_precision and dtype_for(around.hardware) is torch.float16:
        return _MAY_SKIP
    return _reason_of_optimizer(model, inner) or (_OVERLAP if share_memory([*parameters.values()]) else "")


def _reason_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return _DIFFERENTIABLE
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return _REPLACED
    lists = any(map(works_in_lists, optimizer.param_groups))
    if lists and any(getattr(module, "sparse", False) is True for module in model.modules()):
        return _SPARSE
    return (
        "" if is_offloaded(optimizer) or is_patched(optimizer) else why_not_alone(optimizer, type(optimizer))
    )


def stepped_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Parameters of a model that an optimizer trains, by name."""
    trained = {id(value) for group in optimizer.param_groups for value in group["params"]}
    return {
        name: value
        for name, value in model.named_parameters()
        if value.requires_grad and id(value) in trained and value.layout is torch.strided
    }


def _window_bytes(parameters: Mapping[str, Tensor], dtypes: Mapping[int, torch.dtype]) -> int:
    """Bytes of gradients whose steps may run beside backward: so few that a peak is about the same without.

    Args:
        parameters: that are stepped, by name.
        dtypes: types that differ from the present ones, by id.
    """
    sizes = (value.numel() * dtypes.get(id(value), value.dtype).itemsize for value in parameters.values())
    return sum(sizes) // _WINDOW_SHARE


class StepInBackward:
    """Steps in backward for one model and its optimizer, as planner and executor attach it.

    Args:
        model: whose parameters are stepped.
        optimizer: that steps them, or a wrapper of it.
    """

    name = NAME
    path = ""
    reason = ""
    stays = False
    apart_from: frozenset[str] = frozenset()
    beneath: StandIn | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = weakref.ref(model)  # the model owns the executor, which owns this
        self._optimizer = weakref.ref(inner_of(optimizer))
        self.used = False
        self.steps: BackwardStep | None = None
        self._hooked: list[tuple[nn.Parameter, Any]] = []
        self._before: Any = None
        self._asker: object = None

    def traced(self, step: StepFacts) -> StepFacts:
        """The step with each parameter stepped in backward."""
        self.used = True
        model, parameters = self._model(), self._parameters()
        dtypes = {} if model is None else planned_dtypes(model, step.path.half)
        window = _window_bytes(parameters, dtypes)
        return replace(step, path=replace(step.path, stepped=frozenset(parameters), step_window_bytes=window))

    def attach(self) -> None:
        """Puts the hooks on parameters and optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        parameters = self._parameters()
        names = {id(value): name for name, value in parameters.items()}
        steps = self.steps = BackwardStep(optimizer, names, _window_bytes(parameters, {}), card_check.settle)
        for value in parameters.values():
            handle = value.register_post_accumulate_grad_hook(WeakCall(steps.completed))
            self._hooked.append((value, handle))
        # Its own, as those of all steps come in front of the user's, which would find no gradients and not
        # hear that they are spent. It stays when the model goes, and does nothing: a step may walk them then.
        remove_dead(optimizer._optimizer_step_pre_hooks)
        self._before = optimizer.register_step_pre_hook(WeakCall(steps.before_step))
        self._asker = scaled_losses.watch()
        weakref.finalize(steps, scaled_losses.unwatch, self._asker).atexit = False  # of a model that goes

    def about_to_run(self) -> None:
        """See `base.ForwardAttachment`."""
        if self.steps is not None:
            self.steps.about_to_run()

    def has_run(self, output: Any) -> None:
        """See `base.ForwardAttachment`."""
        if self.steps is None:
            return
        self.steps.has_run(output)
        for parameter, handle in self._hooked:
            _put_behind(parameter._post_accumulate_grad_hooks, handle)
        optimizer = self._optimizer()
        if optimizer is not None:
            _put_behind(optimizer._optimizer_step_pre_hooks, self._before)

    def undo(self) -> None:
        """Takes the hooks off. Between a backward and its step, weights have been stepped and stay so."""
        for _, handle in self._hooked:
            handle.remove()
        if self._before is not None:
            self._before.remove()
        if self.steps is not None:
            self.steps.give_up()
        scaled_losses.unwatch(self._asker)
        self._hooked, self._before, self.steps = [], None, None

    def _parameters(self) -> dict[str, nn.Parameter]:
        model, optimizer = self._model(), self._optimizer()
        return {} if model is None or optimizer is None else stepped_by(model, optimizer)


def _put_behind(hooks: dict[int, Any] | None, handle: Any) -> None:
    """Has a hook called after those that somebody has made since."""
    if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)
