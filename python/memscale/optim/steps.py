# SPDX-License-Identifier: Apache-2.0
"""Steps a group of parameters: in our core where it can, else by PyTorch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.optim.arrays import (
    BYTES,
    FORM,
    STEP,
    Entry,
    core_on,
    form_of,
    from_standard,
    is_form_of,
    maker_on,
    reformed,
    tensor_of,
    to_standard,
)
from memscale.optim.kinds import (
    GRADIENTS,
    gradient_refusal,
    group_refusal,
    is_usual,
    parameter_refusal,
    rule_of,
)
from memscale.optim.release.gradient import ReleasedGradient, plain
from memscale.weights.placement import device_of_use

if TYPE_CHECKING:
    from memscale import _core
    from memscale.optim.patched_base import PatchedOptimizer

_LOGGER = logging.getLogger("memscale")

said_about: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()
"""Per optimizer, why parameters stay with PyTorch, as far as it has been said."""


@dataclass
class CoreStep:
    """A call of the core.

    Attributes:
        tensors: as the core takes them.
        entries: their state, whose counters have not moved.
        parameters: that are stepped.
        gradients: that they are stepped with: the core has addresses only.
        rule: how.
    """

    tensors: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    rule: dict[str, Any] = field(default_factory=dict)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def run(self, core: _core.Optim | None = None) -> None:
        """Does it.

        Args:
            core: None: that of the device, with as many threads as PyTorch has.
        """
        (core or core_on(self.parameters[0].device)).step(self.rule, self.tensors)


Hand = Callable[[Any], None]
"""What a call is handed to, a `CoreStep` or `offload.step.HostCall`: runs it, or has it run before anybody
looks at weights and state."""


class _Work:
    """The parameters of a group that are stepped here, in calls of the core: one per combination of types.

    On a card a call is a kernel for every 54 parameters.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, torch.dtype, int], CoreStep] = {}  # with the card's number, or -1

    def add(self, entry: Entry, parameter: Tensor, gradient: Tensor, is_like: bool = False) -> None:
        """`is_like`: the gradient is known to lie as the parameter does."""
        if not is_like and (gradient.stride() != parameter.stride() or gradient.is_neg()):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        types = (entry[FORM].weights, gradient.dtype, gradient.get_device())
        call = self.calls.get(types)
        if call is None:
            call = self.calls[types] = CoreStep()
        call.tensors.append(tensor_of(entry, parameter, gradient))
        call.entries.append(entry)
        call.parameters.append(parameter)
        call.gradients.append(gradient)

    def run(self, rule: dict[str, Any], hand: Hand = CoreStep.run) -> None:
        for (weights, gradient, _), call in self.calls.items():
            call.rule = {**rule, "weights": weights, "gradient": GRADIENTS[gradient]}
            hand(call)
            for entry in call.entries:
                entry[STEP] += 1
            _note_change(call.parameters)


def _note_change(parameters: list[Tensor]) -> None:
    """Raises their versions: autograd does so where it is PyTorch that changes something."""
    try:
        torch.autograd.graph.increment_version(parameters)
    except (RuntimeError, TypeError):  # PyTorch before 2.5 takes one at a time
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)


def step_group(optimizer: PatchedOptimizer, group: dict[str, Any], hand: Hand = CoreStep.run) -> list[Tensor]:
    """Steps the parameters of a group that have our state. Returns those that PyTorch has to step.

    Args:
        optimizer: whose group it is.
        group: settings and parameters.
        hand: gets the calls of the core for gradients that are here.

    Raises:
        RuntimeError: a compiler is tracing, or a CUDA graph is captured: what is not to be repeated would be,
            or would not.
        ValueError: a setting is out of range, or a parameter has got another size. No weight has changed then
            where all have the same types and gradients that are here; others may have been stepped before.
        OSError: a gradient that was offloaded could not be read. Those before it are stepped.
    """
    if torch._guards.TracingContext.try_get() is not None:
        raise RuntimeError("an optimizer with MemScale's state cannot be stepped by compiled code")
    kind, work = optimizer._memscale_kind, _Work()
    left: list[Tensor] = []
    released: list[tuple[Entry, Tensor, Tensor]] = []
    refusal = group_refusal(kind, group)
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not refusal and is_usual(parameter, gradient):
            work.add(entry_of(optimizer, parameter), parameter, gradient, is_like=True)
            continue
        why = refusal or parameter_refusal(parameter) or gradient_refusal(parameter, gradient)
        if why:
            _release(optimizer, group, parameter, why)
            left.append(parameter)
        elif isinstance(gradient, ReleasedGradient):
            released.append((entry_of(optimizer, parameter), parameter, gradient))
        else:
            work.add(entry_of(optimizer, parameter), parameter, gradient)
    rule = {**rule_of(kind, group), "moments": optimizer._memscale_moments}
    work.run(rule, hand)
    for entry, parameter, gradient in released:  # one at a time is here
        with plain(gradient) as tensor:
            alone = _Work()
            alone.add(entry, parameter, tensor)
            alone.run(rule)
    return left


def entry_of(optimizer: PatchedOptimizer, parameter: Tensor) -> Entry:
    """Our state of a parameter: as it is, new, or made of what there is. It is put in the optimizer."""
    kind = optimizer._memscale_kind
    found: Entry = optimizer.state.get(parameter, {})
    if FORM in found:
        if found[BYTES].get_device() != parameter.get_device():  # the parameter has moved, or is offloaded
            found = optimizer.state[parameter] = {**found, BYTES: found[BYTES].to(device_of_use(parameter))}
        if is_form_of(found[FORM], kind, optimizer._memscale_moments, parameter):
            return found
    form = form_of(kind, optimizer._memscale_moments, parameter)
    if FORM in found:
        found = reformed(kind, found, form)
    else:
        found = from_standard(kind, form, found, maker_on(device_of_use(parameter)))
    optimizer.state[parameter] = found
    return found


def _release(optimizer: PatchedOptimizer, group: dict[str, Any], parameter: Tensor, why: str) -> None:
    """Gives a parameter's state the form that PyTorch's step wants. Says why, once."""
    said = said_about.setdefault(optimizer, set())
    if why not in said:
        said.add(why)
        _LOGGER.info("optimizer state: PyTorch's for some parameters (%s)", why)
    entry = optimizer.state.get(parameter)
    if entry and FORM in entry:
        give_back_state(optimizer, group, parameter, entry)


def give_back_state(
    optimizer: PatchedOptimizer, group: dict[str, Any], parameter: Tensor, entry: Entry
) -> None:
    """Puts state in PyTorch's form in place of ours."""
    device = device_of_use(parameter)
    made = to_standard(optimizer._memscale_kind, entry, parameter.dtype, device)
    if "step" in made and (group.get("fused") or group.get("capturable")):
        made["step"] = made["step"].to(device, torch.float32)
    if made:
        optimizer.state[parameter] = made
    else:
        del optimizer.state[parameter]
