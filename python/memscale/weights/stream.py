# SPDX-License-Identifier: Apache-2.0
"""Streamed weights of a model: resident while they are used, in a file or host memory otherwise.

    between   `parameter.data` is a tensor over the backing store, which any code may read and write.
              Optimizers step it there
    forward   a module that has such weights runs: their block is read, and `parameter.data` is in it until
              the module returns. The next block is read meanwhile
    backward  autograd saves where a weight lies (`saves`), and its block is read again when it asks. A
              checkpoint's recompute is a forward like the first, with the same block

Nothing is computed otherwise. A block is used again for other weights only if nobody else holds its memory,
so a view of a weight keeps the weight in memory.

Blocks are kept within a forward and within a backward, and not between the two or around an optimizer's step:
what is written to a weight then, in whatever way, is in the backing store, and the next block reads it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memscale.torchkit import plain_copies
from memscale.torchkit.forward_slot import ForwardSlot, StandIn, watch_of
from memscale.torchkit.graph_task import in_backward
from memscale.weights.blocks import HostBlocks
from memscale.weights.placement import device_of_use, known_streams, streams
from memscale.weights.saves import SavedWeight, hooks
from memscale.weights.stepping import Steps
from memscale.weights.unit import Blocks, Unit, Weight, view_of
from memscale.weights.units import UnitFound
from memscale.weights.window import Order, Window

_LOGGER = logging.getLogger("memscale")


class Stream:
    """The streamed weights of one model.

    Args:
        model: whose.
        blocks: their memory while they are used, and their backing stores.

    Attributes:
        places: address of a storage → unit, and the weight that it backs; None: the unit's block.
        steps: watches optimizers while anything is streamed.
    """

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self._model = weakref.ref(model)
        self.blocks = blocks
        self.units: dict[str, Unit] = {}
        self.places: dict[int, tuple[Unit, Weight | None]] = {}
        self.window = Window(blocks, self._came, self._went)
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._forwards = 0  # of the model, that run now
        self._backward = -1
        self._root: ForwardSlot | None = None
        self._slots: dict[str, ForwardSlot] = {}  # by path of the module
        self._copied: dict[str, list[weakref.ref[nn.Module]]] = {}  # modules whose copies are put right
        self.steps: Any = None
        self._said: set[Unit] = set()

    # ---- units -------------------------------------------------------------------------------------

    def add(self, found: UnitFound) -> None:
        """Streams a unit.

        Raises:
            OSError: there is no room for its file.
            AttachError: a module does not let its forward be replaced.
        """
        model = self._model()
        assert model is not None
        try:
            owners = tuple(owner.path for owner in found.owners)
            unit = Unit(found.path, list(found.parameters), self.blocks, owners)
            self._begin(model)  # the model may have weights itself, whose use is within its forward
            for owner in found.owners:
                used = {id(value) for value in owner.parameters}
                weights = [weight for weight in unit.weights if id(weight.parameter) in used]
                self._uses(owner.path).append(_Use(unit, weights, owner.name))
        except BaseException:
            self._forget(found.path)
            raise
        unit.leave_memory()
        self._see_copies(unit)
        self.units[unit.path] = unit
        self.window.order = Order()  # with this one between others, what followed is no guide
        for weight in unit.weights:
            self.places[weight.backing.untyped_storage()._cdata] = unit, weight
        self._measure()

    def remove(self, path: str) -> None:
        """Makes the weights of a unit ordinary ones.

        Raises:
            OSError: the file cannot be read. The weights that are not back stay valid in the backing store.
        """
        unit = self.units[path]
        with self.lock:
            self.blocks.end(unit)
            unit.settle()
            unit.return_to_memory()
            self.window.drop(unit)
        del self.units[path]
        self.blocks.release_backing(unit.backing)
        for module in self._copied.pop(path, []):
            if (alive := module()) is not None:
                plain_copies.end(alive, _on_their_device)
        for weight in unit.weights:
            self.places.pop(weight.backing.untyped_storage()._cdata, None)
        self._forget(path)
        self._measure()

    def _see_copies(self, unit: Unit) -> None:
        """Makes copies of modules get their weights on the device that uses them, not on the host."""
        model = self._model()
        if model is None or self.blocks.device.type == "cpu":
            return
        mine = {id(weight.parameter) for weight in unit.weights}
        for module in model.modules():
            if any(id(value) in mine for value in module._parameters.values()):
                plain_copies.begin(module, _on_their_device)
                self._copied.setdefault(unit.path, []).append(weakref.ref(module))

    def _uses(self, path: str) -> list[_Use]:
        """What a module uses, by the stand-in for its forward, which is put there where there is none."""
        model = self._model()
        assert model is not None
        module = model.get_submodule(path)
        slot = self._slots.get(path)
        if slot is not None and not slot.is_of(module):  # another module is there now
            slot.remove()
            slot = None
        if slot is None:
            slot = ForwardSlot(module, path, None if path else watch_of(model))
            slot.put(_UsingForward(module, slot.present, self))
            self._slots[path] = slot
        return _uses_of(slot)

    def _forget(self, path: str) -> None:
        """Takes the uses of a unit off, and what is left when nothing is streamed."""
        for place, slot in list(self._slots.items()):
            uses = _uses_of(slot)
            uses[:] = [use for use in uses if use.unit.path != path]
            if not uses:
                slot.remove()
                del self._slots[place]
        if not self.units:
            self._end()

    def _begin(self, model: nn.Module) -> None:
        if self._root is None:
            root = ForwardSlot(model, "", watch_of(model))
            root.put(_RootForward(model, root.present, self))
            self._root = root
            self.steps = Steps(self)

    def _end(self) -> None:
        if self._root is not None:
            self._root.remove()
            self._root = None
            self.steps.close()
        self.window.close()
        model = self._model()
        if model is not None:
            streams.pop(model, None)

    def _measure(self) -> None:
        self.window.most_bytes = window_bytes(
            (unit.nbytes, unit.owners) for unit in self.units.values() if not unit.is_read_in_place
        )

    def _came(self, unit: Unit) -> None:
        assert unit.block is not None
        self.places[unit.block.untyped_storage()._cdata] = unit, None

    def _went(self, unit: Unit) -> None:
        assert unit.block is not None
        self.places.pop(unit.block.untyped_storage()._cdata, None)

    def has(self, found: UnitFound) -> bool:
        """Whether a unit is streamed as it is now, or its weights stay."""
        unit = self.units.get(found.path)
        if unit is None or unit.stays:
            return unit is not None
        streamed = {id(weight.parameter) for weight in unit.weights if weight.is_streamed}
        return streamed == set(map(id, found.parameters))

    @property
    def streamed_ids(self) -> frozenset[int]:
        """Ids of the parameters that are streamed, but for those that stay."""
        return frozenset(
            id(weight.parameter)
            for unit in self.units.values()
            for weight in unit.weights
            if weight.is_streamed and not unit.stays
        )

    # ---- passes ------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether forwards are to have their weights: not in a trace, nor in a forked process."""
        return os.getpid() == self._process and not _is_transformed()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model or a backward runs: weights come to memory in these only."""
        return self._forwards > 0 or in_backward()

    def begin_forward(self) -> None:
        """The model's forward begins."""
        with self.lock, _no_inference():
            if self._forwards == 0:
                self.window.order.begin()
                self._clear(is_final=True)
                self.let_pages_go()
            self._forwards += 1

    def end_forward(self) -> None:
        """It is over."""
        with self.lock, _no_inference():
            self._forwards -= 1
            if self._forwards == 0:
                self._clear(is_final=False)

    def _clear(self, is_final: bool) -> None:
        """Lets blocks go. Says once of a unit that it could not."""
        for unit in self.window.clear(is_final):
            if unit not in self._said:
                self._said.add(unit)
                _LOGGER.warning(
                    "weights of %r stay in memory: the program holds one of them, or a view of one",
                    unit.path,
                )

    def _end_backward(self) -> None:
        with self.lock, _no_inference():
            self._backward = -1
            if self._forwards == 0:
                self._clear(is_final=False)

    def _in_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def borrow(self, parameter: Tensor) -> None:
        """See `borrow`."""
        borrow(parameter)

    def let_pages_go(self) -> None:
        """Takes the pages of files out of this process."""
        for unit in self.units.values():
            unit.backing.let_pages_go()

    # ---- uses --------------------------------------------------------------------------------------

    def begin_use(self, unit: Unit, weights: list[Weight]) -> None:
        """A module is about to use weights.

        Raises:
            OSError: they could not be read.
        """
        with self.lock, _no_inference():
            self._in_backward()
            self.window.fetch(unit)
            unit.begin_use(weights)

    def end_use(self, unit: Unit, weights: list[Weight]) -> None:
        """It has used them."""
        with self.lock, _no_inference():
            unit.end_use(weights)

    def saved(self, saved: SavedWeight) -> Tensor:
        """The tensor that autograd has saved.

        Raises:
            RuntimeError: the weight has been written to since.
            OSError: it could not be read.
        """
        saved.check()
        weight, unit = saved.weight, saved.unit
        with self.lock, _no_inference():
            if not weight.is_streamed:
                now = weight.parameter
                begin = int(now.storage_offset()) * now.element_size()
                return view_of(now.detach(), saved.dtype, begin + saved.offset, saved.shape, saved.stride)
            if unit.is_read_in_place or os.getpid() != self._process:
                return view_of(weight.backing, saved.dtype, saved.offset, saved.shape, saved.stride)
            self._in_backward()
            self.window.fetch(unit)
            assert unit.block is not None
            begin = weight.place.offset
            return view_of(unit.block, saved.dtype, begin + saved.offset, saved.shape, saved.stride)


