# SPDX-License-Identifier: Apache-2.0
"""Offload of weights between their uses: forward and backward hold only the blocks that they are at.

    CPU      all weights, in a file
    card     in host memory, pinned first, or in a file: frozen weights, and beside optimizer state that
             is offloaded trained ones, too, whose pieces pass the card in the step. Without, these stay, as
             the bits of their step are those of the card

    memory   a window of two blocks, in place of all weights that are streamed; more if a module uses several
    time     two reads of each block per forward and backward, one ahead of its use; a step of the optimizer
             reads and writes what is trained, on the CPU in the file's pages

Nothing is rounded, and nothing is computed otherwise. It is the dearest technique: a plan takes it where
nothing else meets the budget, and streams no more than the budget demands.

`weights/stream.py` does it, `weights/units.py` says which weights come together.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from memscale.offload.limits import STAGING_BYTES
from memscale.optim.offload.weights import why_not_in_pieces
from memscale.techniques.base import Part
from memscale.techniques.left_out import LeftOut
from memscale.techniques.optimizer import state_offload
from memscale.techniques.optimizer.path import Block, Streamed
from memscale.techniques.optimizer.step_in_backward import takes_place
from memscale.techniques.tiles.loss_tiles import reads_weights_in_place
from memscale.torchkit import sharding
from memscale.torchkit.replicas import replicas_of
from memscale.weights.card import CHUNK_BYTES, CardBlocks, Rooms
from memscale.weights.saves import can_save
from memscale.weights.stream import opened, stream_of, window_bytes
from memscale.weights.units import UnitFound, units_of

if TYPE_CHECKING:
    from memscale.hardware.detect import Hardware
    from memscale.offload.limits import Link
    from memscale.plans.plan import Choice
    from memscale.techniques.base import PathAttachment, Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn

_LOGGER = logging.getLogger("memscale")

NAME: Final = "weight_offload"

_ELSEWHERE = "the model does not lie on the device that the plan is for"
_SHARDED = "weights are sharded by fully_shard, which brings them itself"
_REPLICATED = "DistributedDataParallel sends weights of its own accord"
_STEPPED = "weights are stepped in backward, and have to be in memory then"
_OLD = "this PyTorch does not tell which hooks on saved tensors are in force"


def find(model: nn.Module, around: Surroundings) -> Sequence[WeightOffload]:
    """The technique for a model, if it can have it."""
    if why_not(model, around) or isinstance(around.link, str):
        return ()
    units, _ = _units(model, around.link, _steppable(model, around), around.left_out)
    return (
        WeightOffload(model, units, around.link, around.hardware, around.resident.get(NAME, frozenset())),
    )


def why_not(model: nn.Module, around: Surroundings) -> str:
    """Why a model cannot have it; "" where nobody asked."""
    if isinstance(around.link, str):
        return around.link
    return _STEPPED if takes_place(model, around) else _reason(model, around.link, around)


def _steppable(model: nn.Module, around: Surroundings) -> Mapping[int, str]:
    """Which trained weights of a card may leave: those whose state does, too. As `units_of` takes them."""
    if around.optimizer is None or around.hardware.device_kind == "cpu":
        return {}
    if state_offload.NAME not in around.way or not state_offload.find(model, around):
        return {}
    return why_not_in_pieces(around.optimizer)


def _reason(model: nn.Module, link: Link, around: Surroundings) -> str:
    hardware = around.hardware
    if link.settings.device.type != hardware.device_kind:
        return _ELSEWHERE
    if replicas_of(model):
        return _REPLICATED
    if any(sharding.is_sharded(parameter) for parameter in model.parameters()):
        return _SHARDED
    if not can_save():
        return _OLD
    units, left = _units(model, link, _steppable(model, around), around.left_out)
    if not units:
        reasons = f" ({next(iter(left.values()))})" if left else ""
        return f"no block of weights has {link.settings.least_bytes} bytes or more{reasons}"
    if hardware.device_kind != "cpu":  # `_units` has no more than there is room for
        return ""
    stream = stream_of(model)  # whose files have their room already
    return link.why_no_file_room(
        sum(unit.nbytes() for unit in units if stream is None or not stream.has(unit))
    )


def _units(
    model: nn.Module, link: Link, trained: Mapping[int, str], left_out: LeftOut
) -> tuple[list[UnitFound], dict[str, str]]:
    stream = stream_of(model)
    streamed = frozenset() if stream is None else stream.streamed_ids
    card = None if link.settings.device.type == "cpu" else link.settings.device
    units, left = units_of(model, link.settings.least_bytes, streamed, card, trained)
    barred = [unit.path for unit in units if not left_out.parameters.isdisjoint(unit.names)]
    units = [unit for unit in units if unit.path not in barred]
    left |= dict.fromkeys(barred, "it has weights that are excluded by configuration")
    if card is None:
        return units, left
    rooms, fitting = _rooms_of(model, link), []
    for unit in units:
        if (stream is not None and stream.has(unit)) or rooms.reserve(unit.nbytes()) is not None:
            fitting.append(unit)
        else:
            left.setdefault(unit.path, "max_cpu_offload_gb and async_config leave no room for it")
    return fitting, left


def _rooms_of(model: nn.Module, link: Link) -> Rooms:
    """Room that is left for backing stores of a card's weights."""
    stream = stream_of(model)
    if stream is not None and isinstance(stream.blocks, CardBlocks):
        return stream.blocks.rooms.copy()
    return Rooms(*link.weights_bytes, link.settings.directory)


