# SPDX-License-Identifier: Apache-2.0
"""Streams a running step into the C memory graph.

The recorder stands between PyTorch's objects and graph records. A storage is one graph buffer; it is known
by the address of its C++ object only while a weak reference says that it is alive, because addresses are
reused. A saved tensor is one graph save, which lives as long as its placeholder in the autograd graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memscale import _core
from memscale.cuda.semantics import CudaKernels, is_backward
from memscale.hardware.target import CPU, Target
from memscale.ops import fake_results, op_facts
from memscale.ops.scalar_saves import WrappedNumbers, kept_bytes
from memscale.ops.work import is_half, moved_bytes
from memscale.torchkit.accumulation import AccumulationWatch
from memscale.torchkit.extents import Extent, extent_of, overlap
from memscale.torchkit.leaves import noted_sizes, parts_of, storage_bytes
from memscale.torchkit.save_slots import Slot
from memscale.torchkit.sources import Origins

if TYPE_CHECKING:
    from memscale.torchkit.output_use import OutputUse

_DEVICE = torch.ops.prim.device.default


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a storage that remembers which buffer it is."""

    __slots__ = ("buffer", "key")
    buffer: int
    key: int


class WeightUses(Protocol):
    """Knows which blocks of streamed weights are in memory: `streamed_weights.Uses`."""

    def begin(self, in_backward: bool) -> None:
        """A forward or a backward begins."""

    def end(self) -> None:
        """It is over."""

    def called(self, module: int) -> None:
        """A module has been entered."""

    def read(self, tensors: Iterable[Tensor]) -> None:
        """An operation reads these."""

    def saved(self, save: int) -> None:
        """Autograd saves something."""

    def unpacked(self, save: int, buffer: int | None) -> None:
        """It asks for it; -1: for none of its saves."""


