# SPDX-License-Identifier: Apache-2.0
"""Moves the state of parameters out, and back to where the parameters are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.optim import arrays
from memscale.optim.alone import can_cut
from memscale.optim.arrays import BYTES, FORM, Form, has_residual, residual_in
from memscale.optim.offload.pieces import (
    LEAST_BYTES,
    OFFLOADED,
    Layout,
    Offloaded,
    Own,
    Slots,
    Where,
    same_place,
    slots_of,
)
from memscale.optim.offload.store import Job, StateStore, fetched
from memscale.torchkit.extents import fills_memory
from memscale.weights.placement import device_of_use

if TYPE_CHECKING:
    from memscale.optim.arrays import Empty

Entry = dict[str, Any]


def is_worth_it(parameter: Tensor, device: torch.device | None = None) -> bool:
    """Whether a parameter is one whose state leaves. Looks at no data.

    Not of complex ones: PyTorch steps them as views of their real and imaginary parts.

    Args:
        parameter: of an optimizer.
        device: whose tensors the engine takes; None: wherever it is.
    """
    return (
        type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__
        and parameter.layout is torch.strided
        and not parameter.is_complex()
        and (device is None or same_place(device_of_use(parameter), device))
        and parameter.nbytes >= LEAST_BYTES
        and not (parameter.is_neg() or parameter.is_conj())
    )


def is_cut(base: type[torch.optim.Optimizer], group: Entry, parameter: Tensor) -> bool:
    """Whether a parameter's state passes in pieces."""
    on_card = device_of_use(parameter).type != "cpu"
    return can_cut(base, group, parameter, on_card) and fills_memory(parameter)


def layout_of(entry: Entry, parameter: Tensor, cut: bool) -> Layout:
    """What is to leave of a state that is here.

    Args:
        entry: the state.
        parameter: whose.
        cut: whether PyTorch's may be cut.
    """
    if FORM in entry:
        return Own(entry[FORM])
    device = device_of_use(parameter)
    slots = slots_of(entry, tuple(parameter.shape) if cut else None, device)
    if any(slot.stride != parameter.stride() for slot in slots) and cut:
        return Slots(slots_of(entry, None, device), False)  # loaded in another order
    return Slots(slots, cut)


def depart(entry: Entry, layout: Layout, parameter: Tensor, store: StateStore) -> tuple[Entry, list[Job]]:
    """An entry in place of one that is here, and what fills it."""
    offloaded = store.place_for(parameter, layout)
    names = (BYTES,) if isinstance(layout, Own) else tuple(slot.name for slot in layout.slots)
    rest = {name: value for name, value in entry.items() if name not in names}

    def fill(index: int) -> Job:
        first, last = offloaded.bounds[index]

        def work(_: Tensor | None) -> Tensor:
            piece = torch.empty(layout.size(first, last), dtype=torch.uint8, device=offloaded.place)
            layout.copy(entry, piece, first, last, out=True)
            return piece

        return Job(offloaded, index, work)

    return {**rest, OFFLOADED: offloaded}, [fill(index) for index in range(len(offloaded.bounds))]


def offload_entry(
    optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer], store: StateStore
) -> None:
    """Sends all state that is here, one parameter after the other."""
    for group, parameter in with_groups(optimizer):
        entry = optimizer.state.get(parameter)
        if entry and OFFLOADED not in entry and is_worth_it(parameter, store.device):
            layout = layout_of(entry, parameter, is_cut(base, group, parameter))
            if isinstance(layout, Own) or layout.slots:
                made, jobs = depart(entry, layout, parameter, store)
                store.run(jobs)
                optimizer.state[parameter] = made


def with_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Entry, Tensor]]:
    """Every parameter, with the settings of its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def brought_back(entry: Entry, make: Empty | None = None) -> Entry:
    """A state as it was when it was here. Where it was, it stays.

    Args:
        entry: the state.
        make: makes the tensors; None: where the parameter is.

    Raises:
        OSError: a piece could not be read, or a tensor could not be made.
        RuntimeError: a step ended in the middle.
    """
    offloaded: Offloaded = entry[OFFLOADED]
    refuse_torn(offloaded)
    whole = offloaded.layout.empty(make or partial(torch.empty_strided, device=offloaded.device))
    for first, last, piece in fetched(offloaded):
        offloaded.layout.copy(whole, piece, first, last, out=False)
    return {**{name: value for name, value in entry.items() if name != OFFLOADED}, **whole}


def copied(entry: Entry, make: Empty) -> Entry:
    """A state as PyTorch's state dict has it, that shares no memory with the optimizer's. Ours: as it is.

    Raises:
        OSError: as `brought_back`.
        RuntimeError: as `brought_back`.
    """
    if FORM in entry:
        return entry
    here = {name: _copied(value, make) for name, value in entry.items() if name != OFFLOADED}
    if OFFLOADED not in entry:
        return here
    return {**here, **brought_back({OFFLOADED: entry[OFFLOADED]}, make)}


def _copied(value: Any, make: Empty) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if type(value) is not Tensor or value.layout is not torch.strided or not fills_memory(value):
        return value.clone()
    return make(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def move(optimizer: torch.optim.Optimizer, store: StateStore) -> None:
    """Has pieces where the store wants them: first leaves what is to leave, then comes back what is to stay.

    Raises:
        OSError: a piece could not be read. It, and what comes after it, is where it was; a step brings it
            where it is wanted.
    """
    coming: list[Job] = []
    for parameter, entry in optimizer.state.items():
        offloaded: Offloaded | None = entry.get(OFFLOADED)
        if offloaded is None:
            continue
        wanted = store.where_for(parameter, offloaded.layout)
        if offloaded.where is wanted:
            continue
        offloaded.where = wanted
        jobs = [Job(offloaded, index, lambda piece: piece) for index in range(len(offloaded.bounds))]
        if wanted is Where.HERE:
            coming += jobs
        else:
            store.run(jobs)
    store.run(coming)


def residual_of(entry: Entry) -> Tensor | None:
    """What the weights lack of their masters, with the parameter's shape, or None.

    A view; of state that is offloaded a copy.
    """
    if BYTES in entry:
        return arrays.residual_of(entry)
    form: Form = entry[FORM]
    return residual_in(form, _residual_bytes(entry)) if has_residual(form) else None


def _residual_bytes(entry: Entry) -> Tensor:
    offloaded: Offloaded = entry[OFFLOADED]
    refuse_torn(offloaded)
    parts = []
    for first, last, piece in fetched(offloaded):
        assert isinstance(offloaded.layout, Own)
        at, size = offloaded.layout.places(first, last).rest
        parts.append(piece[at : at + size].to(offloaded.device, copy=True))
    return torch.cat(parts)


def bring_back(optimizer: torch.optim.Optimizer) -> None:
    """Brings all state back."""
    state = optimizer.state
    for parameter in list(state):  # and no list of entries: what they had here goes one by one
        if OFFLOADED in state[parameter]:
            state[parameter] = brought_back(state[parameter])


def refuse_torn(offloaded: Offloaded) -> None:
    """Raises where the state is of no use."""
    if offloaded.torn:
        raise RuntimeError(
            "a step of this optimizer ended in the middle of a parameter, which has been stepped in part: "
            "load the model and the optimizer from a checkpoint"
        )