def with_room(
    link: Link | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Link | str:
    """A way off a card with a part of it kept for the model's weights: half of what there is at most.

    Args:
        link: where the optimizer's state has its room already.
        model: whose weights.
        optimizer: steps those that are trained; None: these stay.
    """
    if isinstance(link, str) or link.settings.device.type == "cpu":
        return link
    stream = stream_of(model)
    streamed = frozenset() if stream is None else stream.streamed_ids
    has_room = optimizer is not None and any(link.state_bytes)
    trained = why_not_in_pieces(optimizer) if optimizer is not None and has_room else {}
    units, _ = units_of(model, link.settings.least_bytes, streamed, link.settings.device, trained)
    needed, kept = sum(unit.nbytes() for unit in units), []
    given = link.settings
    for size in (given.pinned_bytes, given.host_bytes, given.file_bytes):
        part = min(needed, size // 2) if size >= 4 * STAGING_BYTES else 0
        needed -= part
        kept.append(part)
    left = replace(
        given,
        pinned_bytes=given.pinned_bytes - kept[0],
        host_bytes=given.host_bytes - kept[1],
        file_bytes=given.file_bytes - kept[2],
    )
    if kept[2]:  # what a file's bytes pass through
        kept[0 if kept[0] >= CHUNK_BYTES else 1] -= CHUNK_BYTES
    rooms = max(0, kept[0]), max(0, kept[1]), kept[2]
    return replace(link, settings=left, limit_bytes=link.limit_bytes - sum(kept), weights_bytes=rooms)


class WeightOffload:
    """Streamed weights of a model, as planner and executor attach them.

    Args:
        model: whose.
        units: that could be streamed.
        link: the way off the device.
        hardware: the device, for what a copy costs.
        resident: paths of units that stay in memory.
    """

    name = NAME
    path = ""
    reason = ""
    stays = True  # bringing all weights back for one step, and offloading them for the next, costs more
    apart_from: frozenset[str] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitFound],
        link: Link,
        hardware: Hardware,
        resident: frozenset[str] = frozenset(),
    ) -> None:
        self._model = weakref.ref(model)  # the model owns the executor, which owns this
        self.units = units
        self.link = link
        self.hardware = hardware
        self.resident = resident
        self.beneath: StandIn | None = None
        self.used = False
        self._half: frozenset[str] = frozenset()
        self._coming: list[Block] = []
        self._room_bytes = 0  # of blocks beside each other in a recompute

    @property
    def _wanted(self) -> list[UnitFound]:
        return [unit for unit in self.units if unit.path not in self.resident]

    @property
    def what(self) -> str:
        """What it does, for people."""
        count = len(self._wanted)
        if self._is_on_card:
            trained = any(value.requires_grad for unit in self._wanted for value in unit.parameters)
            whose = "weights" if trained else "frozen weights"
            rest = "trained ones pass it in a step" if trained else "weights that are trained stay there"
            return (
                f"{whose} in host memory between uses: {count} of {len(self.units)} blocks, two on "
                f"the card at a time; {rest}"
            )
        return f"weights in a file between uses: {count} of {len(self.units)} blocks, two in memory at a time"

    def traced(self, step: StepFacts) -> StepFacts:
        """The step with the weights gone, but for the window."""
        half = self._half = step.path.half
        wanted = self._wanted
        self.used = bool(wanted)
        coming = [
            Block(unit.names, tuple(owner.path for owner in unit.owners), unit.nbytes(half))
            for unit in wanted
            if self._comes(unit)
        ]
        blocks = [(block.nbytes, block.owners) for block in coming]
        self._coming = coming
        streamed = Streamed(
            names=frozenset(name for unit in wanted for name in unit.names),
            blocks=tuple(coming),
            window_bytes=window_bytes(blocks),
            inner_bytes=self._room_bytes,
            too_large=_too_large(self._the_model, coming),
            trained_bytes=sum(map(self._trained_bytes, wanted)),
        )
        rate = self.hardware.cost.bytes_of("move")
        link = self.link
        moves = 1024 * rate // link.out_bytes_per_us, 1024 * rate // link.in_bytes_per_us
        return replace(step, path=replace(step.path, streamed=streamed, link_moves=moves))

    def _comes(self, unit: UnitFound) -> bool:
        """Whether a block of it is made: on a host, modules without a forward read the file's pages."""
        if self._is_on_card:
            return bool(unit.owners)
        modules = (self._the_model.get_submodule(owner.path) for owner in unit.owners)
        return not all(map(reads_weights_in_place, modules))

    def settles(self, choices: Sequence[Choice]) -> bool:
        """Whether the last trace has room for the blocks that these choices have at once in recomputes."""
        if self._is_on_card:  # its region is as large as the window
            return True
        needed, region = 0, list[str]()
        for choice in choices:
            if not {"checkpoint", "selective"}.intersection(choice.techniques):
                continue
            region = [*region, choice.module] if choice.joined else [choice.module]
            needed = max(needed, _together(self._coming, region))
        if needed <= self._room_bytes:
            return True
        every = window_bytes([(block.nbytes, block.owners) for block in self._coming])
        self._room_bytes = every if self._room_bytes else needed  # another plan, then: it may have any
        return False

    @property
    def _the_model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def _trained_bytes(self, unit: UnitFound) -> int:
        return sum(
            (2 if name in self._half else value.element_size()) * value.numel()
            for name, value in zip(unit.names, unit.parameters, strict=True)
            if value.requires_grad
        )

    def parts(self) -> Sequence[Part]:
        """The units, and what each costs when it is streamed."""
        return [Part(NAME, unit.path, unit.nbytes(self._half), self._ns(unit)) for unit in self.units]

    def _ns(self, unit: UnitFound) -> int:
        trained = self._trained_bytes(unit)
        back = trained + (2 * unit.nbytes(self._half) if unit.owners else 0)
        link = self.link
        return 1000 * back // link.in_bytes_per_us + 1000 * trained // link.out_bytes_per_us

    def attach(self) -> None:
        """Offloads the weights.

        On a card those that stay resident leave, too, and come back behind the window: in the order that a
        plan counts with, for the allocator to split its memory alike.

        Raises:
            OSError: there is no room for their files.
            AttachError: a module does not let its forward be replaced.
        """
        try:
            wanted = self._wanted
            self._stream(self.units if wanted and self._is_on_card else wanted)
            self._open_window()
            self._bring_back([unit.path for unit in self.units if unit.path in self.resident])
        except BaseException:
            self.undo()
            raise

    def _open_window(self) -> None:
        """Has a card's window at once."""
        model = self._model()
        stream = None if model is None else stream_of(model)
        if stream is not None and isinstance(stream.blocks, CardBlocks):
            wanted = {unit.path for unit in self._wanted}
            blocks = [(unit.nbytes, unit.owners) for unit in stream.units.values() if unit.path in wanted]
            stream.blocks.open(window_bytes(blocks))

    @property
    def _is_on_card(self) -> bool:
        return self.link.settings.device.type != "cpu"

    def _stream(self, units: Sequence[UnitFound]) -> None:
        model = self._the_model
        for unit in units:
            stream = stream_of(model)
            if stream is None or not stream.has(unit):
                self._bring_back([unit.path])  # its parameters have been exchanged, or have got other data
                opened(model, self._blocks(model)).add(unit)
        if units and self._is_on_card:
            torch.cuda.empty_cache()  # what they had on the card

    def _blocks(self, model: nn.Module) -> CardBlocks | str:
        """The memory for blocks and backing stores of a new stream."""
        settings = self.link.settings
        if settings.device.type == "cpu" or stream_of(model) is not None:
            return settings.directory
        return CardBlocks(settings.device, Rooms(*self.link.weights_bytes, settings.directory))

    def become(self, other: PathAttachment) -> None:
        """Streams what another one does, and no more."""
        assert isinstance(other, WeightOffload)
        if self._is_on_card:  # what was frozen may be trained now
            self._bring_back([unit.path for unit in self.units if unit.path not in _paths(other.units)])
        self.resident, self.units = other.resident, other.units
        self._stream(self._wanted)
        self._bring_back([unit.path for unit in self.units if unit.path in self.resident])

    def undo(self) -> None:
        """Brings the weights back. Those that fail stay in their backing stores, and stay valid."""
        model = self._model()
        stream = None if model is None else stream_of(model)
        if stream is not None:
            self._bring_back(list(stream.units))

    def _bring_back(self, paths: Sequence[str]) -> None:
        model = self._model()
        stream = None if model is None else stream_of(model)
        for path in paths:
            if stream is not None and path in stream.units:
                try:
                    stream.remove(path)
                except (OSError, torch.cuda.OutOfMemoryError) as error:
                    _LOGGER.warning("weights of %r stay offloaded: %s", path, error)


