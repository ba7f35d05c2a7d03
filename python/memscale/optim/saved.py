# SPDX-License-Identifier: Apache-2.0
"""`state_dict` in PyTorch's form, so that a run goes on with or without MemScale, and back.

    state           step, exp_avg, …: the moments in FP32. What the core reads out of 8 bits comes out the
                    same when it is put back, so nothing is lost
    memscale_optim  {"version", "state": {index: {"step", "rest"}}}: steps that PyTorch does not count, and
                    what BF16 weights lack of their masters. PyTorch ignores it, and does not save it again

Of state on a card, all of it lies on the CPU. It can be loaded wherever the parameters are.

Without the second part, as after a while with PyTorch alone, masters begin at the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from memscale import _core
from memscale.optim.arrays import (
    FORM,
    STEP,
    Entry,
    form_of,
    from_standard,
    maker_on,
    to_standard,
)
from memscale.optim.kinds import group_refusal, parameter_refusal
from memscale.optim.offload.pieces import OFFLOADED
from memscale.optim.offload.state import brought_back, residual_of
from memscale.weights.placement import device_of_use

if TYPE_CHECKING:
    from memscale.optim.patched_base import PatchedOptimizer

KEY: Final = "memscale_optim"
"""Under which the second part lies."""

_READY: Final = "memscale_ready"


class _Ready:
    """State that PyTorch is to pass on as it is."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any], **more: Any) -> Iterator[None]:
    """Has a hook registered for the time of a block."""
    handle = register(hook, **more)
    try:
        yield
    finally:
        handle.remove()


def as_standard(optimizer: PatchedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with our arrays, as PyTorch has packed it, in the form that is described above."""
    kind, make = optimizer._memscale_kind, optimizer._memscale_empty()
    standard: dict[Any, Any] = {}
    beside: dict[Any, Any] = {}
    for index, entry in state_dict["state"].items():
        if not (isinstance(entry, dict) and FORM in entry):
            standard[index] = entry
            continue
        if OFFLOADED in entry:
            entry = brought_back(entry, make)
        standard[index] = to_standard(kind, entry, torch.float32, make=make)
        beside[index] = {"step": entry[STEP]}
        rest = residual_of(entry)
        if rest is not None:
            beside[index]["rest"] = make(rest.shape, rest.stride(), dtype=rest.dtype).copy_(rest)
    return {
        **state_dict,
        "state": standard,
        KEY: {"version": _core.OPTIM_STATE_VERSION, "state": beside},
    }


def as_ours(optimizer: PatchedOptimizer, state_dict: dict[str, Any], moments: str) -> dict[str, Any] | None:
    """A state dict in PyTorch's form with our arrays in place of the moments that they can hold.

    Raises:
        ValueError: a moment has another shape than its parameter; or the second part has another version.
    """
    kind, groups, given = optimizer._memscale_kind, optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in given]:
        return None  # PyTorch says so
    beside = _beside(state_dict.get(KEY))
    state = dict(state_dict["state"])
    for group, saved in zip(groups, given, strict=True):
        if group_refusal(kind, {**group, **saved}):
            continue
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if state.get(index) and not parameter_refusal(parameter):
                form = form_of(kind, moments, parameter)
                device = device_of_use(parameter)
                make = optimizer._memscale_empty() if device.type == "cpu" else maker_on(device)
                entry = from_standard(kind, form, state[index], make)
                _complete(entry, beside.get(index, {}), kind.counts)
                state[index] = {_READY: _Ready(entry)}
    return {**state_dict, "state": state}


def _beside(part: Any) -> Mapping[Any, Any]:
    if part is None:
        return {}
    if part["version"] != _core.OPTIM_STATE_VERSION:
        raise ValueError(
            f"{KEY}: version is {part['version']!r}; allowed: {_core.OPTIM_STATE_VERSION}. Without this "
            "key the state can be loaded"
        )
    found: Mapping[Any, Any] = part["state"]
    return found


def _complete(entry: Entry, beside: Mapping[str, Any], counted: bool) -> None:
    """Sets what PyTorch's form has no place for."""
    if not counted:
        entry[STEP] = beside.get("step", entry[STEP])
    rest, saved = residual_of(entry), beside.get("rest")
    if rest is None or not isinstance(saved, Tensor):
        return
    if saved.shape != rest.shape:
        raise ValueError(
            f"{KEY}: rest has shape {tuple(saved.shape)}; its parameter has shape {tuple(rest.shape)}"
        )
    if saved.dtype is rest.dtype:  # another one belongs to another form of moments
        rest.copy_(saved)


def parted(state: dict[str, Any]) -> tuple[dict[Any, Entry], dict[str, Any]]:
    """What PyTorch sets attributes from, in two: our state by parameter, and all without it."""
    ours: dict[Any, Entry] = {}
    others: defaultdict[Any, Any] = defaultdict(dict)
    if "state" not in state:
        return ours, state
    for key, entry in state["state"].items():
        if isinstance(entry, dict) and _READY in entry:
            ours[key] = entry[_READY].entry
        elif isinstance(entry, dict) and FORM in entry:
            ours[key] = entry
        else:
            others[key] = entry
    return ours, {**state, "state": others}