class GraphRecorder(TorchDispatchMode):
    """Records operations, storages and saves while it is the active dispatch mode.

    Attributes:
        graph: the graph being built.
        paused: while true, operations run but leave no record.
        closed: the step is over; what dies now is no part of it.
        learn_inputs: forward is running: an unknown operand is entered as something that was there before.
        open_modules: graph ids of the modules whose forward is running, outermost first.
        random_modules: modules inside whose forward random numbers were drawn.
        forward_draws: operations that drew some in forward.
        writes_inside: (module, buffer) for every buffer that was changed in place inside a module.
        module_buffers: graph buffers that are registered buffers of a module.
        parameters: graph buffers of the model's parameters.
        foreign: tensors that belong neither to the model nor to the batch (globals, say), by graph buffer.
        unrepeatable_modules: in and below these a card may give other bits each time.
        foreign_reads: (module, buffer) for every foreign tensor that was used inside a module.
        changed_after: (module, buffer) for every buffer of a module that a module had used before it changed.
        numbers: knows how long the autograd graph keeps numbers that it has wrapped.
        accumulation: tells the engine's own sums of gradients.
        carried: buffers of the previous step's output, which end when forward returns.
        output_bytes: storages of the model's output and of the loss.
        kept: see `step.Trace`.
        replaced: what the step before has left, by the call with which it ends.
        idle_state_bytes: optimizer state that is counted for parameters to which this step gives no gradient.
        use: what becomes of the outputs in this trace; `another_use` would leave much of the graph unused.
        loss_ops: see `step.Trace`, as `drops_output`.
        held: the output and the loss, which a loop's variables hold until the step is over.
        target: the device that the step is traced for.
        cuda: what its kernels take beside their results, when it is a card.
        module_ids: path → graph module; empty until the modules have been entered.
        names: id of a parameter → its qualified name.
        uses: knows which blocks of streamed weights are in memory; None: there are none.
        origins: tells which line of the program runs.
        cost_scale: factor on the cost of operations, for phases that are traced on representatives.
    """

    records_a_step = True
    """By which others know that a trace runs."""

    def __init__(self, graph: _core.Graph, target: Target = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.target = target
        self.cuda = CudaKernels(target) if target.kind == "cuda" else None
        self.origins = Origins()
        self.phase = _core.PHASE_FORWARD
        self.module_ids: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.uses: WeightUses | None = None
        self._labels: list[tuple[int, str, str]] = []  # buffer, module path, text: wait for the modules
        self._forms: dict[tuple[torch.dtype, torch.Size], str] = {}
        self.paused = False
        self.closed = False
        self.learn_inputs = True
        self.random_modules: set[int] = set()
        self.forward_draws = 0
        self.open_modules: list[int] = []
        self.unrepeatable_modules: set[int] = set()
        self.writes_inside: set[tuple[int, int]] = set()
        self.module_buffers: set[int] = set()
        self.parameters: set[int] = set()
        self.foreign: dict[int, weakref.ref[Tensor]] = {}
        self.foreign_reads: set[tuple[int, int]] = set()
        self.changed_after: set[tuple[int, int]] = set()
        self._buffer_reads: dict[int, set[tuple[int, int]]] = {}  # by buffer: module and call
        self.carried: list[int] = []
        self.numbers = WrappedNumbers(self._end)
        self.accumulation = AccumulationWatch(self.origins.node_begins, self.numbers.gone)
        self.output_bytes = self.idle_state_bytes = 0
        self.kept: tuple[tuple[int, int], ...] = ()
        self.replaced: dict[int, int] = {}
        self.held: Any = None
        self.use: OutputUse | None = None
        self.another_use: OutputUse | None = None
        self.loss_ops: tuple[int, int] | None = None
        self.drops_output = False
        self.cost_scale = 1.0
        self._buffers: dict[int, int] = {}  # address of a live storage → graph buffer
        self._refs: dict[int, _StorageRef] = {}
        self._in_parts: dict[int, tuple[Tensor, int]] = {}  # sparse ones
        self._open_calls: list[tuple[int, int]] = []  # call, number of buffers when it began
        self._read_by: set[tuple[int, int]] = set()  # (call, buffer) that has been entered as an input
        self._made_in_forward: set[int] = set()  # not saved so far
        self._made_in_step: dict[int, int] = {}  # with the call that made it
        # Of those: the parts that were saved, and in which modules.
        self._saved_inside: dict[int, dict[Extent, set[int]]] = {}
        self._saved_by_op: set[int] = (
            set()
        )  # buffers saved since the last operation: inputs of the one to come
        self._unreleased: dict[int, int] = {}  # saves, with their buffers
        self._slots: dict[int, Slot] = {}  # address of a storage made from a save → its slot

    # ---- storages --------------------------------------------------------------------------------

    def buffer_of(self, tensor: Tensor) -> int | None:
        """Graph buffer of a tensor's storage, if it has one that has been seen."""
        if not _has_storage(tensor):
            return None
        return self._buffers.get(tensor.untyped_storage()._cdata)

    def resident(self, tensor: Tensor, category: int) -> int:
        """Declares that a tensor was there before the step. Returns its buffer."""
        if not _has_storage(tensor):
            return self._resident_of_parts(tensor, category)
        storage = tensor.untyped_storage()
        known = self._buffers.get(storage._cdata)
        if known is not None:
            return known
        buffer = self.graph.add_resident(storage.nbytes(), category)
        self._watch(storage, buffer)
        return buffer

    def _resident_of_parts(self, tensor: Tensor, category: int) -> int:
        parts = parts_of(tensor) if noted_sizes(tensor) is None else []
        if parts:
            return [self.resident(part, category) for part in parts][-1]
        _, buffer = self._in_parts.get(id(tensor), (tensor, -1))
        if buffer < 0:
            buffer = self.graph.add_resident(storage_bytes([tensor]), category)
            self._in_parts[id(tensor)] = (tensor, buffer)  # the tensor, so that its id stays its own
        return buffer

    def same_as(self, tensor: Tensor, buffer: int) -> None:
        """Declares that a tensor stands for a known buffer (the real parameter beside its fake)."""
        self._buffers[tensor.untyped_storage()._cdata] = buffer

    def _watch(self, storage: Any, buffer: int) -> None:
        key = storage._cdata
        ref = _StorageRef(storage, self._on_death)
        ref.buffer = buffer
        ref.key = key
        self._buffers[key] = buffer
        self._refs[key] = ref

    def _on_death(self, ref: _StorageRef) -> None:
        if self._refs.get(ref.key) is ref:
            del self._refs[ref.key]
            del self._buffers[ref.key]
        slot = self._slots.pop(ref.key, None)
        if slot is not None:
            slot.drop()
        else:
            self._end(ref.buffer)

    def _end(self, buffer: int) -> None:
        if not self.closed:
            self.graph.end_buffer(buffer)

    # ---- notes -----------------------------------------------------------------------------------

    def set_phase(self, phase: int) -> None:
        """Operations from now on belong to another phase."""
        self.phase = phase
        self.graph.set_phase(phase)

    def forward_is_over(self) -> None:
        """What forward made and is still held (its output, say) is no temporary."""
        self.numbers.settle()
        for buffer in self._made_in_forward.intersection(self._buffers.values()):
            self.graph.set_category(buffer, _core.CATEGORY_ACTIVATION)
        self._made_in_forward.clear()

    def label(self, buffer: int, tensor: Tensor, name: str) -> None:
        """Says of a buffer that it is, or is the gradient or state of, a parameter or buffer of the model.

        Args:
            buffer: of the graph.
            tensor: for its shape and dtype.
            name: qualified name, such as "h.0.ln_1.weight"; "" for a tensor of the batch.
        """
        path, text = name.rpartition(".")[0], f"{self._form(tensor)} {name}".rstrip()
        if self.module_ids:
            self.graph.note_buffer(buffer, self.module_ids.get(path, -1), text)
        else:
            self._labels.append((buffer, path, text))

    def modules_are_known(self, module_ids: dict[str, int]) -> None:
        """The model's modules have been entered: labels given so far can be written."""
        self.module_ids = module_ids
        for buffer, path, text in self._labels:
            self.graph.note_buffer(buffer, module_ids.get(path, -1), text)
        self._labels.clear()

    def _form(self, tensor: Tensor) -> str:
        """Such as "float32[4, 512, 768]"."""
        key = tensor.dtype, tensor.shape
        text = self._forms.get(key)
        if text is None:
            sizes = ", ".join(map(str, tensor.shape))
            text = self._forms[key] = f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"
        return text

    def _note_op(self) -> None:
        """Says of the operation added last where it comes from."""
        if self.phase == _core.PHASE_BACKWARD:
            origin = self.origins.in_backward()
            self.graph.note_op(origin.module, origin.source)
        elif self.phase == _core.PHASE_FORWARD:
            module = self.open_modules[-1] if self.open_modules else -1
            self.graph.note_op(-1, self.origins.in_forward(module))
        else:
            self.graph.note_op(-1, self.origins.lines.here())

    # ---- saves -----------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Slot:
        """Records that autograd saved a tensor."""
        buffer = self.buffer_of(tensor)
        if buffer is None:
            buffer = self.resident(tensor, _core.CATEGORY_INPUT)
        if buffer in self._made_in_forward:
            self._made_in_forward.discard(buffer)
            self.graph.set_category(buffer, _core.CATEGORY_ACTIVATION)
        if buffer in self._made_in_step:
            parts = self._saved_inside.setdefault(buffer, {})
            parts.setdefault(extent_of(tensor), set()).update(self.open_modules)
        self._saved_by_op.add(buffer)
        save = self.graph.add_save(buffer)
        self._unreleased[save] = buffer
        if self.uses is not None:
            self.uses.saved(save)
        return Slot(self, buffer, save)

    def released(self, save: int) -> None:
        """Nobody has it any more."""
        del self._unreleased[save]
        if not self.closed:
            self.graph.release(save)

    def outliving(self) -> set[int]:
        """Buffers that the forward has made, and that something holds: once the step is over, the model."""
        return self._made_in_step.keys() & {*self._buffers.values(), *self._unreleased.values()}

    def replacing_call(self, buffer: int) -> int:
        """The call after which the model holds this buffer in place of an earlier step's.

        That is the one around the call that made it, which may have bound what the inner one returned; not
        the whole forward.
        """
        made = self._made_in_step[buffer]
        around = self.graph.calls()[made][1] if made >= 0 else -1
        return around if around > 0 else made

    def unpack(self, slot: Slot) -> None:
        """Records that backward is about to use what was saved."""
        if self.uses is not None:
            self.uses.unpacked(slot.save, slot.buffer)
        self.graph.unpack(slot.save)

    def unpack_kept(self, tensor: Tensor) -> None:
        """Likewise of a tensor that is saved as it is: a parameter."""
        if self.uses is not None:
            self.uses.unpacked(-1, self.buffer_of(tensor))

    def unpacked_as(self, slot: Slot, storage: Any) -> None:
        """Declares that a fresh storage stands for what `slot` saved, from now until it dies."""
        slot.holders += 1
        self._watch(storage, slot.buffer)
        self._slots[storage._cdata] = slot

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and records it."""
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # PyTorch's engine asks more often than it runs an operation
        kwargs = kwargs or {}
        if self.paused:
            return self.unrecorded(func, args, kwargs)
        self.numbers.settle()
        saved, self._saved_by_op = self._saved_by_op, set()
        func = self.accumulation.in_place(func, args)
        info = op_facts.facts(func)
        if info.is_view:
            return self.execute(func, info, args, kwargs)
        inputs = self._inputs(args, kwargs)
        result = self.execute(func, info, args, kwargs)
        self.accumulation.made(func, result)
        outputs = tensors_of(result)
        if not outputs and not info.writes:  # a question about a tensor, no work
            return result
        if self.cuda is not None:
            for tensor in self.cuda.host_outputs(info.schema, result):
                self.on_host(tensor)
        # The operation is entered after it ran: what died while it ran was not needed by it any more, and
        # what it made is counted from its own position on.
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._buffers]
        if self.cuda is not None:
            fresh = self.cuda.in_order(info.schema, fresh)
        work = info.work_of(args, kwargs, outputs)
        is_view = not (fresh or info.writes)  # by another name
        moved = 0 if is_view else moved_bytes(info.schema, work, inputs, outputs)
        scratch = 0
        if self.target.kind == "cpu":
            scratch = op_facts.scratch(func, info, (args, kwargs), outputs, _storage_bytes(fresh))
        flops = op_facts.flops(info, args, kwargs, result)
        if self.cost_scale != 1.0:
            moved, flops = int(moved * self.cost_scale), int(flops * self.cost_scale)
        draws = info.draws(args, kwargs)
        flags = (_core.OP_RANDOM if draws else 0) | (_core.OP_HALF if is_half((*inputs, *outputs)) else 0)
        self.graph.add_op(info.name, flops, moved, scratch, flags, work)
        self._note_op()
        if self.uses is not None:
            self.uses.read(inputs)
        if draws:
            self._note_draw((*args, *kwargs.values()))
        for tensor in fresh:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._buffers:
                buffer = self.graph.add_buffer(storage.nbytes(), _core.CATEGORY_TEMPORARY)
                self.graph.note_buffer(buffer, -1, self._form(tensor))
                self._watch(storage, buffer)
                if self.learn_inputs:
                    self._made_in_forward.add(buffer)
                    self._made_in_step[buffer] = self._open_calls[-1][0] if self._open_calls else -1
        if self.cuda is not None:
            self._note_on_card(self.cuda, func, info, args, outputs)
        else:
            self._note_number(info, args, outputs)
        self._note_writes(func, info, args, kwargs)
        if info.writes and self._writes_to_saved(func, info, (args, kwargs), saved):
            self._refuse_second_runs()
        return result

    def _note_draw(self, values: Sequence[Any]) -> None:
        """An operation on `values` draws random numbers."""
        self.random_modules.update(self.open_modules)
        self.forward_draws += self.phase == _core.PHASE_FORWARD
        if any(isinstance(value, torch.Generator) for value in values):
            self._refuse_second_runs()  # only the global generators are put back

    def _note_on_card(
        self, cuda: CudaKernels, func: Any, info: op_facts.OpFacts, args: Any, outputs: Sequence[Tensor]
    ) -> None:
        """Enters what the kernel of the operation added last takes: workspaces, which stay, and scratch."""
        if info.unrepeatable and any(tensor.is_floating_point() for tensor in outputs):
            self.unrepeatable_modules.update(self.open_modules)
        for size in cuda.workspaces(info.schema, args, is_backward(self.phase)):
            self.graph.add_late(size, _core.CATEGORY_WORKSPACE)
        blocks = cuda.scratch(func, info.schema, args, outputs)
        alive: list[tuple[int, int]] = []  # buffer, last phase
        for phase in range(max((last for _, _, last in blocks), default=-1) + 1):
            if phase:  # a name of its own: nobody runs it a second time, or counts it as one more
                self.graph.add_op(f"{info.name} (phase {phase + 1})", 0, 0)
                self._note_op()
            for size, first, last in blocks:
                if first == phase:
                    buffer = self.graph.add_buffer(size, _core.CATEGORY_TEMPORARY)
                    self.graph.note_buffer(buffer, -1, "inside the kernel")
                    alive.append((buffer, last))
            for buffer, last in alive:
                if last == phase:
                    self.graph.end_buffer(buffer)

    def _note_number(self, info: op_facts.OpFacts, args: Any, outputs: Sequence[Tensor]) -> None:
        """Enters the number that autograd keeps of the operation added last, in the host's memory."""
        size = kept_bytes(info.name, args)
        if size > 0:
            buffer = self.graph.add_buffer(size, _core.CATEGORY_ACTIVATION)
            self.graph.note_buffer(buffer, -1, "a number that autograd keeps")
            self.numbers.wrapped(outputs[0], buffer)

    def on_host(self, tensor: Tensor) -> None:
        """Declares that a tensor takes no memory of the target."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._buffers:
            self._watch(storage, self.graph.add_resident(0, _core.CATEGORY_TEMPORARY))

    def execute(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operation; a subclass may run it in another way."""
        return op_facts.run(func, info, args, kwargs, self.target.kind == "cpu")

    def _inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        inputs = tensors_of(args)
        if kwargs:
            inputs += tensors_of(kwargs.values())
        if self.learn_inputs:
            for tensor in inputs:
                buffer = self._buffers.get(tensor.untyped_storage()._cdata)
                if buffer is None:
                    buffer = self.resident(tensor, _core.CATEGORY_INPUT)
                    self.foreign[buffer] = weakref.ref(tensor if tensor._base is None else tensor._base)
                self._note_read(buffer)
        return inputs

    def _note_read(self, buffer: int) -> None:
        """What a call reads from outside is its input, argument or not (a closure, a global)."""
        if buffer in self.parameters:
            return  # the checkpoint itself looks after these
        if buffer in self.module_buffers:
            open_calls = zip(self.open_modules, self._open_calls, strict=True)
            self._buffer_reads.setdefault(buffer, set()).update((it, call) for it, (call, _) in open_calls)
            return
        if buffer in self.foreign:
            self.foreign_reads.update((module, buffer) for module in self.open_modules)
        for call, first_own in reversed(self._open_calls):
            if buffer >= first_own and buffer not in self.foreign:
                return
            if (call, buffer) not in self._read_by:
                self._read_by.add((call, buffer))
                self.graph.add_input(call, buffer)

    def enter(self, module: int) -> int:
        """A module's forward begins. Returns the call."""
        if self.uses is not None:
            self.uses.called(module)
        call = self.graph.begin_call(module)
        self.open_modules.append(module)
        self._open_calls.append((call, self.graph.buffer_count))
        return call

    def leave(self, call: int) -> None:
        """It ends."""
        self.open_modules.pop()
        self._open_calls.pop()
        self.graph.end_call(call)
        if call in self.replaced:
            self.graph.end_buffer(self.replaced.pop(call))

    def unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that leaves no record."""
        return None if op_facts.is_fused_step(func, args) else fake_results.run(func, args, kwargs)

    def written(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> list[Tensor]:
        """Tensors that an operation changes in place, by its schema."""
        return op_facts.arguments_at(func, info.writes, args, kwargs)

    def _writes_to_saved(
        self, func: Any, info: op_facts.OpFacts, call: tuple[Any, Any], saved: set[int]
    ) -> bool:
        """Whether an operation fills a tensor that autograd has saved for it already (`rrelu` its noise).

        A recompute ends with the last save, so it could end before this one is filled.
        """
        in_place = func._schema.name.endswith("_")
        places = [index for index in info.writes if index > 0 or not in_place]
        filled = op_facts.arguments_at(func, places, *call)
        return any(self.buffer_of(tensor) in saved - self.module_buffers for tensor in filled)

    def _refuse_second_runs(self) -> None:
        for module in self.open_modules:
            self.graph.mark_module(module, _core.MODULE_PYTHON_STATE)

    def _note_writes(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> None:
        self._note_write(self.written(func, info, args, kwargs))
        if info.foreign:
            # An operator from elsewhere may update a module's statistics and not declare it.
            operands = tensors_of(args) + tensors_of(kwargs.values())
            self._note_write([tensor for tensor in operands if self.buffer_of(tensor) in self.module_buffers])

    def _note_write(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            buffer = self.buffer_of(tensor)
            if buffer is not None:
                self.graph.add_write(buffer)
                self.writes_inside.update((module, buffer) for module in self.open_modules)
                if buffer in self._buffer_reads:
                    self._note_changed(buffer)
                # Past autograd (`output.data.clamp_`), else plain PyTorch would refuse the save in backward.
                # Recurrent layers write to other parts of the same memory.
                parts = self._saved_inside.get(buffer, {}) if self.learn_inputs else {}
                written = extent_of(tensor) if parts else None
                for part, modules in parts.items():
                    for module in modules if written is not None and overlap(part, written) else ():
                        self.graph.mark_module(module, _core.MODULE_INPUT_CHANGED)
            elif not _has_storage(tensor):  # nobody knows whose memory that is
                self._refuse_second_runs()

    def _note_changed(self, buffer: int) -> None:
        """A buffer of a module changes: calls that read it and are over have seen another value."""
        open_now = {call for call, _ in self._open_calls}
        reads = self._buffer_reads[buffer]
        self.changed_after.update((module, buffer) for module, call in reads if call not in open_now)


def _is_tensor(value: Any) -> bool:
    """False for what functorch puts around tensors (`vmap`, `grad`); what runs beneath it is recorded."""
    return isinstance(value, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _has_storage(value: Any) -> bool:
    """True for an ordinary tensor. A sparse one has no storage of its own, but those of its parts."""
    return isinstance(value, Tensor) and value.layout is torch.strided and _is_tensor(value)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}
    return sum(storages.values())


def tensors_of(values: Any) -> list[Tensor]:
    """Ordinary tensors in a value, or one or two levels down in its tuples and lists, and parts of others."""
    if isinstance(values, Tensor):
        return _ordinary(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, dict)):
        return []
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.extend(_ordinary(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                found.extend(_ordinary(item))
    return found


def _ordinary(value: Any) -> list[Tensor]:
    return parts_of(value) if _is_tensor(value) else []


def metadata_of(tensor: Tensor) -> tuple[Sequence[int], Sequence[int], torch.dtype, torch.device, int, int]:
    """Shape, strides, dtype, device, storage offset (elements) and storage size (bytes)."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        int(tensor.storage_offset()),
        tensor.untyped_storage().nbytes(),
    )
