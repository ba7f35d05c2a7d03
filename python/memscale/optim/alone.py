# SPDX-License-Identifier: Apache-2.0
"""The step of the caller's optimizer on one parameter, or on a part of one, alone.

A stand-in of its class, with its attributes and one group of one parameter, is stepped. So it is the class's
own step that runs, with whatever it chooses by its settings, and not one that is written anew.

Of PyTorch's optimizers those that ask `_init_group` go through their parameters independently. Of others that
is tried, on small tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from memscale.optim.offload.pieces import OFFLOADED, Slots
from memscale.weights.placement import device_of_use

CUTTABLE: Final = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Treat each element alone, and have state for each: a part of a parameter is stepped as in the whole."""

States = defaultdict[Any, Any]
"""State by parameter, as an optimizer has it."""

_REDUCED: Final = (torch.bfloat16, torch.float16)
_NOT_COPIED: Final = (
    "step",
    "zero_grad",
    "param_groups",
    "state",
)  # schedulers replace the first on the object


def unhooked(step: Any) -> Any:
    """A class's `step` without PyTorch's hooks around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def step_around(
    optimizer: Any,
    base: type[torch.optim.Optimizer],
    closure: Callable[[], Any] | None,
    step_groups: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> Any:
    """A step of an optimizer that has no `_init_group`: ours of what it can, its class's of what is left.

    Args:
        optimizer: of a subclass of `base`.
        base: its own class.
        closure: as for `step`, whose result this returns.
        step_groups: steps what it can of the groups; returns them with the parameters that are left.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    left = step_groups(groups)
    if any(group["params"] for group in left):
        optimizer.param_groups = left
        try:
            unhooked(base.step)(optimizer)
        finally:
            optimizer.param_groups = groups
    return loss


class Alone:
    """Steps parameters of a group one by one.

    Args:
        optimizer: whose attributes count.
        base: class whose step it is.
        group: settings.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer], group: dict[str, Any]
    ) -> None:
        self.group = group
        self._step = unhooked(base.step)
        self._stand_in = base.__new__(base)
        known = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
        self._stand_in.__dict__.update(known)

    def step(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Steps a tensor with its `grad`. Returns its state afterwards."""
        states: States = defaultdict(dict)
        states[parameter] = state
        self.step_in(parameter, states)
        return dict(states[parameter])

    def step_in(self, parameter: Tensor, states: States) -> None:
        """The same, with the state where it lies: in that of its optimizer, say."""
        mine = self._stand_in
        mine.param_groups = [{**self.group, "params": [parameter]}]
        mine.state = states
        try:
            self._step(mine)
        finally:
            mine.param_groups, mine.state = [], defaultdict(dict)  # holds no part that has been stepped


def can_cut(
    base: type[torch.optim.Optimizer], group: dict[str, Any], parameter: Tensor, on_card: bool | None = None
) -> bool:
    """Whether a part of a parameter is stepped with the bits that it has in the whole.

    Numbers of 16 bits are rounded between operations where a kernel of the host takes elements singly, at
    the end of each thread's share, and not where it takes several: with several threads each share would
    have to end where it does in the whole. Fused kernels share out whole lines; SGD's, at 16 bits, begins
    its momentum with what memory held. A card's kernels compute each element with the same instructions,
    wherever it lies.

    Args:
        base: class of the optimizer.
        group: its settings.
        parameter: of the group.
        on_card: where it is stepped; None: where it is now.
    """
    if base not in CUTTABLE or parameter.is_complex() or group.get("capturable"):
        return False
    if parameter.dtype not in _REDUCED or (not parameter.is_cpu if on_card is None else on_card):
        return True
    fused = bool(group.get("fused"))
    return not (fused and base is torch.optim.SGD) and (fused or torch.get_num_threads() == 1)


