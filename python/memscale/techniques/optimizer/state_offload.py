# SPDX-License-Identifier: Apache-2.0
"""Offload of optimizer state between steps; a step fetches it and writes it back piece by piece.

Of parameters on a card it lies in host memory, pinned first, or in a file where one is asked for; of
parameters in host memory, in a file.

Nothing is rounded, and nothing is computed otherwise: the optimizer's own step runs on each piece
(`optim/offload/attach.py`), on their device. Our own state of a card's parameters may be stepped by the host
instead, with the same bits (`optim/offload/host_parts.py`): then it does not move, and gradients and weights
do. It costs the time that all of what moves takes, once per step, as far as that does not hide behind the
computing; a plan counts all of it.

Plans do this for AdamW, Adam, SGD with momentum, and our own state. `memscale.optim.offload.attach.send`
takes others.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from memscale.offload.engine import Offload, OffloadSettings
from memscale.offload.limits import STAGING_BYTES
from memscale.optim.kinds import inner_of
from memscale.optim.masters import planned_dtypes
from memscale.optim.offload.attach import (
    is_offloaded,
    keep_resident,
    offloaded_bytes,
    send,
    steps_on_host,
    take_back,
    why_not_offloaded,
)
from memscale.optim.offload.host_parts import HostRoom
from memscale.optim.offload.host_rate import elements_per_us
from memscale.optim.offload.pieces import LEAST_BYTES, PIECE_ELEMENTS
from memscale.optim.offload.state import is_worth_it
from memscale.optim.patched import is_held
from memscale.optim.patched_base import base_of, is_patched, moments_of
from memscale.techniques.base import Part
from memscale.techniques.optimizer.eight_bit_layout import layout_of
from memscale.techniques.optimizer.offload_layout import OffloadLayout, has_known_layout
from memscale.techniques.optimizer.path import OptimizerPath

if TYPE_CHECKING:
    from memscale.hardware.detect import Hardware
    from memscale.offload.limits import Link
    from memscale.techniques.base import PathAttachment, Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn

_LOGGER = logging.getLogger("memscale")

NAME: Final = "state_offload"

_UNKNOWN = "the optimizer is not known: pass it to wrap, or use optimize"
_STATE_FACTOR = 3  # bytes of state per byte of parameter, at most: AdamW with amsgrad


def find(model: nn.Module, around: Surroundings) -> Sequence[StateOffload]:
    """The technique, if the optimizer can have it."""
    optimizer, link = around.optimizer, around.link
    if optimizer is None or isinstance(link, str) or _reason(optimizer, link):
        return ()
    resident = around.resident.get(NAME, frozenset()) | around.left_out.parameters
    host_ns = host_ns_of(optimizer, link, around)
    made = StateOffload(model, optimizer, link, around.hardware, resident, host_ns)
    made.why_by_card = why_not_on_host(optimizer, link) if around.config.step_on_host else ""
    return (made,)


def why_not(model: nn.Module, around: Surroundings) -> str:
    """Why an optimizer cannot have it; "" where nobody asked."""
    if isinstance(around.link, str):
        return around.link
    return _UNKNOWN if around.optimizer is None else _reason(around.optimizer, around.link)


def _reason(optimizer: torch.optim.Optimizer, link: Link) -> str:
    inner = inner_of(optimizer)
    if not (is_patched(inner) or has_known_layout(base_of(inner))):
        name = type(inner).__name__
        return f"how much a step of {name} takes is not known: see memscale.optim.offload.attach.send"
    if not is_offloaded(inner) and (reason := why_not_offloaded(inner)):
        return reason
    needed = _needed_bytes(inner)
    if not needed:
        return f"no parameter has {LEAST_BYTES} bytes or more, those of complex numbers aside"
    if link.settings.device.type != "cpu":
        room = max(0, sum(link.state_bytes) - STAGING_BYTES)
        short = needed > room and not is_offloaded(inner)  # or it has its room already
        return f"host memory and files may take {room} bytes, less than {needed}" if short else ""
    # What is offloaded already has its room: the link counts what is free beside it. Other techniques may
    # want the same room; where it does not suffice for all, what comes last stays in memory, and is said.
    return link.why_no_file_room(needed - (offloaded_bytes(inner) if is_offloaded(inner) else 0))


def _needed_bytes(optimizer: torch.optim.Optimizer) -> int:
    """At most what the state that can leave takes elsewhere."""
    return _STATE_FACTOR * sum(value.nbytes for value in _large(optimizer))


def why_not_on_host(optimizer: torch.optim.Optimizer, link: Link) -> str:
    """Why the host does not step an optimizer's parameters on a card; "" if it can."""
    inner = inner_of(optimizer)
    if link.settings.device.type == "cpu":
        return "the host steps its own parameters anyway"
    if not is_patched(inner) or is_held(inner):
        return "only 8-bit state has the same bits on the host: give use_8bit_optimizer=True"
    room = sum(link.state_bytes[:2]) - STAGING_BYTES - HostRoom.most_bytes(PIECE_ELEMENTS)
    needed = _own_bytes(_large(inner), moments_of(inner))
    there = is_offloaded(inner) and steps_on_host(inner)  # then it has its room
    return "" if there or needed <= room else f"host memory may take {max(0, room)} bytes, less than {needed}"


