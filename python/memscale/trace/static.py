# SPDX-License-Identifier: Apache-2.0
"""The static trace: a whole step on fake tensors.

Every tensor has a shape and no data, so nothing is computed or allocated, and a model larger than the machine
can be traced. What autograd saves is replaced by a placeholder, so that the storage's natural end shows; when
backward asks for it, a fresh fake stands in for it.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale import _core
from memscale.cuda.recurrent import layers_of
from memscale.cuda.semantics import emulation_for
from memscale.hardware.target import Target
from memscale.ops import fake_results, op_facts
from memscale.ops.fake_results import mode_of_fakes
from memscale.optim.masters import planned_dtypes
from memscale.optim.release.gradient import bytes_here
from memscale.state import leftovers, model_state
from memscale.state.tensor_versions import Versions
from memscale.techniques.checkpoint import given_caches
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit import sharding
from memscale.torchkit.earlier_graphs import backward_to_edges, extent_of, nodes_so_far
from memscale.torchkit.leaves import note_sizes, noted_sizes, sizes_to_note
from memscale.torchkit.quiet_fakes import quiet_fakes
from memscale.torchkit.saved_weights import exchanged
from memscale.torchkit.tensor_hooks import forget_hooks
from memscale.trace import step as tracer
from memscale.trace.ddp import GradientBuckets, silent
from memscale.trace.fake_optimizer import FakeOptimizer, fake_optimizers, free_switches
from memscale.trace.fake_saves import FakeSaves
from memscale.trace.optimizer import streamed_weights
from memscale.trace.optimizer.present_gradients import make_gradients, those_present
from memscale.trace.optimizer.released_gradients import ReleasedGradients
from memscale.trace.optimizer.stepped_gradients import SteppedGradients
from memscale.trace.recorder import GraphRecorder, tensors_of
from memscale.uninterrupted import uninterrupted
from memscale.weights.placed_gradients import set_gradient
from memscale.weights.placement import device_of_use

_REAL_ELEMENTS = 1 << 24
"""Integer tensors up to this size are computed for real."""

_REAL_ELEMENTS_ON_CARD = 1 << 18
"""The same for tensors that lie on a card: what is computed there takes its memory, if only for a moment."""


_KNOWN_ELEMENTS = 1 << 20
"""Floating-point tensors made of `torch.ones` alone are computed for real up to this size: masks, mostly."""

_WITHOUT_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "mv", "addmm", "matmul", "_sparse_mm", "_sparse_addmm", "t", "transpose", "detach",
                 "alias", "is_coalesced", "to_dense", "_to_dense")
)  # fmt: skip
"""Operations on sparse tensors whose results do not depend on how many elements these have."""

DRAWS = frozenset({"aten::rand", "aten::rand_like"})
"""Operations whose single numbers decide whether a layer is dropped."""

HIGHEST_DRAW = 1 - 2**-24
"""The largest number in float32 that `torch.rand` may give: above every share of layers to drop."""


def _may_be_real(tensor: Tensor) -> bool:
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    most = _REAL_ELEMENTS_ON_CARD if tensor.is_cuda else _REAL_ELEMENTS
    return tensor.numel() <= (most if exact else 1)


class StaticRecorder(GraphRecorder):
    """Computes what is made of integers alone, fakes the rest.

    Token ids, positions, masks and lengths decide which way a model's code goes ("is anything padded?"), and
    they cost next to nothing. With their real values the trace takes the way that training takes, where a
    purely fake trace would guess or fail. So does a mask of ones that a model makes for itself.

    A single random number that decides which way the code goes (layer drop) is not drawn: a plan must not
    depend on what the next step happens to draw.

    Attributes:
        draw: stands for every such number, at least 0 and below 1.
        has_drawn: there was one.
        has_sparse: there are sparse tensors from before the step.
        others: tensors from outside model and batch that get a gradient, by id.
        earlier: nodes that have made some of them.
    """

    def __init__(self, graph: _core.Graph, target: Target, draw: float = HIGHEST_DRAW) -> None:
        super().__init__(graph, target)
        self.draw = draw
        self.has_drawn = False
        self.has_sparse = False
        self.others: dict[int, Tensor] = {}
        self.earlier: list[Any] = []
        self.versions = Versions()  # of somebody else's tensors that were not written to after all
        # Storages of real floating-point tensors made of ones alone. With a weak reference to each, or
        # another tensor's storage could come to lie where one has been.
        self._known: dict[int, StorageWeakRef] = {}
        # Those of all real tensors that the forward made.
        self._made: dict[int, StorageWeakRef] = {}

    def __exit__(self, *error: Any) -> None:
        """Ends the block, and lets go of tensors from outside: their graphs may hold the recorder."""
        self.others.clear()
        self.earlier.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.versions.restore()

    def _is_known(self, tensor: Tensor) -> bool:
        small = tensor.numel() <= _KNOWN_ELEMENTS and not tensor.is_cuda
        return _may_be_real(tensor) or (small and tensor.untyped_storage()._cdata in self._known)

    def _is_from_outside(self, tensor: Tensor) -> bool:
        """Whether a real tensor is none that the forward made, such as a zero to which it adds losses."""
        return tensor.untyped_storage()._cdata not in self._made

    def _note_other(self, tensor: Tensor) -> None:
        if id(tensor) not in self.others:
            self.others[id(tensor)] = tensor
            if (
                tensor._base is None and tensor.grad_fn is not None
            ):  # a view may have been made by the forward
                self.earlier.append(tensor.grad_fn)

    def execute(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operation for real if all it works on is real and small, on fakes otherwise."""
        if self.has_sparse:
            return self._on_sparse(func, info, args, kwargs)
        return self._execute(func, info, args, kwargs)

    def _on_sparse(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> Any:
        """The same where fakes of sparse tensors have no elements: only what does not ask for these."""
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        noted = [what for what in map(noted_sizes, operands) if what is not None]
        name = func._schema.name
        if noted and name not in _WITHOUT_ELEMENTS and not name.startswith("prim::"):
            raise NotImplementedError(f"{name} of a sparse tensor from before the step")
        result = self._execute(func, info, args, kwargs)
        if noted and isinstance(result, Tensor) and result.layout is not torch.strided:
            note_sizes(result, noted[0])
        return result

    def _execute(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> Any:
        fake_results.check_dtypes(func, args)
        args = fake_results.without_masks(func, args)
        operands = tensors_of(args) + tensors_of(kwargs.values())
        for tensor in operands:
            if not isinstance(tensor, FakeTensor) and tensor.requires_grad and self._is_from_outside(tensor):
                self._note_other(tensor)
        if any(isinstance(tensor, FakeTensor) or not self._is_known(tensor) for tensor in operands):
            for tensor in self.written(func, info, args, kwargs) if self._known and info.writes else ():
                self._known.pop(tensor.untyped_storage()._cdata, None)  # holds what nobody knows
            if info.writes and operands and not any(isinstance(tensor, FakeTensor) for tensor in operands):
                self._note_versions(func, info, args, kwargs)
                return fake_results.on_copies(func, args, kwargs, torch.empty_like)  # fakes
            return super().execute(func, info, args, kwargs)
        if info.writes and any(self.buffer_of(tensor) in self.foreign for tensor in operands):
            self._note_versions(func, info, args, kwargs)
            with unset_fake_temporarily():
                return fake_results.on_copies(
                    func, args, kwargs, Tensor.clone
                )  # somebody else's is not to be changed
        if not operands or any(tensor.is_cuda for tensor in operands):
            made = _made_of_nothing(func, args, kwargs)
            if not all(map(_may_be_real, tensors_of(made))) and not _is_mask(func, tensors_of(made)):
                return made
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
            if func._schema.name in DRAWS and result.numel() == 1:
                result.fill_(self.draw)
                self.has_drawn = True
        before = {tensor.untyped_storage()._cdata for tensor in operands}
        storages = [tensor.untyped_storage() for tensor in tensors_of(result)]
        made = {
            storage._cdata: StorageWeakRef(storage) for storage in storages if storage._cdata not in before
        }
        self._made.update(made)
        if _is_mask(func, tensors_of(result)) or not all(map(_may_be_real, operands)):
            self._known.update((storage._cdata, StorageWeakRef(storage)) for storage in storages)
        return result

    def unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that leaves no record, and writes to nobody else's tensors either."""
        info = op_facts.facts(func)
        if info.writes and any(
            self.buffer_of(tensor) in self.foreign for tensor in self.written(func, info, args, kwargs)
        ):
            operands = tensors_of(args) + tensors_of(kwargs.values())
            self._note_versions(func, info, args, kwargs)
            if not any(isinstance(tensor, FakeTensor) for tensor in operands):
                with unset_fake_temporarily():
                    return fake_results.on_copies(func, args, kwargs, Tensor.clone)
        return super().unrecorded(func, args, kwargs)

    def _note_versions(self, func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> None:
        for tensor in self.written(func, info, args, kwargs):
            if not isinstance(tensor, FakeTensor) and self._is_from_outside(tensor):
                self.versions.note(tensor)  # which holds it


def _is_mask(func: Any, made: list[Tensor]) -> bool:
    """Whether an operation made ones, and few enough of them."""
    name: str = func._schema.name
    return name == "aten::ones" and made[0].numel() <= _KNOWN_ELEMENTS and not made[0].is_cuda


def _made_of_nothing(func: Any, args: Any, kwargs: Any) -> Any:
    """The fake result of an operation on real tensors; None where its shape depends on their values."""
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None


def has_data(tensor: Tensor) -> bool:
    """False for a tensor that has a shape and no memory: a fake one, or one on "meta"."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class _FakeModel:
    """The model's parameters and buffers exchanged for fakes, in place, for the time of a trace.

    A tensor that has data keeps its device; a card's kernels then decide. One without data (a fake one, or
    one on "meta") gets a fake on the CPU, so that a trace needs no device.
    """

    def __init__(self, model: nn.Module, mode: Any, half: frozenset[str] = frozenset()) -> None:
        self.model = model
        self.mode = mode
        self._dtypes = planned_dtypes(model, half)
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}  # storage → the fake of all of it
        self.fakes: dict[int, Tensor] = {}  # id of the real tensor → fake
        self.reals: dict[int, Tensor] = {}
        self.has_sparse = False
        self._in_batch: dict[int, Tensor] = {}  # id of a real tensor → what stands for it

    def fake(self, tensor: Tensor) -> Tensor:
        known = self.fakes.get(id(tensor))
        if known is not None:
            return known
        made = self._fake_like(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        for name, value in tensor.__dict__.items():  # that hooks read; what they write goes no further
            if name not in made.__dict__:
                made.__dict__[name] = value
        if tensor.layout is not torch.strided:
            self.has_sparse = True
            note_sizes(made, sizes_to_note(tensor))
        self.fakes[id(tensor)] = made
        self.reals[id(tensor)] = tensor
        return made

    def _fake_like(self, tensor: Tensor) -> Tensor:
        if sharding.is_sharded(tensor):
            with self.mode, torch.no_grad():
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        dtype = self._dtypes.get(id(tensor))
        device = device_of_use(tensor) if has_data(tensor) else tensor.device
        if dtype is not None or device != tensor.device:
            dtype = dtype or tensor.dtype
            with self.mode, torch.no_grad():
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        if has_data(tensor) or tensor.layout is not torch.strided:
            made: Tensor = self.mode.from_tensor(tensor.detach())
            return made
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        with self.mode, torch.no_grad():
            base = self._bases.get(key)
            if base is None:
                base = torch.empty(storage.nbytes() // tensor.dtype.itemsize, dtype=tensor.dtype)
                self._bases[key] = base
            whole = base.numel() == tensor.numel() and tensor.is_contiguous()
            return base.view(tensor.shape) if whole else base.as_strided(*_geometry(tensor))

    def of_batch(self, tensor: Tensor) -> Tensor:
        """The fake of a batch tensor; small integer tensors stay real, as copies to write to.

        One without data counts as ones: nothing is padded, and 1 is a token and a class of every model.
        """
        if not _may_be_real(tensor) or tensor.layout is not torch.strided:
            return self.fake(tensor)
        if has_data(tensor):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")

    def with_gradient(self) -> set[int]:
        """Ids of the fakes of parameters whose gradients are in memory."""
        reals = self.reals.items()
        return {id(self.fakes[key]) for key, real in reals if real.is_leaf and bytes_here(real.grad)}

    def batch(self, real: tuple[Any, Any], step: StepFacts) -> tuple[Any, Any]:
        """The batch on fakes; without gradients also what is in caches, which nobody else holds."""
        if not step.gradients:
            given_caches.exchange(*real, self._alone())
        made: tuple[Any, Any] = tree_map_only(Tensor, self.of_batch, real)
        pairs = zip(tree_leaves(real), tree_leaves(made), strict=True)
        self._in_batch = {id(one): other for one, other in pairs if isinstance(one, Tensor)}
        return made

    def seen_by_loss(self, step: StepFacts) -> StepFacts:
        """The step with the caller's loss, which may have closed over the model or the batch, on fakes."""
        loss = step.loss

        def on_fakes(output: Any) -> Any:
            with _Exchanged({**self.fakes, **self._in_batch}):
                return loss(output) if loss is not None else None

        return step if loss is None else replace(step, loss=on_fakes)

    def _alone(self) -> Callable[[Tensor], Tensor]:
        """Makes fakes that live no longer than those who use them."""
        bases: dict[tuple[int, torch.dtype], Tensor] = {}

        def made(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided or not tensor.is_floating_point():
                return tensor
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor.dtype
            device = tensor.device if has_data(tensor) else torch.device("cpu")
            with self.mode, torch.no_grad():
                if key not in bases:
                    count = storage.nbytes() // tensor.dtype.itemsize
                    bases[key] = torch.empty(count, dtype=tensor.dtype, device=device)
                return bases[key].as_strided(*_geometry(tensor))

        return made

    def of(self, tensor: Tensor) -> Tensor | None:
        """The fake of a real tensor, or None for one that the model does not hold."""
        return self.fakes.get(id(tensor))

    def name_foreign(self, recorder: GraphRecorder) -> None:
        """Makes what the recorder has found to be from outside the real tensors, where it saw their fakes."""
        reals = {id(fake): self.reals[key] for key, fake in self.fakes.items()}
        for buffer, ref in recorder.foreign.items():
            real = reals.get(id(ref()))
            if real is not None:
                recorder.foreign[buffer] = weakref.ref(real)

    def declare_reals(self, recorder: GraphRecorder) -> None:
        """Makes the recorder take a real tensor, where one slips through, for its fake.

        And enters sparse ones: who uses their fakes does not see their size.
        """
        for key, fake in self.fakes.items():
            if noted_sizes(fake) is not None:
                recorder.resident(fake, _core.CATEGORY_BUFFER)
            buffer = recorder.buffer_of(fake)
            if buffer is not None:
                recorder.same_as(self.reals[key], buffer)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Runs the block with fakes in every registry, and in lists of parameters such as an LSTM keeps.

        What the block itself has bound to a plain attribute is left to `preserved`, which is to see it.
        """
        undo: list[tuple[dict[str, Any], str, Any]] = []
        plain: list[_SwappedPlain] = []
        try:
            for module in self.model.modules():
                for registry in (module._parameters, module._buffers):
                    for name, value in registry.items():
                        if value is not None:
                            place: dict[str, Any] = registry
                            undo.append((place, name, value))
                            place[name] = self.fake(value)
            for module in self.model.modules():
                for name, value in list(module.__dict__.items()):
                    swapped = self._swap_plain(value)
                    if swapped is not value:
                        plain.append(_SwappedPlain(module.__dict__, name, value, swapped))
            with exchanged(), layers_of(self.model):
                yield
        finally:
            with uninterrupted():
                forget_hooks(self.fakes.values())
                for attribute in plain:
                    attribute.undo()
                for place, name, value in reversed(undo):
                    place[name] = value

    def _swap_plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.fake(value)
        if type(value) in (list, tuple):
            swapped = [self._swap_item(item) for item in value]
            if any(new is not item for new, item in zip(swapped, value, strict=True)):
                return type(value)(swapped)
        return value

    def _swap_item(self, item: Any) -> Any:
        """A tensor's fake; of a reference to one of the model's, as an LSTM keeps, one to its fake."""
        if isinstance(item, Tensor):
            return self.fake(item)
        target = item() if type(item) is weakref.ref else None
        known = self.of(target) if isinstance(target, Tensor) else None
        return item if known is None else weakref.ref(known)


class _Exchanged(TorchFunctionMode):
    """Functions inside are given other tensors in place of some, by the ids of those."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls one."""
        args, kwargs = tree_map_only(Tensor, self._other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _other(self, tensor: Tensor) -> Tensor:
        return self._others.get(id(tensor), tensor)


class _SwappedPlain:
    """A plain attribute of a module, exchanged for one with fakes until `undo`.

    Args:
        place: of the attribute: the module's dictionary.
        name: of the attribute.
        value: that it has, a tensor or a list or tuple with some.
        swapped: that it is to have.
    """

    def __init__(self, place: dict[str, Any], name: str, value: Any, swapped: Any) -> None:
        self._place, self._name, self._value, self._swapped = place, name, value, swapped
        self._items = list(swapped) if isinstance(swapped, list) else []
        place[name] = swapped

    def undo(self) -> None:
        """Puts the value back, if nobody has bound or listed anything else."""
        swapped = self._swapped
        same = not isinstance(swapped, list) or list(map(id, swapped)) == list(map(id, self._items))
        if same and self._place.get(self._name) is swapped:
            self._place[self._name] = self._value


def _geometry(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _step(
    recorder: GraphRecorder,
    step: StepFacts,
    optimizers: Sequence[FakeOptimizer],
    parameters: Sequence[nn.Parameter],
    released: ReleasedGradients,
) -> None:
    """The optimizers' steps, where there were gradients, after which none are left."""
    with released.stepping(optimizers) if step.gradients else nullcontext():
        if step.gradients:
            streamed_weights.are_stepped(recorder, step.path)
        for optimizer in optimizers if step.gradients else ():
            optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def trace_static(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: StepFacts,
    draw: float = HIGHEST_DRAW,
) -> tracer.Trace:
    """Traces a step on fake tensors.

    Args:
        model: any module, on any device. Left as it was.
        args: positional part of one training batch, as the model's forward takes it.
        kwargs: keyword part.
        step: what else decides the step.
        draw: stands for single random numbers, see `StaticRecorder`.

    Raises:
        Exception: whatever the model's code raises on fakes; control flow that depends on data does.
        LeftoverError: fakes stay in a place of the process that cannot be put back.
    """
    with leftovers.none_left() as watch:
        # What the forward sets of context variables is gone when nothing must be left.
        return contextvars.copy_context().run(_trace, watch, model, (args, kwargs), step, draw)


def _backward(
    loss: Tensor, own: Sequence[Tensor], recorder: StaticRecorder, since: int, stack: ExitStack
) -> None:
    """Backward through the graph of a trace, and not on into graphs that were there before: those are real.

    Args:
        loss: where it begins.
        own: tensors of the model and its batch, to which no graph from before leads.
        recorder: knows real tensors from elsewhere.
        since: `nodes_so_far` when the trace began.
        stack: as it closes, these have the gradients that they had.
    """
    extent = extent_of(loss, since, recorder.earlier)
    others = {id(tensor): tensor for tensor in extent.leaves if not isinstance(tensor, FakeTensor)}
    for tensor in (others | recorder.others).values():
        has_one = tensor.is_leaf or tensor.retains_grad  # PyTorch warns who asks others
        stack.callback(set_gradient, tensor, tensor.grad if has_one else None)
    if not extent.edges:
        loss.backward()
    else:
        leaves = [leaf for leaf in own if leaf.requires_grad] + extent.own_leaves()
        backward_to_edges(loss, list({id(leaf): leaf for leaf in leaves}.values()), extent.edges)


def _trace(
    watch: leftovers.Watch,
    model: nn.Module,
    real_batch: tuple[tuple[Any, ...], dict[str, Any]],
    step: StepFacts,
    draw: float,
) -> tracer.Trace:
    recorder, since = StaticRecorder(_core.Graph(), step.target, draw), nodes_so_far()
    emulation = emulation_for(step.target, model)
    calls = tracer.CallRecorder(model, recorder)
    fakes = _FakeModel(model, mode_of_fakes(), step.path.half)
    watch.add(fakes.mode)
    buckets = GradientBuckets(model)
    preserved = model_state.preserved(model, batch=real_batch)
    with preserved as changes, tracer.no_collection(), quiet_fakes(), ExitStack() as stack:
        stack.enter_context(given_caches.preserved(*real_batch))  # another trace may follow, or a real run
        for block in (model_state.training_flags(model, step.training), sharding.whole(model), silent(model)):
            stack.enter_context(block)
        stack.enter_context(fakes.swapped())
        stack.enter_context(nullcontext() if emulation is None else emulation.active())
        batch, step = fakes.batch(real_batch, step), fakes.seen_by_loss(step)
        stack.enter_context(fakes.mode)
        stack.enter_context(recorder)
        parameters = list(model.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        calls.declare_residents(batch, step)
        fakes.declare_reals(recorder)
        recorder.has_sparse = fakes.has_sparse
        buckets.declare(recorder)
        optimizers = fake_optimizers(recorder, parameters, step, fakes.of)
        released = ReleasedGradients(recorder, step)
        present = those_present(step, buckets.outside(trainable), fakes.with_gradient)
        make_gradients(recorder, released.outside(present))
        stack.enter_context(released.watching(trainable))
        stack.enter_context(SteppedGradients(recorder, step.path, optimizers).watching(trainable))
        buckets.watch(recorder, trainable)
        saves = FakeSaves(recorder)
        forward = functools.partial(buckets.forward, functools.partial(calls.run, step, *batch))

        def backward(loss: Tensor) -> list[Tensor | None]:
            if emulation is not None:
                emulation.forward_is_over()
            _backward(loss, (*fakes.fakes.values(), *trainable), recorder, since, stack)
            gradients = buckets.completed(recorder, trainable, [value.grad for value in trainable])
            for parameter, gradient in zip(trainable, gradients, strict=True):
                parameter.grad = gradient
            return gradients

        with calls.attached():
            tracer.run_step(recorder, forward, (saves.pack, saves.unpack), backward, trainable, step)
        _step(recorder, step, optimizers, parameters, released)
        tracer.settle(recorder, model, changes, forward, batch, step)
        fakes.name_foreign(recorder)
        del batch, forward
    trace = tracer.finish(recorder, calls, changes, "static")
    trace.has_drawn = recorder.has_drawn
    trace.optimizer_switches = free_switches(step.optimizer, step.target.foreach)
    notes = [note for optimizer in optimizers for note in optimizer.notes] + buckets.notes
    trace.notes += notes + [sharding.NOTE] * sharding.has_units(model)
    return trace
