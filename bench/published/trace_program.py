# SPDX-License-Identifier: Apache-2.0
"""The memory of any piece of PyTorch code on a card, without the card.

`trace/static` knows the shape of a training step. Here the program is a function that does what it likes: it
makes tensors, keeps some, calls forward and backward as often as it wants, and says where a peak begins and
where it is read. It runs on fake tensors with the semantics of the target, and what it allocates goes to the
allocator simulator.

    program    reset        read  reset     read
    operation    | 0  1  2  |       | 3  4  |        two peaks: the highest allocated bytes in between,
                                                     what was alive at the reset included
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from memscale import _core
from memscale.cuda.semantics import CudaKernels, Emulation, is_backward
from memscale.hardware.target import Target
from memscale.ops import op_facts
from memscale.ops.fake_results import mode_of_fakes
from memscale.torchkit.quiet_fakes import quiet_fakes
from memscale.trace import step
from memscale.trace.recorder import GraphRecorder
from memscale.trace.static import StaticRecorder


class Meter(Protocol):
    """What a program is given: where to put its tensors, and a meter to be reset and read."""

    @property
    def device(self) -> torch.device:
        """Where the program puts its tensors."""

    def reset_peak(self) -> None:
        """Begins a peak at what is allocated now."""

    def read_peak(self) -> None:
        """Ends it; the reading is for those who run the program."""


class CudaMeter:
    """Reads the peaks of a program that runs on a real card.

    Attributes:
        readings: `torch.cuda.max_memory_allocated()`, bytes, in the order of reading.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.readings: list[int] = []

    def reset_peak(self) -> None:
        """See `Meter`."""
        torch.cuda.reset_peak_memory_stats()

    def read_peak(self) -> None:
        """See `Meter`."""
        self.readings.append(torch.cuda.max_memory_allocated())


@dataclass
class _TraceMeter:
    """Notes at which operations a traced program resets and reads."""

    graph: _core.Graph
    device: torch.device
    begin: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    def reset_peak(self) -> None:
        self.begin = self.graph.add_op("reset_peak", 0, 0)  # stands for what is alive at this moment

    def read_peak(self) -> None:
        self.spans.append((self.begin, self.graph.op_count))


@dataclass(frozen=True)
class ProgramTrace:
    """A traced program.

    Attributes:
        graph: its operations and storages.
        target: what it was traced for.
        spans: first operation, and the one after the last, of each peak that the program read.
    """

    graph: _core.Graph
    target: Target
    spans: tuple[tuple[int, int], ...]

    def peaks(self, sim: dict[str, Any] | None = None) -> list[int]:
        """Highest allocated bytes of each span, in the order of reading.

        Args:
            sim: options of the allocator, as `_core.replay` takes them; None for the target's own without a
                limit.
        """
        replay = _core.replay(self.graph, sim={"kind": _allocator(self.target)} if sim is None else sim)
        live = array("Q")
        live.frombytes(replay["live"])
        return [max(live[begin:end], default=0) for begin, end in self.spans]

    def reserved_peak_bytes(self, sim: dict[str, Any] | None = None) -> int:
        """Highest reserved bytes of the whole program; see `peaks`."""
        replay = _core.replay(self.graph, sim={"kind": _allocator(self.target)} if sim is None else sim)
        return replay["stats"]["reserved_peak_bytes"]


class _ProgramRecorder(StaticRecorder):
    """Takes a tensor that no operation made (`torch.tensor(0.0)`) for made when it is first used."""

    def resident(self, tensor: Tensor, category: int) -> int:
        """Enters a tensor at the present position, since there is no time before a program."""
        known = self.buffer_of(tensor)
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        self.graph.add_op("constant", 0, 0)
        buffer = self.graph.add_buffer(storage.nbytes(), category)
        self._watch(storage, buffer)
        return buffer

    def _note_on_card(
        self, cuda: CudaKernels, func: Any, info: op_facts.OpFacts, args: Any, outputs: Sequence[Tensor]
    ) -> None:
        """Workspaces begin when they are taken: a peak that was read before has none."""
        for size in cuda.workspaces(info.schema, args, is_backward(self.phase)):
            self.graph.add_buffer(size, _core.CATEGORY_WORKSPACE)
        super()._note_on_card(cuda, func, info, args, outputs)


def _allocator(target: Target) -> str:
    return "cuda" if target.kind == "cuda" else "host"


def trace_program(program: Callable[[Meter], object], target: Target, seed: int = 0) -> ProgramTrace:
    """Traces a program on fake tensors.

    Args:
        program: called once with a `Meter`. Whatever it puts on the meter's device is counted.
        target: the device that it is traced for.
        seed: of the random generators while it runs; random integers are drawn for real, since sizes may
            depend on them. The generators are put back.

    Raises:
        Exception: whatever the program raises on fakes; control flow that depends on computed values does.

    Example:
        >>> def program(meter):
        ...     weight = torch.randn(1024, 1024, device=meter.device, requires_grad=True)
        ...     meter.reset_peak()
        ...     (weight @ weight).sum().backward()
        ...     meter.read_peak()
        >>> trace_program(program, Target.cuda((8, 0))).peaks()[0] / 2**20
        33.25048828125
    """
    graph = _core.Graph()
    recorder = _ProgramRecorder(graph, target)
    meter = _TraceMeter(graph, torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(_seeded(seed))
        stack.enter_context(quiet_fakes())
        stack.enter_context(step.no_collection())
        stack.enter_context(_watched_backward(recorder))
        if target.kind == "cuda":
            stack.enter_context(Emulation(target).active())
        stack.enter_context(mode_of_fakes())
        stack.enter_context(recorder)
        program(meter)
        recorder.closed = recorder.paused = True
    graph.finish()
    return ProgramTrace(graph, target, tuple(meter.spans))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def _as_list(value: Any) -> list[Any]:
    if value is None or isinstance(value, Tensor):
        return [value]
    return list(value)


@contextmanager
def _watched_backward(recorder: GraphRecorder) -> Iterator[None]:
    """Lets the recorder tell the engine's own sums in every backward pass that the program starts."""
    originals = torch.autograd.backward, torch.autograd.grad

    def watched(original: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            for root in _as_list(roots):
                recorder.accumulation.watch(root)
            given = args[place] if len(args) > place else kwargs.get(name)
            recorder.accumulation.held.update(
                gradient.untyped_storage()._cdata for gradient in _as_list(given) if gradient is not None
            )
            recorder.phase = _core.PHASE_BACKWARD
            try:
                return original(roots, *args, **kwargs)
            finally:
                recorder.phase = _core.PHASE_FORWARD
                recorder.accumulation.rest()

        return run

    torch.autograd.backward = watched(originals[0], 0, "grad_tensors")
    torch.autograd.grad = watched(originals[1], 1, "grad_outputs")
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = originals