def stream_of(model: nn.Module) -> Stream | None:
    """The stream of a model that has one."""
    found = streams.get(model)
    return found if isinstance(found, Stream) else None


def _on_their_device(module: nn.Module, attributes: dict[str, Any]) -> None:
    """What a copy of a module gets: weights where they are used."""
    own = attributes.get("_parameters")
    if isinstance(own, dict):
        attributes["_parameters"] = {name: _there(value) for name, value in own.items()}


def _there(value: nn.Parameter | None) -> nn.Parameter | None:
    if value is None or device_of_use(value) == value.device:
        return value
    return nn.Parameter(value.detach().to(device_of_use(value)), value.requires_grad)


def opened(model: nn.Module, blocks: Blocks | str) -> Stream:
    """The stream of a model: the one that it has, or a new one.

    Args:
        model: whose.
        blocks: of a new one; a folder: in memory of the host, with backing stores in files there.
    """
    stream = stream_of(model)
    if stream is None:
        stream = streams[model] = Stream(model, HostBlocks(blocks) if isinstance(blocks, str) else blocks)
    return stream


def window_bytes(blocks: Iterable[tuple[int, Iterable[str]]]) -> int:
    """Memory for the blocks that a module uses together, and the next one.

    Args:
        blocks: bytes of each, and the paths of the modules that use it.
    """
    by_size = sorted(((size, set(paths)) for size, paths in blocks), key=lambda block: -block[0])
    together: dict[str, int] = {}
    for size, paths in by_size:
        for path in paths:
            together[path] = together.get(path, 0) + size
    return max(
        (
            used + next((size for size, paths in by_size if path not in paths), 0)
            for path, used in together.items()
        ),
        default=0,
    )