def lists_are_alike(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer's operations on lists choose the same kernels for a part as for all of a group.

    On a card such an operation has one kernel for a whole list, if all tensors in it are dense and lie in
    the order of their parameters, and otherwise goes through them with the operation for single tensors,
    which may round otherwise. So one odd gradient changes the bits of all others.
    """
    if group.get("fused") or group.get("foreach") is False or not group_is_on_card(group):
        return True
    return all(
        is_usual_on_card(parameter, optimizer.state.get(parameter, {}))
        for parameter in group["params"]
        if parameter.grad is not None
    )


def group_is_on_card(group: dict[str, Any]) -> bool:
    """Whether any of a group's parameters lies on a card."""
    return any(device_of_use(parameter).type == "cuda" for parameter in group["params"])


def is_usual_on_card(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether a card's parameter, its gradient and what is here of its state are dense and alike."""
    gradient, device = parameter.grad, device_of_use(parameter)
    found = () if gradient is None else (gradient,)
    alike = (*found, *(value for value in state.values() if isinstance(value, Tensor)))
    layout = state[OFFLOADED].layout if OFFLOADED in state else None
    offloaded = layout.slots if isinstance(layout, Slots) else ()
    return (
        type(parameter) in (Tensor, torch.nn.Parameter)
        and device.type == "cuda"
        and torch.ops.aten.is_non_overlapping_and_dense.default(parameter.detach())
        and all(
            value.layout is torch.strided
            and value.dtype is parameter.dtype
            and value.device == device
            and value.stride() == parameter.stride()
            for value in alike
            if value.shape == parameter.shape and parameter.dim() > 0
        )
        and all(
            slot.dtype is parameter.dtype and slot.stride == parameter.stride()
            for slot in offloaded
            if slot.shape == parameter.shape
        )
    )


# ---- optimizers that are not PyTorch's ---------------------------------------------------------------


def why_not_alone(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> str:
    """Why an optimizer cannot be stepped parameter by parameter; "" if it can."""
    if base is torch.optim.LBFGS or issubclass(base, torch.optim.LBFGS):
        return "LBFGS has one state for all parameters"
    if base is torch.optim.SparseAdam:
        return "SparseAdam takes sparse gradients only"
    if base.__module__.startswith("torch.optim.") and hasattr(base, "_init_group"):
        return ""
    known = {value for group in optimizer.param_groups for value in group["params"]}
    if any(key not in known for key in optimizer.state):
        return f"{base.__name__} has state that belongs to no parameter"
    try:
        return _tried(optimizer, base)
    except Exception as error:
        return f"{base.__name__} was tried on small tensors and failed ({type(error).__name__}: {error})"


def _tried(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> str:
    """Steps small tensors together and alone."""
    cards = {value.device for value in _all(optimizer) if value.is_cuda}
    numbers = [device.index or 0 for device in cards]
    with torch.random.fork_rng(devices=numbers):
        _seed(0, numbers)
        together, apart = _twin(optimizer, base), _twin(optimizer, base)
        before = _settings(together)
        for number in range(3):
            for one, other in zip(_all(together), _all(apart), strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            _seed(2 * number + 1, numbers)
            unhooked(base.step)(together)
            _seed(2 * number + 1, numbers)
            for group in apart.param_groups:
                alone = Alone(apart, base, group)
                for parameter in group["params"]:
                    apart.state[parameter] = alone.step(parameter, apart.state[parameter])
        if _settings(together) != before:
            return f"the step of {base.__name__} changes more than parameters and their state"
        for one, other in zip(_all(together), _all(apart), strict=True):
            if not _same(one.detach(), other.detach()) or not _same(together.state[one], apart.state[other]):
                return f"{base.__name__} steps a parameter differently where others are stepped with it"
    return ""


def _seed(value: int, cards: list[int]) -> None:
    """Seeds the host's generator and those of cards, and no others."""
    for generator in (torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)):
        generator.manual_seed(value)


def _twin(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    twin = base.__new__(base)
    known = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    hooks = {name: type(value)() for name, value in known.items() if name.endswith("_hooks")}
    twin.__dict__.update({**copy.deepcopy({k: v for k, v in known.items() if k not in hooks}), **hooks})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": _small(group["params"])} for group in optimizer.param_groups]
    return twin


def _small(parameters: list[Tensor]) -> list[Tensor]:
    """A few tensors with as many dimensions: one of each kind, and a second one of the first."""
    kinds = {(value.dim(), value.dtype, value.device) for value in parameters if value.requires_grad}
    made = []
    for dims, dtype, device in itertools.islice(
        itertools.chain(sorted(kinds, key=str), kinds), len(kinds) + 1
    ):
        values = torch.linspace(-1, 1, 6**dims if dims < 4 else 2**dims).to(dtype)
        values = values.reshape((6 if dims < 4 else 2,) * dims)
        made.append(torch.empty_like(values, device=device).copy_(values).requires_grad_())
    return made


def _all(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """What a step is to leave as it is, as text."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    return repr((sorted(own.items(), key=str), groups))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