def _together(blocks: Sequence[Block], modules: Iterable[str]) -> int:
    """Memory for the blocks that recomputed modules hold at once; 0 where all of them use one block.

    Before the first of several, and after the last, a trace knows what is there.
    """
    paths = tuple(f"{path}." for path in modules)
    inside = [block for block in blocks if any(f"{owner}.".startswith(paths) for owner in block.owners)]
    return window_bytes([(block.nbytes, block.owners) for block in inside]) if len(inside) > 1 else 0


def _too_large(model: nn.Module, blocks: Sequence[Block]) -> frozenset[str]:
    """Paths of modules that are not recomputed as a whole, since that would hold too much at once.

    Blocks of equal size are layers. A module that needs more than the largest two, and is not a chain, has an
    embedding or a head beside them: to save the memory of the layers is a matter of each of them.
    """
    sizes = [block.nbytes for block in blocks]
    layers = max((2 * size for size in sizes if sizes.count(size) > 1), default=0)
    around = {above for block in blocks for owner in block.owners for above in _above(owner)}
    return frozenset(
        path
        for path in around
        if 0 < layers < _together(blocks, [path]) and not isinstance(model.get_submodule(path), nn.Sequential)
    )


def _above(path: str) -> list[str]:
    """The paths of the modules around one, without the model's own."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


def _paths(units: Sequence[UnitFound]) -> frozenset[str]:
    return frozenset(unit.path for unit in units)
