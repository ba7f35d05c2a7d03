# SPDX-License-Identifier: Apache-2.0
"""Finds saved tensors whose memory others still hold in backward: an output, or what a hook has kept.

    plain       tanh's node and the caller have the same memory: what is written to it past autograd, by
                `output.data.clamp_(…)` or a view of NumPy, tanh's backward reads
    recompute   makes the values that tanh has made

So a save whose memory is alive when its module's forward is over, and that the forward does not only read,
leaves 64 bits of what lies there. They are compared, as long as the memory lives, when the model's forward is
over and when backward asks for the save. Memory that is nobody else's cannot have changed. (On a card the
former comparison would wait for it, and is left out. Writes that a trace sees keep a module from being
recomputed in the first place: `GraphRecorder`.)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale._core import Saved
from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import card_check
from memscale.techniques.checkpoint.recompute_check import Fingerprint, RecomputeCheck, fingerprint
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.torch_settings import has_modes, without_modes

CAUSE: Final = (
    "a tensor that its forward has saved, and that others have too, such as its output, has changed since "
    "(in place by `.data`, or through a view of NumPy)"
)


class Memory:
    """Where a saved tensor lay, for as long as anybody has that memory.

    Attributes:
        held: its fingerprint when the module's forward was over.
        is_changed: it has been found to hold something else since.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_is_as_saved",
        "_offset",
        "_shape",
        "_storage",
        "_stride",
        "held",
        "is_changed",
    )

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        self.held: Fingerprint = None
        self.is_changed = self._is_as_saved = False

    @classmethod
    def of(cls, tensor: Tensor) -> Memory | None:
        """None: of what has no memory that can be looked at by itself, or is not what lies there."""
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return cls(tensor) if plain and not (tensor.is_conj() or tensor.is_neg()) else None

    @property
    def address(self) -> int | None:
        """Of its storage; None: it is gone."""
        storage = self._storage()
        return None if storage is None else storage._cdata

    def note(self, saved: Fingerprint) -> None:
        """The forward is over.

        Args:
            saved: the fingerprint of the whole save, which is compared with its recompute anyway; or None.
        """
        present = self._present()
        self.held = None if present is None else fingerprint(present, sampled=False)
        self._is_as_saved = isinstance(self.held, int) and self.held == saved

    def look(self) -> None:
        """Whether it holds what it held."""
        if isinstance(self.held, int) and (present := self._present()) is not None:
            self.is_changed = fingerprint(present, sampled=False) != self.held

    def has_changed(self, failed: Callable[[], RecomputeError]) -> bool:
        """Whether it is known not to hold any more what it held.

        Args:
            failed: as of `differs`.
        """
        if self.is_changed or self.held is None or (present := self._present()) is None:
            return self.is_changed
        if isinstance(self.held, int):
            return fingerprint(present, sampled=False) != self.held
        return card_check.compare(self.held, present, failed)

    def differs(self, made: Tensor, failed: Callable[[], RecomputeError]) -> bool:
        """Whether it is known to hold something else than a recompute has made.

        Args:
            made: by the recompute.
            failed: makes the error where that is known at the end of backward only, as on a card.
        """
        if self.is_changed or self.held is None:
            return self.is_changed
        present = self._present()
        if isinstance(self.held, int):
            of_present = self.held if present is None else fingerprint(present, sampled=False)
            if of_present != self.held or self._is_as_saved:
                return of_present != self.held
            return fingerprint(made, sampled=False) != self.held
        looked = [made] if present is None else [made, present]
        return any([card_check.compare(self.held, tensor, failed) for tensor in looked])

    def _present(self) -> Tensor | None:
        """What lies there now; None: it is gone, or given back."""
        storage = self._storage()
        if storage is None or not storage.nbytes():
            return None
        with torch.no_grad(), without_modes() if has_modes() else nullcontext():
            empty = torch.empty(0, dtype=self._dtype, device=storage.device)
            return empty.set_(storage, self._offset, self._shape, self._stride)


class _Waiting(threading.local):
    """Memory of saves that is to be looked at when the model's forward of this thread is over."""

    def __init__(self) -> None:
        self.memory: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.left: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


_waiting = _Waiting()


def wait(memory: Memory) -> None:
    """It is looked at when the model's forward is over."""
    _waiting.memory.add(memory)


def look() -> None:
    """A model's forward is over."""
    waiting, _waiting.memory = _waiting.memory, weakref.WeakSet()
    for memory in waiting:
        memory.look()


def known_memory(values: Iterable[Any]) -> set[int]:
    """Addresses of the storages of tensors that a forward reads: a recompute reads them, too."""
    return {
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and type(value).__name__ != "FakeTensor"
    }


def error_of(path: str, index: int, other: str = "recompute") -> RecomputeError:
    """What to raise for a save whose memory holds something else than what backward would get."""
    tensor = f"saved tensor {index}"
    what = f"{tensor} of module {path!r} was changed between forward and backward, and its {other} was not"
    return RecomputeError(what, path, tensor, CAUSE)


class Left:
    """Saves of one forward that leave the device while others may go on having their memory.

    They are compared when they are saved once more, when this forward and the model's are over, and in
    backward. A write to memory that is gone by all of these is not seen.

    Buffers of the module, such as running statistics, are updated when they are saved already; backward does
    not read those.

    Args:
        module: the module.
        path: its name.
        check: of the module; it notes failures.
    """

    def __init__(self, module: nn.Module, path: str, check: RecomputeCheck) -> None:
        self._module, self._path, self._check = module, path, check
        self._buffers: set[int] | None = None
        self._memory: list[Memory] = []

    def add(self, tensor: Tensor, saved: Saved) -> None:
        """The next of them."""
        memory = Memory.of(tensor)
        if memory is None or memory.address is None or self._is_buffer(tensor, memory.address):
            return
        earlier = _waiting.left.get(memory.address)
        if earlier is not None:
            earlier.look()
        memory.note(None)
        _waiting.left[memory.address] = memory
        saved.guard(functools.partial(_require_same, self._path, self._check, memory, len(self._memory)))
        self._memory.append(memory)

    def _is_buffer(self, tensor: Tensor, address: int) -> bool:
        if tensor.requires_grad:
            return False
        if self._buffers is None:
            self._buffers = known_memory(self._module.buffers())
        return address in self._buffers

    def settle(self) -> None:
        """The forward is over: memory that is gone by now cannot change."""
        for memory in self._memory:
            memory.look()
            if memory.address is not None:
                wait(memory)
        self._memory = []


def _require_same(path: str, check: RecomputeCheck, memory: Memory, index: int) -> None:
    def failed() -> RecomputeError:
        return check.fail(error_of(path, index, "copy"))

    if memory.has_changed(failed):
        raise failed()


never_compiled(Memory, Left, _require_same, wait, look, known_memory, error_of)