@dataclass
class _Use:
    """What a module uses of a unit.

    Attributes:
        unit: that it is.
        weights: of the unit.
        name: of one that is the module's own, or in a module below it.
    """

    unit: Unit
    weights: list[Weight]
    name: str

    def is_of(self, module: nn.Module) -> bool:
        """Whether the module has its weights: a trace, and `functional_call`, put others in their place."""
        path, _, name = self.name.rpartition(".")
        try:
            value = module.get_submodule(path)._parameters.get(name)
        except AttributeError:
            return False
        return any(weight.parameter is value for weight in self.weights)


class _RootForward(StandIn):
    """Stands in for the model's forward: a pass begins with it."""

    calls_through = True

    def __init__(self, module: nn.Module, original: Callable[..., Any], stream: Stream) -> None:
        super().__init__(module, original)
        self.stream = stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward."""
        if torch.compiler.is_compiling():
            return self.run_original(*args, **kwargs)
        stream = self.stream
        if self.passive or not stream.serves:
            return self.original(*args, **kwargs)
        stream.begin_forward()
        try:
            return self.original(*args, **kwargs)
        finally:
            stream.end_forward()


class _UsingForward(StandIn):
    """Stands in for the forward of a module that has streamed weights."""

    calls_through = True

    def __init__(self, module: nn.Module, original: Callable[..., Any], stream: Stream) -> None:
        super().__init__(module, original)
        self.stream = stream
        self.uses: list[_Use] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with its weights in memory."""
        if torch.compiler.is_compiling():
            return self.run_original(*args, **kwargs)
        stream = self.stream
        if self.passive or not stream.serves:
            return self.original(*args, **kwargs)
        uses = [use for use in self.uses if use.is_of(self.module)]
        with ExitStack() as stack:
            if uses and (looking := hooks(stream)) is not None:
                stack.enter_context(looking)
            if uses and stream.blocks.is_apart and not stream.is_running:
                stream.begin_forward()  # a part of the model, which cannot read the backing store
                stack.callback(stream.end_forward)
            for use in uses if stream.is_running else ():
                stream.begin_use(use.unit, use.weights)
                stack.callback(stream.end_use, use.unit, use.weights)
            return self.original(*args, **kwargs)


def _uses_of(slot: ForwardSlot) -> list[_Use]:
    assert isinstance(slot.stand_in, _UsingForward)
    return slot.stand_in.uses


def _is_transformed() -> bool:
    """Whether a forward runs for a trace, on fakes, or under functorch."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        getattr(mode, "records_a_step", False) or getattr(mode, "_mode_key", None) is not None
        for mode in _get_current_dispatch_mode_stack()
    )


def _no_inference() -> Any:
    """What is made for weights inside of inference mode has to be of use outside."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def apart(parameter: Tensor) -> tuple[Stream, Unit, Weight] | None:
    """Stream, unit and weight of a parameter whose data are not on the device that uses it; else None."""
    if not streams or parameter.device.type != "cpu" or device_of_use(parameter).type == "cpu":
        return None
    address = parameter.untyped_storage()._cdata
    for stream in known_streams():
        if not isinstance(stream, Stream):
            continue
        unit, weight = stream.places.get(address, (None, None))
        if unit is not None and weight is not None and weight.parameter is parameter:
            return stream, unit, weight
    return None


def borrow(parameter: Tensor) -> None:
    """Brings an offloaded weight to its card until a step is over. Any other tensor stays as it is.

    Raises:
        torch.OutOfMemoryError: the card has no room for it.
    """
    found = apart(parameter)
    if found is not None:
        stream, unit, weight = found
        stream.steps.borrow(unit, weight)
