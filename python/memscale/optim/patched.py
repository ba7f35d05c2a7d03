# SPDX-License-Identifier: Apache-2.0
"""Patches the caller's optimizer in place to keep our state.

A patched optimizer is of a subclass of its own class, of the same name. PyTorch's `step` goes on
running: closures, hooks, profilers, wrappers and other holders see what they saw before. It asks
`_init_group` which parameters to step; ours steps what it can and leaves the others to PyTorch. An optimizer
without `_init_group` (Lion) gets another `step`, with hooks as PyTorch's has.

Nothing is kept on the optimizer but the state, which is made at a parameter's first step, as PyTorch's is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.optim import master_residuals, saved
from memscale.optim.alone import step_around
from memscale.optim.arrays import FORM
from memscale.optim.kinds import KINDS, MOMENTS, Kind, group_refusal, inner_of, kind_of, parameter_refusal
from memscale.optim.offload import attach
from memscale.optim.patched_base import PatchedOptimizer, can_rewrap, rewrap
from memscale.optim.steps import entry_of, give_back_state, said_about, step_group

if TYPE_CHECKING:
    pass

# ---- the classes -------------------------------------------------------------------------------------


class _Patched(PatchedOptimizer):
    """A patched optimizer."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No: a scaler has to look for gradients that are not finite itself, and to skip the step."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value  # what the optimizer is given back with

    def state_dict(self) -> dict[str, Any]:
        """The state in PyTorch's form, and what that has no place for beside it."""
        with saved.hooked(self.register_state_dict_post_hook, _as_saved, prepend=True):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes PyTorch's form, with or without what is beside it."""
        load = functools.partial(saved.as_ours, moments=self._memscale_moments)
        master_residuals.keep_residuals(self)
        with saved.hooked(self.register_load_state_dict_pre_hook, load):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's, which would also take parameters that share memory."""
        super().add_param_group(param_group)
        if share_memory([value for group in self.param_groups for value in group["params"]]):
            self.param_groups.pop()
            raise ValueError("parameters of the new group share memory with others: give the optimizer back")

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours, others = saved.parted(state)
        super().__setstate__(others)
        self.state.update(ours)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        about = (kind._memscale_base, kind._memscale_kind.name, kind._memscale_moments)
        return _anew, about, self.__getstate__()


class _PatchedGroups(_Patched):
    """Of an optimizer whose step asks `_init_group`."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        master_residuals.prepare(self, group)
        left = step_group(self, group)
        return super()._init_group({**group, "params": left}, *lists)  # type: ignore[misc]


class _PatchedStep(_Patched):
    """Of an optimizer whose step is all its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""

        def step_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for group in groups:
                master_residuals.prepare(self, group)
            return [{**group, "params": step_group(self, group)} for group in groups]

        return step_around(self, self._memscale_base, closure, step_groups)


def _as_saved(optimizer: _Patched, state_dict: dict[str, Any]) -> dict[str, Any]:
    return master_residuals.without_residuals(optimizer, saved.as_standard(optimizer, state_dict))


def _class_for(base: type[torch.optim.Optimizer], kind: Kind, moments: str) -> type[_Patched]:
    """The subclass for a class of optimizers: the one that there is, or a new one."""
    for known in base.__subclasses__():  # which are held weakly: a class of the caller's may go
        if issubclass(known, _Patched) and (known._memscale_kind, known._memscale_moments) == (kind, moments):
            return known
    more: dict[str, Any] = {"_memscale_base": base, "_memscale_kind": kind, "_memscale_moments": moments}
    own: type = _PatchedGroups
    if not hasattr(base, "_init_group"):
        own = _PatchedStep
        more["step"] = torch.optim.Optimizer.profile_hook_step(_PatchedStep.step)
        more["step"].hooked = True
    about = {"__module__": __name__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (own, base), {**about, **more})


def _anew(base: type[torch.optim.Optimizer], kind: str, moments: str) -> _Patched:
    """For `copy` and `pickle`: an optimizer that is to be given its attributes."""
    made = _class_for(base, KINDS[kind], moments)
    return made.__new__(made)


# ---- taking over and giving back ---------------------------------------------------------------------


def take_over(optimizer: torch.optim.Optimizer, moments: str = "code8", convert: bool = True) -> str:
    """Gives an optimizer our state, in place. It may have stepped, and others may hold it.

    Args:
        optimizer: AdamW, Adam, SGD with momentum or Lion, not a subclass of these; or a wrapper of one.
        moments: "code8" for a byte each, "fp32". BF16 weights get a master of 24 bits with the first, of 32
            with the second.
        convert: turn state that is there into ours at once; otherwise the next step does, and until then
            `give_back` leaves every bit of it as it was.

    Returns:
        "" or why it stays as it is: none of its parameters can have our state.

    Raises:
        ValueError: no such form of moments.
    """
    if moments not in MOMENTS:
        raise ValueError(f"moments is {moments!r}; allowed: {', '.join(MOMENTS)}")
    with _resident_state(optimizer):
        return _take_over(inner_of(optimizer), moments, convert)


