# SPDX-License-Identifier: Apache-2.0
"""The common part of the static and the empirical trace: module calls, the order of a step, the result.

`trace/static` runs the step on fake tensors, `trace/empirical` runs it for real and discards it. Both go
through `run_step` here, so that a graph does not depend on how it was made.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale import _core
from memscale.errors import ProfileError
from memscale.ops import op_facts
from memscale.state import model_state
from memscale.state.attribute_tables import has_foreign_hooks
from memscale.state.weight_images import GradientImages, WeightImages
from memscale.techniques.checkpoint.copied_tensors import bytes_of_copies
from memscale.techniques.checkpoint.given_arguments import may_be_given_again
from memscale.techniques.left_out import NOTHING_LEFT_OUT
from memscale.techniques.optimizer.path import AS_IT_IS, OptimizerPath
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit import sharding
from memscale.torchkit.forward_slot import StandIn
from memscale.torchkit.leaves import storage_bytes, tensors_of
from memscale.torchkit.output_use import OutputUse
from memscale.torchkit.scripted import script_calls
from memscale.trace.optimizer import streamed_weights
from memscale.trace.output_use import held_gradients, note_use
from memscale.trace.recorder import GraphRecorder
from memscale.trace.step_loss import note_reached, step_loss
from memscale.uninterrupted import uninterrupted

_RNG_STATE_BYTES = 5056
"""Size of the CPU generator's state, which a checkpoint of a module with random operations keeps."""


BufferPath = tuple[str, str]
"""A registered buffer: path of its module, and its name there."""


@dataclass
class Trace:
    """A finished graph and what Python knows beside it.

    Attributes:
        graph: the plain step.
        modules: graph module id → (path, class name).
        written_buffers: path → buffers in and below that module that its forward changes.
        writes_outside: what else was there before that the model's forward writes to, in words; "": nothing.
        foreign_reads: path → tensors from outside model and batch that are read in and below that module.
        random: paths of modules inside which random numbers are drawn.
        changes: Python attributes that the forward changes.
        method: "static" or "empirical".
        output_bytes: storages of the model's output and of the loss, which the trace assumes to live until
            the step is over.
        idle_state_bytes: optimizer state that is counted for parameters that get no gradient in this step.
        notes: remarks for the log, such as why the static trace was not possible.
        optimizer_switches: see `fake_optimizer.free_switches`.
        has_drawn: single random numbers were drawn, which may decide what the step does.
        use: what becomes of the outputs; None with several forwards.
        loss_ops: operations of the loss and its backward, down to the outputs: the first, and the first
            after them; None: there is no loss.
        drops_output: the loop holds none of the outputs as backward begins.
        another_use: assumed nowhere yet, and it leaves much of the graph unused.
        larger: with another use of the outputs, if the step takes more with that where nothing is planned.
        path: what optimizer-side techniques change, as the graph has it.
        rerun_bytes: held all the time once a module runs a second time; see `CudaKernels.rerun_bytes`.
        reads_lengths: of caches that were filled already; see `empty_caches.Seen`.
        unrepeatable: paths of modules that a card may give other bits each time: see `OpFacts.unrepeatable`.
        gradients: False: of a forward without them, see `StepFacts`.
        kept: bytes that the model holds until its next forward has replaced them: (call after which, bytes).
    """

    graph: _core.Graph
    modules: list[tuple[str, str]]
    written_buffers: dict[str, list[BufferPath]]
    foreign_reads: dict[str, list[weakref.ref[Tensor]]]
    random: frozenset[str]
    changes: model_state.Changes
    method: str
    output_bytes: int = 0
    idle_state_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    optimizer_switches: tuple[str, ...] = ()
    has_drawn: bool = False
    use: OutputUse | None = None
    another_use: OutputUse | None = None
    loss_ops: tuple[int, int] | None = None
    drops_output: bool = False
    larger: Trace | None = None
    path: OptimizerPath = AS_IT_IS
    rerun_bytes: int = 0
    reads_lengths: bool = False
    unrepeatable: frozenset[str] = frozenset()
    gradients: bool = True
    writes_outside: str = ""
    kept: tuple[tuple[int, int], ...] = ()


