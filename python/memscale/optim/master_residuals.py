# SPDX-License-Identifier: Apache-2.0
"""Residuals of BF16 weights (the low-order bits of their FP32 masters), in the optimizer's state.

    waiting, 16 bits ──► the step that is about to run ──► in the state: 16 bits, or 8 beside 8-bit moments

Where the state is offloaded between steps, the rest goes into each of its pieces when the step has it
(`fill`).

`masters.py` has the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from memscale.optim.arrays import core_on
from memscale.optim.kinds import gradient_refusal, group_refusal, parameter_refusal
from memscale.optim.masters import NARROW, WHOLE, Master, master_of, span, to_fp32
from memscale.optim.offload.pieces import OFFLOADED, Own
from memscale.optim.offload.state import brought_back, residual_of
from memscale.optim.saved import KEY
from memscale.optim.steps import entry_of
from memscale.weights.stream import borrow

if TYPE_CHECKING:
    from memscale.optim.patched_base import PatchedOptimizer

_CHUNK: Final = 1 << 14  # elements that are rounded at a time
_CHUNK_ON_CARD: Final = 1 << 15  # at 7 bytes each: less than a plan leaves free, which does not count them


def prepare(optimizer: PatchedOptimizer, group: dict[str, Any]) -> None:
    """Makes the weights of a group ready for a step: rests that wait go into the optimizer's state.

    The largest first: while one is at it, its rest is there twice, and those of the others still once.
    """
    leave_to_pytorch(optimizer, group)
    found = [value for value in group["params"] if value.grad is not None and waits(value)]
    for parameter in sorted(found, key=lambda value: -value.numel()):
        settle(optimizer, parameter)


def leave_to_pytorch(optimizer: PatchedOptimizer, group: dict[str, Any]) -> None:
    """Makes those of a group's BF16 weights FP32 that our step does not do, as they would lose their masters.

    That is what PyTorch has to step (sparse gradients, a switch of the group), and what has been given
    another dtype: there the weight is all there is.
    """
    for parameter in group["params"]:
        if master_of(parameter) is None or parameter.grad is None:
            continue
        if parameter.dtype is not torch.bfloat16 or not _is_ours(optimizer, group, parameter):
            borrow(parameter)
            to_fp32(parameter)


def waits(parameter: Tensor) -> bool:
    """Whether a weight has a rest that waits for its step."""
    master = master_of(parameter)
    return master is not None and master.waiting is not None


def _is_ours(optimizer: PatchedOptimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether our step does a parameter that has a gradient."""
    return parameter.grad is not None and not (
        group_refusal(optimizer._memscale_kind, group)
        or parameter_refusal(parameter)
        or gradient_refusal(parameter, parameter.grad)
    )


def settle(optimizer: PatchedOptimizer, parameter: Tensor) -> None:
    """Puts a rest that waits into the state of the whole parameter; it is made, or comes back, for that."""
    if OFFLOADED in optimizer.state.get(parameter, {}):  # its step offloads it again
        optimizer.state[parameter] = brought_back(optimizer.state[parameter])
    rest = residual_of(entry_of(optimizer, parameter))
    assert rest is not None
    _fill(parameter, _flat(parameter.detach()), _flat(rest), 0, parameter.numel())
    settled(parameter)


def fill(parameter: Tensor, weight: Tensor, state: Tensor, layout: Own, first: int, last: int) -> None:
    """Puts a part of a rest that waits into a piece of the state.

    Args:
        parameter: whose.
        weight: that part of it, flat.
        state: bytes of the piece.
        layout: of the state.
        first: element of the parameter that the piece begins with.
        last: that it ends before.
    """
    at, size = layout.places(first, last).rest
    dtype = torch.int16 if size == 2 * (last - first) else torch.int8
    _fill(parameter, weight, state[at : at + size].view(dtype), first, last)


def settled(parameter: Tensor) -> None:
    """All of a rest is in the state."""
    master = master_of(parameter)
    assert master is not None
    master.waiting = None


def _fill(parameter: Tensor, weight: Tensor, rest: Tensor, first: int, last: int) -> None:
    """Makes a part of a rest of that which waits: as it is, or rounded to 8 bits, to nearest."""
    master = master_of(parameter)
    assert master is not None and master.waiting is not None
    if master.waiting.stride() != parameter.stride():
        master.waiting = master.empty().copy_(master.waiting)
    waiting = _flat(master.waiting)[first:last]
    if rest.dtype is torch.int16:
        rest.copy_(waiting)
    else:
        _round(weight, waiting, rest)


def _round(weights: Tensor, waiting: Tensor, rest: Tensor) -> None:
    """Weights with a rest of 16 bits become such with 8, a part at a time."""
    device, chunk = weights.device, _CHUNK if weights.is_cpu else _CHUNK_ON_CARD
    whole = torch.empty(min(chunk, weights.numel()), dtype=torch.float32, device=device)
    parts = (tensor.split(chunk) for tensor in (weights, waiting, rest))
    for weight, there, narrow in zip(*parts, strict=True):
        part, wide = whole[: weight.numel()], there.to(device)
        core_on(device).join(WHOLE, span(weight), span(wide), span(part))
        core_on(device).split(NARROW, span(part), span(weight), span(narrow))


def _flat(tensor: Tensor) -> Tensor:
    """A tensor without gaps in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _masters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Master]]:
    """Masters of an optimizer's weights, with their places among its parameters."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for place, parameter in enumerate(parameters):
        master = master_of(parameter)
        if master is not None:
            yield place, master


def wait_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Has rests that wait wait where the optimizer's state is from now on.

    Raises:
        OSError: there is no room for one. Those before it are there.
    """
    for _, master in _masters(optimizer):
        master.wait_elsewhere()


def keep_residuals(optimizer: torch.optim.Optimizer) -> None:
    """Takes rests out of an optimizer's state, which is about to be replaced by a saved one."""
    for _, master in _masters(optimizer):
        master.wait()


def without_residuals(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without rests of weights that the model's state dict has in FP32."""
    beside = state_dict.get(KEY)
    places = {place for place, _ in _masters(optimizer)}
    if beside is None or not places:
        return state_dict
    state = {
        place: {name: value for name, value in part.items() if name != "rest" or place not in places}
        for place, part in beside["state"].items()
    }
    return {**state_dict, KEY: {**beside, "state": state}}