def host_ns_of(optimizer: torch.optim.Optimizer, link: Link, around: Surroundings) -> int:
    """Nanoseconds of the host's step of 1,024 elements, where it is to step a card's parameters; else 0."""
    inner, asked = inner_of(optimizer), around.config.step_on_host
    if asked is False or why_not_on_host(inner, link):
        return 0
    large, moments = _large(inner), moments_of(inner) or "code8"
    dtype = torch.bfloat16 if around.config.use_mixed_precision else large[0].dtype
    ns = max(1, 1_024_000 // elements_per_us(moments, dtype, around.hardware))
    return ns if asked or _is_faster(large, moments, dtype, link, ns) else 0


def _is_faster(large: list[Tensor], moments: str, dtype: torch.dtype, link: Link, ns: int) -> bool:
    """Whether the host's steps take less time than state on its way through the card.

    For gradients that have left the card, and weights that have not: then the card needs gradients and state
    there, and state back; the host needs weights there and back.
    """
    count = sum(value.numel() for value in large)
    state, width = _own_bytes(large, moments), count * dtype.itemsize
    out, back = link.out_bytes_per_us, link.in_bytes_per_us
    on_card = 1000 * (state // out + (state + width) // back)
    return 1000 * (width // out + width // back) + count * ns // 1024 < on_card


def _large(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters whose state can leave."""
    parameters = (value for group in optimizer.param_groups for value in group["params"])
    return [value for value in parameters if value.requires_grad and is_worth_it(value)]


def _own_bytes(parameters: list[Tensor], moments: str | None) -> int:
    """At most what our state of parameters takes: as of BF16 weights with masters."""
    width = (1 if moments == "code8" else 4) * 2 + 2
    return sum(width * value.numel() + value.numel() // 16 + LEAST_BYTES for value in parameters)


def with_state_room(link: Link | str, optimizer: torch.optim.Optimizer | None) -> Link | str:
    """A way off a card with a part of each tier kept for optimizer state: half of it at most.

    So that the engine of the state and that of all else take no more together than they may.
    """
    if isinstance(link, str) or link.settings.device.type == "cpu" or optimizer is None:
        return link
    needed, kept, given = _needed_bytes(inner_of(optimizer)), [], link.settings
    missing = needed + STAGING_BYTES if needed else 0
    for size in (given.pinned_bytes, given.host_bytes, given.file_bytes):
        part = min(missing, size // 2) if size >= 4 * STAGING_BYTES else 0
        missing -= part
        kept.append(part)
    left = replace(
        given,
        pinned_bytes=given.pinned_bytes - kept[0],
        host_bytes=given.host_bytes - kept[1],
        file_bytes=given.file_bytes - kept[2],
    )
    rooms = kept[0], kept[1], kept[2]
    return replace(link, settings=left, limit_bytes=link.limit_bytes - sum(kept), state_bytes=rooms)


def _settings(link: Link) -> OffloadSettings:
    """Of an engine of its own: the state stays in it from plan to plan, outside of the recorded order."""
    own = replace(link.settings, least_bytes=1, prefetch_count=0, trace_count=0)
    if own.device.type == "cpu":
        return own
    pinned, host, file = link.state_bytes
    return replace(own, pinned_bytes=pinned, host_bytes=host, file_bytes=file)


class StateOffload:
    """State of one optimizer that is offloaded, as planner and executor attach it.

    Args:
        model: gives parameters their names.
        optimizer: whose.
        link: the way off the device.
        hardware: the device, for what a copy costs.
        resident: names of parameters whose state stays.
        host_ns: of the host's step of 1,024 elements of a card's parameters; 0: the card steps them.

    Attributes:
        why_by_card: why the card steps them, where the caller has asked for the host.
    """

    name = NAME
    path = ""
    reason = ""
    stays = False
    apart_from = frozenset({"weight_offload"})  # all of it would be in memory at once between two plans

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        link: Link,
        hardware: Hardware,
        resident: frozenset[str] = frozenset(),
        host_ns: int = 0,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(inner_of(optimizer))
        self._traced_path = OptimizerPath()
        self.resident = resident
        self.host_ns = host_ns
        self.why_by_card = ""
        self.beneath: StandIn | None = None
        self.link = link
        self.hardware = hardware
        self.used = False

    @property
    def what(self) -> str:
        """What it does, and where the state goes."""
        if self.link.settings.device.type == "cpu":
            return "optimizer state in a file: a step reads and writes it piece by piece"
        if self.host_ns:
            return "optimizer state on the host, whose cores step it: gradients come down, weights go up"
        where = "in a file" if not any(self.link.state_bytes[:2]) else "on the host"
        beside = f" (step_on_host=True: {self.why_by_card})" if self.why_by_card else ""
        return f"optimizer state {where}: it passes the card piece by piece in a step{beside}"

    def traced(self, step: StepFacts) -> StepFacts:
        """The step with the state gone, and its pieces in the optimizer's step."""
        self.used = True
        rate = self.hardware.cost.bytes_of("move")
        link = self.link
        moves = 1024 * rate // link.out_bytes_per_us, 1024 * rate // link.in_bytes_per_us
        self._traced_path = replace(
            step.path,
            state_chunk_bytes=2 * 4 * PIECE_ELEMENTS,
            link_moves=moves,
            state_here=self.resident,
            state_engine_bytes=self._engine_bytes(),
            on_card=link.settings.device.type != "cpu",
            host_step_moves=max(1, self.host_ns * rate // 1000) if self.host_ns else 0,
        )
        return replace(step, path=self._traced_path)

    def parts(self) -> list[Part]:
        """The state of each parameter that has a name in the model."""
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return []
        names = {id(value): name for name, value in model.named_parameters()}
        dtypes = planned_dtypes(model, self._traced_path.half)

        def as_planned(parameter: Tensor) -> Tensor:
            dtype = dtypes.get(id(parameter))
            return parameter if dtype is None else torch.empty_like(parameter, dtype=dtype, device="meta")

        layout = layout_of(optimizer, self._traced_path, as_planned, lambda value: names.get(id(value), ""))
        assert isinstance(layout, OffloadLayout)
        found = []
        for group, parameter, name, size in layout.leaving():
            if name:
                found.append(Part(NAME, name, size, self._ns(size, parameter), group))
        return found

    def _ns(self, size: int, parameter: Tensor) -> int:
        """What a step takes longer if the state of a parameter, of this size, is offloaded."""
        out, back = self.link.out_bytes_per_us, self.link.in_bytes_per_us
        if not self.host_ns:
            return 1000 * size // out + 1000 * size // back
        copied = parameter.nbytes  # which gradients have, too
        return 2000 * copied // out + 1000 * copied // back + parameter.numel() * self.host_ns // 1024

    def _engine_bytes(self) -> int:
        """What the engine takes, with as many pieces of state as may be offloaded at once."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        sizes = [value.numel() for group in groups for value in group["params"]]
        blocks = sum(_STATE_FACTOR * (1 + size // PIECE_ELEMENTS) for size in sizes)
        return replace(self.link, settings=_settings(self.link)).engine_bytes(self.hardware, blocks)

    def _resident_parameters(self) -> list[Tensor]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return [value for name, value in named if name in self.resident]

    def become(self, other: PathAttachment) -> None:
        """Spares what another one does; see `base.PartialAttachment`."""
        optimizer = self._optimizer()
        assert isinstance(other, StateOffload)
        if (self.resident, bool(self.host_ns)) == (other.resident, bool(other.host_ns)) or optimizer is None:
            return
        self.resident, self.host_ns = other.resident, other.host_ns
        try:
            keep_resident(optimizer, self._resident_parameters(), bool(self.host_ns))
        except (OSError, RuntimeError) as error:
            _LOGGER.warning("optimizer state could not be moved, the next step moves it: %s", error)

    def attach(self) -> None:
        """Sends the offloaded state.

        Raises:
            RuntimeError: the optimizer cannot have it any more.
            OSError: the file cannot be opened.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        offload = Offload(_settings(self.link))
        resident = self._resident_parameters()
        if reason := send(optimizer, offload, resident=resident, on_host=bool(self.host_ns)):
            raise RuntimeError(f"optimizer state cannot be offloaded: {reason}")

    def undo(self) -> None:
        """Brings it back. Where that fails, the optimizer stays as it is, and says so when it is stepped."""
        optimizer = self._optimizer()
        if optimizer is not None:
            try:
                take_back(optimizer)
            except (OSError, RuntimeError) as error:
                _LOGGER.warning("optimizer state cannot be brought back: %s", error)