class CallRecorder:
    """Records calls of every module's forward, at the very place where a technique would attach.

    Attributes:
        modules: by their number in the graph: path and module.
        buffer_owners: by their number in the graph: where registered buffers are.
        path: what optimizer-side techniques change.
        gradients: False: of a forward without them.
        exchanged: after `attached`: paths of modules whose parameters were exchanged, or their gradients in
            forward, see `weight_images`.
    """

    def __init__(self, model: nn.Module, recorder: GraphRecorder) -> None:
        self.model = model
        self.recorder = recorder
        self.modules: list[tuple[str, nn.Module]] = []
        self.buffer_owners: dict[int, list[BufferPath]] = {}
        self.path = AS_IT_IS
        self.left_out = NOTHING_LEFT_OUT
        self.gradients = True
        self._inside_excluded = 0  # calls of excluded modules that are under way
        self.exchanged: set[str] = set()
        self._below: list[list[nn.Module]] = []  # by number
        self._thread = threading.get_ident()

    def declare_residents(self, batch: Any, step: StepFacts) -> None:
        """Enters what is in memory before the step: parameters, buffers, the batch, carried outputs."""
        recorder = self.recorder
        self.path, self.left_out, self.gradients = step.path, step.left_out, step.gradients
        streamed_weights.declare(recorder, step.path, self.model.named_parameters())
        for size in filter(None, (step.path.engine_bytes, step.path.state_engine_bytes)):
            buffer = recorder.graph.add_resident(size, _core.CATEGORY_WORKSPACE)
            recorder.graph.note_buffer(buffer, -1, "an offload engine: staging buffers, tables")
        if recorder.cuda is not None:
            self._declare_as_moved(self.model)
        for name, parameter in self.model.named_parameters():
            buffer = recorder.resident(parameter, _core.CATEGORY_PARAMETER)
            recorder.parameters.add(buffer)
            recorder.label(buffer, parameter, name)
            recorder.names[id(parameter)] = name
        for path, module in self.model.named_modules():
            for name, value in module._buffers.items():
                if value is not None:
                    buffer = recorder.resident(value, _core.CATEGORY_BUFFER)
                    if buffer not in recorder.parameters:
                        recorder.label(buffer, value, f"{path}.{name}".lstrip("."))
                    self.buffer_owners.setdefault(buffer, []).append((path, name))
        recorder.module_buffers.update(self.buffer_owners)
        for leaf in tensors_of(batch):
            recorder.label(recorder.resident(leaf, _core.CATEGORY_INPUT), leaf, "")
            for _ in range(step.forwards - 1):  # each forward has a batch of its own
                recorder.graph.add_resident(storage_bytes([leaf]), _core.CATEGORY_INPUT)
        for call, size in step.kept:
            buffer = recorder.graph.add_resident(size, _core.CATEGORY_ACTIVATION)
            recorder.graph.note_buffer(buffer, -1, "kept from the step before")
            recorder.replaced[call] = buffer
        for size in step.carried_bytes:
            recorder.carried.append(recorder.graph.add_resident(size, _core.CATEGORY_ACTIVATION))

    def _declare_as_moved(self, module: nn.Module) -> None:
        """Enters parameters and buffers in the order in which `module.to(device)` allocates them."""
        for child in module.children():
            self._declare_as_moved(child)
        for parameter in module._parameters.values():
            if parameter is not None:
                self.recorder.resident(parameter, _core.CATEGORY_PARAMETER)
        for buffer in module._buffers.values():
            if buffer is not None:
                self.recorder.resident(buffer, _core.CATEGORY_BUFFER)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Records calls inside the block."""
        structure = model_state.structure_of(self.model)
        weights = WeightImages(self.model)
        known: dict[str, int] = {}
        undo: list[Callable[[], None]] = []
        try:
            for path, module in self.model.named_modules():
                parent = model_state.parent_path(path, known)
                flags = _core.MODULE_ROOT if module is self.model else 0
                flags |= _core.MODULE_CHAIN if _is_chain(module) else 0
                flags |= self.left_out.flags(path)
                number = self.recorder.graph.add_module(
                    path, type(module).__name__, parent, flags, structure.get(module, 0)
                )
                known[path] = number
                if parent >= 0 and _has_hooks(module):
                    self.recorder.graph.mark_module(parent, _core.MODULE_HOOKED)
                self.modules.append((path, module))
                self._below.append([part for part in module.modules() if part is not module])
                self._hook(module, number, undo)
            self.recorder.modules_are_known(known)
            with script_calls(self._note_script):
                yield
            self.exchanged |= weights.exchanged()
        finally:
            with uninterrupted():
                for restore in reversed(undo):
                    restore()

    def run(self, step: StepFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the model, which is a call of the root whether or not the step goes through it."""
        gradients = GradientImages(self.model)
        try:
            if step.forward is not None:
                step = replace(step, forward=self._recorded(step.forward, number=0))
            return step.run(self.model, args, kwargs)
        finally:
            self.exchanged |= gradients.exchanged()

    def _hook(self, module: nn.Module, number: int, undo: list[Callable[[], None]]) -> None:
        own = module.__dict__.get("forward")
        recorded = self._recorded(module.forward, number)
        if own is None:  # noted first, so that Ctrl-C finds it
            undo.append(lambda: module.__dict__.pop("forward", None))
        else:
            undo.append(lambda: module.__dict__.__setitem__("forward", own))
        try:
            module.forward = recorded
        except (AttributeError, RuntimeError, TypeError):  # a scripted module refuses
            undo.pop()
            self.recorder.graph.mark_module(number, _core.MODULE_NO_FORWARD)

    def _recorded(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        recorder = self.recorder
        is_excluded = self.modules[number][0] in self.left_out.excluded

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if recorder.paused:
                return forward(*args, **kwargs)
            if threading.get_ident() != self._thread and recorder.phase == _core.PHASE_FORWARD:
                if number == 0 and isinstance(forward, StandIn):  # another thread's step: it waits there
                    return forward(*args, **kwargs)
                raise ProfileError(
                    f"module {self.modules[number][0]!r} runs in a thread that the forward has started, and "
                    "operations there are not traced"
                )
            is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
            if is_transformed:  # no technique works in there
                recorder.graph.mark_module(number, _core.MODULE_NO_FORWARD)
            if self._inside_excluded and not is_excluded:  # shared with others, which may recompute it
                recorder.graph.mark_module(number, _core.MODULE_LEFT_OUT)
            around = recorder.open_modules[-1:]
            self._look_for_hooks(number, around)
            call = recorder.enter(number)
            self._inside_excluded += is_excluded
            try:
                self._note_inputs(call, number, args, kwargs)
                output = forward(*args, **kwargs)
                return output if is_transformed else _count_returned(recorder, output)
            finally:
                self._inside_excluded -= is_excluded
                recorder.leave(call)
                self._look_for_hooks(number, around, below=False)

        return recorded

    def _note_script(self) -> None:
        """A recompute would be one more call of the script, whose bits follow from their number."""
        if self.recorder.open_modules and not self.recorder.paused:
            self.recorder.graph.mark_module(self.recorder.open_modules[-1], _core.MODULE_SCRIPTED)

    def _look_for_hooks(self, number: int, around: Sequence[int], below: bool = True) -> None:
        """Marks what would fire hooks again in a recompute, as they are now: many live for one forward.

        A hook that removes itself when it fires has been seen where the module around it began.

        Args:
            number: of a module whose forward begins or ends.
            around: the module that has called it, if any.
            below: what is in it counts, too.
        """
        if around and _has_hooks(self.modules[number][1]):
            self.recorder.graph.mark_module(around[0], _core.MODULE_HOOKED)
        if below and any(map(_has_hooks, self._below[number])):
            self.recorder.graph.mark_module(number, _core.MODULE_HOOKED)

    def _note_inputs(self, call: int, number: int, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                buffer = self.recorder.buffer_of(leaf)
                if buffer is not None:
                    self.recorder.graph.add_input(call, buffer)
            elif not may_be_given_again(leaf):
                self.recorder.graph.mark_module(number, _core.MODULE_NOT_TENSORS)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks of others, or is sharded."""
    return sharding.is_unit(module) or has_foreign_hooks(module)


def _is_chain(module: nn.Module) -> bool:
    """Whether its forward is known to call its children one after another, which may then run as one."""
    own = module.__dict__.get("forward")
    if isinstance(own, StandIn) and own.calls_through:  # a chain attaches beneath
        below = own.lowest.original
        own = None if getattr(below, "__func__", None) is nn.Sequential.forward else own
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and own is None
        and not any(map(_has_hooks, module.children()))
    )


Backward = Callable[[Tensor], list[Tensor | None]]
"""Runs backward from a loss and returns the gradients of some parameters."""


def _count_returned(recorder: GraphRecorder, output: Any) -> Any:
    """An output, with tensors counted that nothing has made or read before, such as those of a cache."""
    for leaf in tensors_of(output) if recorder.learn_inputs else ():
        recorder.resident(leaf, _core.CATEGORY_INPUT)
    return output


def run_step(
    recorder: GraphRecorder,
    forward: Callable[[], Any],
    hooks: tuple[Callable[[Tensor], object], Callable[[Any], Tensor]],
    backward: Backward,
    parameters: Sequence[nn.Parameter],
    step: StepFacts,
) -> list[Tensor | None]:
    """Forward, loss and backward under the recorder; with several forwards, backward of their sum.

    Output and loss live until the step is over, as a loop's variables do: the recorder holds them. Of a loop
    that `drops_output` the loss alone.
    `parameters` are those whose gradients `backward` returns, in order. Without gradients: forward alone.
    """
    at: list[int] = []
    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            with streamed_weights.in_use(recorder, step.path):
                output = forward() if step.forwards == 1 else [forward() for _ in range(step.forwards)]
            for carried in (*recorder.carried, *recorder.replaced.values()):
                recorder.graph.end_buffer(carried)
            if not step.gradients:
                recorder.held, recorder.output_bytes = output, storage_bytes(tensors_of(output))
                recorder.forward_is_over()
                return []
            begin = recorder.graph.op_count
            note_reached(output, recorder.graph, at)
            loss, holds = step_loss(output, step)
            note_use(recorder, output, loss, step)
            held = held_gradients(output) if step.holds_gradients else []
            recorder.drops_output = not _holds(holds, output)
            output, holds = None, (holds, loss)
            recorder.output_bytes = storage_bytes(tensors_of(holds))
            recorder.held = holds
            del holds
        recorder.forward_is_over()
        recorder.set_phase(_core.PHASE_BACKWARD)
        recorder.learn_inputs = False
        if loss is not None:
            recorder.accumulation.watch(loss)
        try:
            with _autocast_left(), streamed_weights.in_use(recorder, step.path, in_backward=True):
                gradients = backward(loss) if loss is not None else []
        except BaseException:
            recorder.held = None  # the graph holds the recorder, and the garbage collector does not see it
            raise
        finally:
            held.clear()
            recorder.accumulation.unwatch()
        recorder.loss_ops = (begin, at[0]) if at else None
    for parameter, gradient in zip(parameters, gradients, strict=False):
        buffer = None if gradient is None else recorder.buffer_of(gradient)
        if buffer is not None and gradient is not None:
            recorder.graph.set_category(buffer, _core.CATEGORY_GRADIENT)
            recorder.label(buffer, gradient, recorder.names[id(parameter)])
    recorder.set_phase(_core.PHASE_OPTIMIZER)
    return gradients


def _holds(held: Any, output: Any) -> bool:
    """Whether a loop holds any of the outputs, and thus their memory."""
    tensors = tensors_of(held)
    return any(leaf is one for leaf in tensors_of(output) for one in tensors)


@contextmanager
def _autocast_left() -> Iterator[None]:
    """What a loop does before backward: leave autocast, which drops the casts that it has cached.

    The step may be traced in the middle of a forward, inside the caller's own block.
    """
    torch.clear_autocast_cache()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _RandomDraws(TorchDispatchMode):
    """Counts operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += op_facts.facts(func).draws(args, kwargs)
        return func(*args, **kwargs)


def settle(
    recorder: GraphRecorder,
    model: nn.Module,
    changes: model_state.Changes,
    forward: Callable[[], Any],
    batch: Any,
    step: StepFacts,
) -> None:
    """Ends the record, and runs a forward once more where the first changed anything."""
    recorder.closed = recorder.paused = True
    recorder.held = None
    given = {recorder.buffer_of(tensor) for tensor in tensors_of(batch)}  # a cache may hold what is new
    kept = recorder.outliving() - given if step.gradients else set()
    draws = _RandomDraws()

    came_through = True

    def again() -> None:
        nonlocal came_through
        came_through = False
        with draws:
            forward()
        came_through = True

    model_state.settle(model, changes, again)
    changes.draws_again = draws.count == recorder.forward_draws
    _note_kept(recorder, kept, kept & recorder.outliving() if came_through else set())


def _note_kept(recorder: GraphRecorder, kept: set[int], lasting: set[int]) -> None:
    """What the step leaves behind takes memory in the next one, too.

    Until that step's forward has replaced it: another trace counts that, see `MemoryProfiler`. Or for good,
    as in a cache, which later steps find filled.
    """
    sizes = [buffer[0] for buffer in recorder.graph.buffers()] if kept else []
    by_call: dict[int, int] = {}
    for buffer in sorted(kept - lasting):
        call = recorder.replacing_call(buffer)
        by_call[call] = by_call.get(call, 0) + sizes[buffer]
    recorder.kept = tuple(sorted(by_call.items()))
    for buffer in sorted(lasting):
        recorder.graph.set_size(buffer, 0)
        late = recorder.graph.add_late(sizes[buffer], _core.CATEGORY_ACTIVATION)
        recorder.graph.note_buffer(late, -1, "kept from step to step")


def finish(recorder: GraphRecorder, calls: CallRecorder, changes: model_state.Changes, method: str) -> Trace:
    """Marks modules with what only Python knows, and freezes the graph.

    Call it when `changes` is complete, that is after `model_state.preserved` has ended.
    """
    graph = recorder.graph
    written = _written_buffers(recorder, calls, changes)
    _note_buffers_of_others(recorder)
    modules = dict(calls.modules)
    stateful = _with_state(recorder, calls, changes)
    copied = _copied_bytes(recorder, calls, written)
    for number, (path, _) in enumerate(calls.modules):
        state = _RNG_STATE_BYTES if number in recorder.random_modules else 0
        buffers = [modules[owner]._buffers[name] for owner, name in written.get(path, [])]
        state += storage_bytes([buffer for buffer in buffers if buffer is not None])
        state += copied.get(path, 0)
        flags = _core.MODULE_PYTHON_STATE if path in stateful else 0
        if flags or state:
            graph.mark_module(number, flags, state)
    graph.finish()
    paths = [(path, type(module).__name__) for path, module in calls.modules]
    foreign: dict[str, list[weakref.ref[Tensor]]] = {}
    for number, buffer in sorted(recorder.foreign_reads):
        foreign.setdefault(paths[number][0], []).append(recorder.foreign[buffer])
    random = frozenset(paths[number][0] for number in recorder.random_modules)
    return Trace(
        graph, paths, written, foreign, random, changes, method, recorder.output_bytes,
        recorder.idle_state_bytes, use=recorder.use, another_use=recorder.another_use,
        loss_ops=recorder.loss_ops, drops_output=recorder.drops_output,
        path=calls.path, rerun_bytes=0 if recorder.cuda is None else recorder.cuda.rerun_bytes,
        unrepeatable=frozenset(paths[number][0] for number in recorder.unrepeatable_modules),
        gradients=calls.gradients, kept=recorder.kept, writes_outside=_written_outside(recorder, calls),
    )  # fmt: skip


def _copied_bytes(
    recorder: GraphRecorder, calls: CallRecorder, written: dict[str, list[BufferPath]]
) -> dict[str, int]:
    """Per module path, what copies take of small tensors that it reads: buffers, and tensors from outside.

    Buffers that change while it runs are kept anyway. On a card nothing is copied.
    """
    found: dict[str, int] = {}
    for path, module in calls.modules if recorder.cuda is None else ():
        for name, buffer in module._buffers.items():
            count = bytes_of_copies([buffer])
            for around in _with_those_around(path) if count else ():
                if (path, name) not in written.get(around, ()):
                    found[around] = found.get(around, 0) + count
    for number, read in recorder.foreign_reads if recorder.cuda is None else ():
        path, _ = calls.modules[number]
        found[path] = found.get(path, 0) + bytes_of_copies([recorder.foreign[read]()])
    return found


def _with_state(recorder: GraphRecorder, calls: CallRecorder, changes: model_state.Changes) -> set[str]:
    """Paths of modules that hold, themselves or below, what a recompute would change again.

    Below too: what a module holds need not be changed by its own forward. A list of modules has none.
    """
    found = changes.attributes.keys() | calls.exchanged
    if not changes.draws_again:  # what the first forward drew for a cache is not drawn again
        random = {calls.modules[number][0] for number in recorder.random_modules}
        found |= changes.filled & random
    return {around for path in found for around in _with_those_around(path)}


def _with_those_around(path: str) -> Iterator[str]:
    """The paths of a module and of those that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield path


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def _written_buffers(
    recorder: GraphRecorder, calls: CallRecorder, changes: model_state.Changes
) -> dict[str, list[BufferPath]]:
    """Per module path, the buffers in and below it that change while it runs."""
    written: dict[str, set[BufferPath]] = {}
    for number, buffer in sorted(recorder.writes_inside):
        owners = calls.buffer_owners.get(buffer)
        if owners is None:
            continue  # not a module buffer: the core sees the write itself
        path, _ = calls.modules[number]
        inside = [(place, name) for place, name in owners if _is_inside(place, path)]
        if inside:
            written.setdefault(path, set()).update(inside)
        else:  # a module that updates somebody else's buffer cannot be run twice on its own
            recorder.graph.mark_module(number, _core.MODULE_PYTHON_STATE)
    for path, _ in calls.modules:
        rebound = [(place, name) for place, name in changes.buffers if _is_inside(place, path)]
        if rebound:
            written.setdefault(path, set()).update(rebound)
    return {path: sorted(buffers) for path, buffers in written.items()}


def _written_outside(recorder: GraphRecorder, calls: CallRecorder) -> str:
    """What the model's forward writes to that was there before, other than registered buffers."""
    buffers = recorder.graph.buffers()
    notes = {buffer: what for buffer, _, what in recorder.graph.buffer_notes()}
    for number, buffer in sorted(recorder.writes_inside):
        is_root = not calls.modules[number][0]
        if is_root and buffer not in calls.buffer_owners and buffers[buffer][4]:
            return notes.get(buffer, "a tensor from outside")
    return ""


def _note_buffers_of_others(recorder: GraphRecorder) -> None:
    """Marks modules that read a buffer which somebody else changes afterwards.

    One that they change themselves has its earlier value in a recompute, whatever changes it later.
    """
    for module, _ in sorted(recorder.changed_after - recorder.writes_inside):
        recorder.graph.mark_module(module, _core.MODULE_INPUT_CHANGED)


@contextmanager
def no_collection() -> Iterator[None]:
    """Storages must die when their last reference does, not when the collector happens to run."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
