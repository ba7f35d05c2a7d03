# SPDX-License-Identifier: Apache-2.0
"""One offload engine for the techniques of one plan.

    settings ──► Offload ──► opens `_core.OffloadEngine` at the first forward
                    │
                    ├── hooks()      around a forward whose saved tensors leave
                    └── hold(tensor) one tensor that a checkpoint keeps for its recompute

The engine's memory, threads and file belong to the last of those who refer to it: this object, or a graph
that was made under its hooks. So a model may be detached between forward and backward, and when the graph is
gone all tiers are empty and closed.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from memscale import _core
from memscale.config.checks import environment_allows

SYMBOLS: Final = "MEMSCALE_TORCH_SYMBOLS"
"""Variable of the environment: whether functions of PyTorch's library are called by their C++ names."""

_TABLE_BYTES = 192 << 10
_EVENT_BYTES = 40
_BLOCK_BYTES = 400
"""An engine's tables: queues and the first blocks, an event that is kept, a block more. Upper bounds; what an
engine has is `counters()["table_bytes"]`. A block's record has 224 bytes; the one of its place has 40, and
what two steps note of its put 44, in arrays that double."""


@dataclass(frozen=True)
class OffloadSettings:
    """What an engine is opened with; sizes in bytes. See `include/memscale/offload.h`.

    Attributes:
        device: whose tensors leave.
        pinned_bytes: most pinned memory, staging included; 0: none.
        host_bytes: most pageable memory.
        file_bytes: most disk space.
        directory: folder of the file; "" for the system's folder of temporary files.
        least_bytes: smaller storages stay.
        window_bytes: what may wait on the device for its copy out.
        prefetch_count: how many storages are brought back ahead of their use, at most.
        prefetch_bytes: how many bytes.
        debug: freed places are overwritten, blocks have checksums, and a saved tensor that is changed in
            place is refused as without offload, also when its copy was complete.
        trace_count: events that are kept for timelines.
        chunk_bytes: of a staging buffer, a multiple of 4096: copies to a file pass in pieces of this size.
        staging_count: staging buffers in each direction.
    """

    device: torch.device
    pinned_bytes: int = 0
    host_bytes: int = 0
    file_bytes: int = 0
    directory: str = ""
    least_bytes: int = 1 << 20
    window_bytes: int = 64 << 20
    prefetch_count: int = 8
    prefetch_bytes: int = 256 << 20
    debug: bool = False
    trace_count: int = 16384
    chunk_bytes: int = 2 << 20
    staging_count: int = 4

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers, of both directions."""
        return 2 * self.staging_count * self.chunk_bytes

    def own_bytes(self, block_count: int = 0) -> int:
        """Host memory that an engine takes beside the blocks in its tiers, at most.

        Args:
            block_count: blocks that are offloaded at once, beyond the first few hundred.
        """
        tables = _TABLE_BYTES + self.trace_count * _EVENT_BYTES + block_count * _BLOCK_BYTES
        return self.staging_bytes + tables

    def options(self) -> dict[str, int | bool]:
        """As the engine takes them."""
        values = dataclasses.asdict(self)
        device = values.pop("device")
        del values["directory"]
        values["cuda"] = device.type == "cuda"
        values["ordinal"] = device.index or 0
        return values


def why_not(device: torch.device) -> str:
    """Why nothing can be offloaded from a device; "" if it can."""
    if device.type not in ("cpu", "cuda"):
        return f"a {device.type} device has no offload"
    return ""


def uses_symbols() -> bool:
    """Whether an engine may ask PyTorch's library without Python, through functions that are not public.

    Raises:
        ConfigError: the environment says neither "auto" nor "off".
    """
    return environment_allows(SYMBOLS)


class Offload:
    """Opens the engine when it is needed, once in each process.

    Args:
        settings: what it is opened with.
        faults: fault injection for tests: the options of `_core.OffloadEngine` that begin with "fault_".
            Among them "fault_capsules": as on PyTorch before 2.10, which does not show tensors to C; and
            "fault_no_library": as on one whose library has no such functions.
    """

    def __init__(self, settings: OffloadSettings, faults: Mapping[str, int | bool] | None = None) -> None:
        self.settings = settings
        self._faults = dict(faults or {})
        self._engine: _core.OffloadEngine | None = None
        self._process = 0
        self._lock = threading.Lock()

    @property
    def engine(self) -> _core.OffloadEngine:
        """The engine of this process.

        Raises:
            OSError: the directory cannot hold the file.
            MemoryError: not even the staging buffers can be had.
            ConfigError: as `uses_symbols`.
        """
        engine = self._opened()
        if engine is None:
            with self._lock:
                engine = self._opened()
                if engine is None:
                    options = {**self.settings.options(), **self._faults}
                    if not uses_symbols():
                        options["no_library"] = True
                    directory = self.settings.directory or None
                    engine = _core.OffloadEngine(Tensor, torch.nn.Parameter, directory, options)
                    self._engine, self._process = engine, os.getpid()
        return engine

    @contextmanager
    def hooks(
        self,
        ordinals: tuple[int, ...] | None = None,
        ahead_bytes: int = 0,
        left: Callable[[Tensor, _core.Saved], object] | None = None,
    ) -> Iterator[None]:
        """A context in which saved tensors leave. When it ends without an error, their sources are gone.

        Args:
            ordinals: which of them, as in `Choice.moved`; None: all that are worth it.
            ahead_bytes: as in `Choice.ahead_bytes`.
            left: is given each tensor that leaves, and what autograd has in its place.
        """
        engine = self.engine
        engine.region(ordinals, ahead_bytes)

        def pack(tensor: Tensor) -> _core.Saved:
            saved = engine.pack(tensor)
            if saved.left and left is not None:
                left(tensor, saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(engine.pack if left is None else pack, engine.unpack):
            yield
        engine.settle()

    def hold(self, tensors: Iterable[Tensor], ahead_bytes: int = 0) -> list[Held]:
        """Holds tensors, away if it is worth it; what is left of them on the device is their caller's."""
        engine = self.engine
        engine.region(None, ahead_bytes)
        held = [Held(engine, engine.pack(tensor), tensor) for tensor in tensors]
        engine.settle()
        return held

    def counters(self) -> dict[str, int]:
        """What the engine has done so far; empty before it was opened in this process."""
        engine = self._opened()
        return {} if engine is None else engine.counters()

    def trace(self) -> list[tuple[str, str, int, int, int, int]]:
        """The latest events: (kind, tier, bytes, begin_ns, end_ns, ticket)."""
        engine = self._opened()
        return [] if engine is None else engine.trace()

    def notes(self) -> tuple[str, ...]:
        """Why a tier is not used as asked, a line each."""
        engine = self._opened()
        notes = {} if engine is None else engine.notes()
        return tuple(f"{tier}: {line}" for tier, line in notes.items() if line)

    def _opened(self) -> _core.OffloadEngine | None:
        return self._engine if self._process == os.getpid() else None  # a parent's has no threads here