def _resident_state(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Has the state of an optimizer in memory for a block, if it is elsewhere."""
    return attach.resident_state(optimizer)


def _take_over(optimizer: Any, moments: str, convert: bool) -> str:
    if is_held(optimizer) and moments != optimizer._memscale_moments:  # it goes on with the other form
        del _HOLDERS[optimizer]
        optimizer.__class__ = _class_for(optimizer._memscale_base, optimizer._memscale_kind, moments)
    elif isinstance(optimizer, _Patched):
        return "it has this state already"
    else:
        reason = why_not(optimizer)
        if reason:
            return reason
        kind = kind_of(optimizer)
        assert isinstance(kind, Kind)
        optimizer.__class__ = _class_for(type(optimizer), kind, moments)
        rewrap(optimizer)
    if convert:
        convert_state(optimizer)
    return ""


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot be patched; "" if it can, or is."""
    optimizer = inner_of(optimizer)
    if isinstance(optimizer, _Patched):
        return ""
    kind = kind_of(optimizer)
    if isinstance(kind, str):
        return kind
    reason = _reason(optimizer, kind)
    return reason or ("" if can_rewrap(optimizer) else "its step has been replaced")


# ---- for as long as somebody needs it ----------------------------------------------------------------

_HOLDERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that were patched by `hold`, and how many hold them."""


def hold(optimizer: torch.optim.Optimizer) -> str:
    """Has an optimizer patched, with moments in FP32 if it is not yet, until `let_go` is called as often.

    State that is there becomes ours in the next step.

    Returns:
        "" or why it stays as it is; then it is not held.
    """
    optimizer = inner_of(optimizer)
    if optimizer in _HOLDERS:
        _HOLDERS[optimizer] += 1
    elif not isinstance(optimizer, _Patched):
        reason = take_over(optimizer, "fp32", convert=False)
        if reason:
            return reason
        _HOLDERS[optimizer] = 1
    return ""


def let_go(optimizer: torch.optim.Optimizer) -> None:
    """Undoes one `hold`. The last gives an optimizer back that was patched for it."""
    optimizer = inner_of(optimizer)
    if optimizer not in _HOLDERS:
        return
    _HOLDERS[optimizer] -= 1
    if not _HOLDERS[optimizer]:
        del _HOLDERS[optimizer]
        give_back(optimizer)


def is_held(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is patched for the time of `hold` alone."""
    return inner_of(optimizer) in _HOLDERS


def _reason(optimizer: torch.optim.Optimizer, kind: Kind) -> str:
    """Why no parameter of an optimizer can have our state; "" if one can."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    if share_memory(parameters):
        return "its parameters share memory"
    reasons = [
        group_refusal(kind, group) or parameter_refusal(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return "" if "" in reasons else (reasons or ["it has no parameters"])[0]


def share_memory(parameters: list[Tensor]) -> bool:
    """Whether two parameters have memory in common: each would be stepped with its own state."""
    spans = sorted(
        (value.get_device(), value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())
        for value in parameters  # one that is there twice, too: two threads would step it at once
        if not (parameter_refusal(value) or value.is_meta)  # which has no memory
    )
    return any(before[0] == after[0] and before[2] > after[1] for before, after in itertools.pairwise(spans))


def convert_state(optimizer: torch.optim.Optimizer) -> None:
    """Turns what state an optimizer has into ours, where it is patched and that has not happened yet.

    State that does not fit its parameter stays as it is: PyTorch, too, says so when it steps, not before.
    """
    optimizer = inner_of(optimizer)
    if not isinstance(optimizer, _Patched):
        return
    for group in optimizer.param_groups:
        if group_refusal(optimizer._memscale_kind, group):
            continue
        for parameter in group["params"]:
            if optimizer.state.get(parameter) and not parameter_refusal(parameter):
                with contextlib.suppress(ValueError):
                    entry_of(optimizer, parameter)


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer what it was: its class, its attributes, its state in PyTorch's form.

    BF16 weights stay as they are; what their masters had more is lost. One that is not patched: nothing.
    """
    optimizer = inner_of(optimizer)
    if isinstance(optimizer, _Patched):
        with _resident_state(optimizer):
            _give_back(optimizer)


def _give_back(optimizer: Any) -> None:
    groups = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    state = optimizer.state
    for parameter in list(state):  # and no list of entries: each goes as soon as its successor is there
        if isinstance(state[parameter], dict) and FORM in state[parameter]:
            give_back_state(optimizer, groups.get(id(parameter), {}), parameter, state[parameter])
    _HOLDERS.pop(optimizer, None)
    optimizer.__class__ = optimizer._memscale_base
    rewrap(optimizer)
    said_about.pop(optimizer, None)
