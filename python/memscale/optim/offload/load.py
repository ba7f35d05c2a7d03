# SPDX-License-Identifier: Apache-2.0
"""State that is loaded for parameters on a card, from the host to where it lies between steps.

PyTorch brings all that it loads to the parameters' device at once, which is what state that is offloaded has
no room for. So large tensors pass it in a wrapping that it takes for something else, and go out piece by
piece afterwards, cast as PyTorch casts. Hooks of the caller see tensors before, and state that is offloaded
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memscale.optim.offload.pieces import LEAST_BYTES, Slots, slots_of
from memscale.optim.offload.state import Entry, depart, is_cut, is_worth_it, with_groups
from memscale.optim.offload.store import StateStore
from memscale.optim.saved import hooked
from memscale.weights.placement import device_of_use


class _Wrapped:
    """A tensor on the host that PyTorch is to pass on as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def passing(optimizer: Any, base: type[torch.optim.Optimizer], store: StateStore) -> Iterator[None]:
    """What is loaded inside the block goes to the store past the device, but for a piece at a time.

    Args:
        optimizer: that loads; its state is offloaded.
        base: its own class.
        store: where to.
    """

    def settle(owner: Any) -> None:
        for group, parameter in with_groups(owner):
            entry = owner.state.get(parameter, {})
            if device_of_use(parameter) != parameter.device:
                entry = owner.state[parameter] = _of_offloaded(entry, group, parameter)
            if any(isinstance(value, _Wrapped) for value in entry.values()):
                owner.state[parameter] = _settled(entry, parameter, is_cut(base, group, parameter), store)

    with (
        hooked(optimizer.register_load_state_dict_pre_hook, _wrapped),
        hooked(optimizer.register_load_state_dict_post_hook, settle, prepend=True),
    ):
        yield


def _wrapped(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with its large tensors wrapped; the caller's stays as it is."""
    state = {
        key: {name: _Wrapped(value) if _passes(value) else value for name, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _passes(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.nbytes >= LEAST_BYTES // 16
    )


def _of_offloaded(entry: Entry, group: Entry, parameter: Tensor) -> Entry:
    """The loaded state of an offloaded weight: large tensors wrapped on the host, counters on the card."""
    passing = {name: _Wrapped(value) if _passes(value) else value for name, value in entry.items()}
    counter = passing.get("step")
    if (group.get("fused") or group.get("capturable")) and isinstance(counter, Tensor):
        passing["step"] = counter.to(device_of_use(parameter))
    return passing


def _settled(entry: Entry, parameter: Tensor, cut: bool, store: StateStore) -> Entry:
    """A state that is offloaded, of one whose large tensors are wrapped."""
    given = {name: value.tensor for name, value in entry.items() if isinstance(value, _Wrapped)}
    floating = parameter.is_floating_point()
    slots = slots_of(given, tuple(parameter.shape) if cut else None, torch.device("cpu"))
    if cut and any(slot.stride != parameter.stride() for slot in slots):
        cut, slots = False, slots_of(given, None, torch.device("cpu"))
    if not is_worth_it(parameter, store.device):
        slots = ()
    names = {slot.name for slot in slots}
    here = {name: value for name, value in entry.items() if name not in given}
    for name, value in given.items():
        if name not in names:
            dtype = parameter.dtype if floating else value.dtype
            here[name] = value.to(dtype=dtype, device=device_of_use(parameter))
    if not slots:
        return here
    typed = tuple(slot._replace(dtype=parameter.dtype if floating else slot.dtype) for slot in slots)
    whole = {**here, **{name: given[name] for name in names}}
    made, jobs = depart(whole, Slots(typed, cut), parameter, store)
    store.run(jobs)
    return made