class _SameAgain(torch.autograd.Function):
    """A tensor with a node and without a base, as most results of operations are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """The same memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Nobody asks: a recompute's graph is not gone through."""
        return gradient


class Held:
    """A tensor that a checkpoint holds for its recompute.

    Args:
        engine: where it is.
        saved: what the engine gave for it.
        tensor: the saved tensor; only what a forward may read of it is kept.
    """

    __slots__ = ("attributes", "engine", "is_leaf", "requires_grad", "saved")

    def __init__(self, engine: _core.OffloadEngine, saved: _core.Saved, tensor: Tensor) -> None:
        self.engine = engine
        self.saved = saved
        self.requires_grad = tensor.requires_grad
        self.is_leaf = tensor.is_leaf
        self.attributes = dict(tensor.__dict__)

    def tensor(self) -> Tensor:
        """The tensor, on the device: with the attributes that it had, and a leaf if it was one.

        Raises:
            RuntimeError: it was changed in place before its copy was complete.
            OSError: it could not be read back.
        """
        tensor: Tensor = self.engine.unpack(self.saved).detach()
        if self.requires_grad:
            tensor.requires_grad_()
            if not self.is_leaf:
                with torch.enable_grad():
                    tensor = _SameAgain.apply(tensor)  # type: ignore[no-untyped-call]
        tensor.__dict__.update(self.attributes)
        return tensor


@dataclass(frozen=True)
class Boundary:
    """What of a checkpoint's inputs leaves.

    Attributes:
        offload: the engine.
        inputs: storages among the arguments, each counted once, as in `Choice.moved`; None: all activations.
        ahead_bytes: as in `Choice.ahead_bytes`.
    """

    offload: Offload
    inputs: tuple[int, ...] | None = None
    ahead_bytes: int = 0

    def among(self, leaves: Sequence[Any]) -> list[int]:
        """Positions of the arguments that leave."""
        storages: dict[int, int] = {}  # identity → number
        found = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                continue
            number = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))
            if number in self.inputs if self.inputs is not None else leaf.grad_fn is not None:
                found.append(position)
        return found
