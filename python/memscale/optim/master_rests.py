# SPDX-License-Identifier: Apache-2.0
"""What BF16 weights lack of their masters, in the state of the optimizer that steps them.

    waiting, 16 bits ──► the step that is about to run ──► in the state: 16 bits, or 8 beside 8-bit moments

`masters.py` has the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.optim.arrays import core_on, rest_of
from memscale.optim.away_state import brought_back
from memscale.optim.kinds import gradient_refusal, group_refusal, parameter_refusal
from memscale.optim.masters import NARROW, WHOLE, Master, master_of, span, to_fp32
from memscale.optim.pieces import AWAY
from memscale.optim.saved import KEY
from memscale.optim.steps import entry_of

if TYPE_CHECKING:
    from memscale.optim.taken import _Taken

_CHUNK: Final = 1 << 14  # elements that are rounded at a time
_CHUNK_ON_CARD: Final = 1 << 18  # 1 MiB, for a kernel that is worth its launch


def prepare(optimizer: _Taken, group: dict[str, Any]) -> None:
    """Makes the weights of a group ready for a step: rests that wait go into the optimizer's state.

    What PyTorch has to step (sparse gradients, a switch of the group) becomes FP32: it would lose the master.
    """
    waits = False
    for parameter in group["params"]:
        master = master_of(parameter)
        if master is not None and parameter.grad is not None:
            waits |= master.waiting is not None
            if not _is_ours(optimizer, group, parameter):
                to_fp32(parameter)
    if waits:
        _settle_all(optimizer)


def _is_ours(optimizer: _Taken, group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether our step does a parameter that has a gradient."""
    return parameter.grad is not None and not (
        group_refusal(optimizer._memscale_kind, group)
        or parameter_refusal(parameter)
        or gradient_refusal(parameter, parameter.grad)
    )


def _settle_all(optimizer: _Taken) -> None:
    """The largest first: while one is at it, its rest is there twice, and those of the others still once."""
    found = [
        (parameter, master)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (master := master_of(parameter)) is not None
        and master.waiting is not None
        and _is_ours(optimizer, group, parameter)
    ]
    for parameter, master in sorted(found, key=lambda pair: -pair[0].numel()):
        _settle(optimizer, parameter, master)


def _settle(optimizer: _Taken, parameter: nn.Parameter, master: Master) -> None:
    if parameter.dtype is not torch.bfloat16:  # somebody has converted the model: the weight is all there is
        to_fp32(parameter)
        return
    if AWAY in optimizer.state.get(parameter, {}):  # its step sends it away again
        optimizer.state[parameter] = brought_back(optimizer.state[parameter])
    rest = rest_of(entry_of(optimizer, parameter))
    assert rest is not None and master.waiting is not None
    if rest.dtype is torch.int16:
        rest.copy_(master.waiting)
    else:
        _round(parameter, master.waiting, rest)
    master.waiting = None


def _round(parameter: nn.Parameter, waiting: Tensor, rest: Tensor) -> None:
    """Weights with a rest of 16 bits become such with 8, to nearest, a part at a time."""
    if waiting.stride() != parameter.stride() or waiting.device != parameter.device:
        waiting = torch.empty_like(parameter, dtype=torch.int16).copy_(waiting)
    flat = [_flat(tensor) for tensor in (parameter.detach(), waiting, rest)]
    device, chunk = parameter.device, _CHUNK if parameter.is_cpu else _CHUNK_ON_CARD
    whole = torch.empty(min(chunk, parameter.numel()), dtype=torch.float32, device=device)
    for weight, wide, narrow in zip(*(tensor.split(chunk) for tensor in flat), strict=True):
        part = whole[: weight.numel()]
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


def keep_rests(optimizer: torch.optim.Optimizer) -> None:
    """Takes rests out of an optimizer's state, which is about to be replaced by a saved one."""
    for _, master in _masters(optimizer):
        master.wait()


def without_rests(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
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
