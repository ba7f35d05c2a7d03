# SPDX-License-Identifier: Apache-2.0
"""The empirical trace: a real step on the real batch, recorded and discarded.

For models whose control flow depends on computed values, which fakes do not have. Repeated blocks run
checkpointed meanwhile, so that the step fits where the plain one would not; the checkpoint reports what the
plain step would have saved, and the recomputes are left out of the record. Gradients are computed without
touching `.grad`, so that hooks which act on gradients stay silent.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memscale import _core
from memscale.errors import AttachError
from memscale.hardware.target import Target
from memscale.ops.fake_results import mode_of_fakes
from memscale.optim.masters import as_planned
from memscale.optim.release.gradient import bytes_here
from memscale.state import leftovers, model_state
from memscale.state.tensor_versions import Versions
from memscale.state.undone_writes import UndoneWrites
from memscale.techniques.checkpoint.checkpoint_state import Uses
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.save_observers import observed_by
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit.earlier_graphs import check_apart, nodes_of
from memscale.torchkit.save_slots import Slot
from memscale.trace import step as tracer
from memscale.trace.ddp import GradientBuckets, silent
from memscale.trace.fake_optimizer import fake_optimizers, free_switches
from memscale.trace.lifetimes import NaturalEnds
from memscale.trace.loss import loss_of
from memscale.trace.optimizer.present_gradients import those_present
from memscale.trace.recorder import GraphRecorder
from memscale.trace.static import DRAWS, HIGHEST_DRAW
from memscale.uninterrupted import uninterrupted


class _HeldTensor:
    """What stands in the autograd graph for a tensor saved outside checkpointed blocks: the tensor itself."""

    __slots__ = ("ends", "slot", "tensor")

    def __init__(self, slot: Slot, tensor: Tensor, ends: NaturalEnds) -> None:
        self.slot = slot
        self.tensor = tensor
        self.ends = ends

    def __del__(self) -> None:
        if self.ends.is_held_elsewhere(self.tensor):  # what backward has made of it lives on
            self.slot.recorder.unpacked_as(self.slot, self.tensor.untyped_storage())
        self.slot.drop()


class _RealRecorder(GraphRecorder):
    """Runs everything for real, but for single random numbers: these are not drawn, see `StaticRecorder`.

    Attributes:
        draw: stands for every single random number.
        has_drawn: there was one.
    """

    def __init__(self, graph: _core.Graph, target: Target, draw: float) -> None:
        super().__init__(graph, target)
        self.draw = draw
        self.has_drawn = False
        self.ends = NaturalEnds(self._end)
        self._over: set[int] = set()

    def _end(self, buffer: int) -> None:
        if buffer not in self._over:
            self._over.add(buffer)
            super()._end(buffer)

    def alias_of(self, tensor: Tensor) -> Tensor:
        """What the trace itself may hold of a tensor without the step seeming to."""
        buffer = self.buffer_of(tensor)
        return self.ends.alias(tensor, buffer if buffer in self._made_in_forward else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation. A checkpoint's recompute, which is not recorded, gets the same numbers."""
        if not self.paused:
            self.ends.look()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in DRAWS and result.numel() == 1:
            result.fill_(self.draw)
            self.has_drawn = True
        return result


class _RealSaves:
    """Pack and unpack outside checkpointed blocks, and the observer inside them."""

    def __init__(self, recorder: _RealRecorder) -> None:
        self.recorder = recorder

    def pack(self, tensor: Tensor) -> object:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        if tensor.layout is not torch.strided:
            return tensor
        with self.unseen():
            alias = self.recorder.alias_of(tensor)
        return _HeldTensor(self.recorder.save(tensor), alias, self.recorder.ends)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            self.recorder.unpack_kept(packed)
            return packed
        self.recorder.unpack(packed.slot)
        tensor: Tensor = packed.tensor
        return tensor

    def on_pack(self, tensor: Tensor) -> object:
        """See `checkpointing.SaveObserver`."""
        return self.recorder.save(tensor)

    def on_unpack(self, save: Any) -> None:
        """See `checkpointing.SaveObserver`."""
        self.recorder.unpack(save)

    def on_release(self, save: Any) -> None:
        """See `checkpointing.SaveObserver`."""
        save.drop()

    def on_hold(self, tensor: Tensor) -> Tensor:
        """See `checkpointing.SaveObserver`."""
        with self.unseen():
            return self.recorder.alias_of(tensor).requires_grad_(tensor.requires_grad)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """See `checkpointing.SaveObserver`."""
        paused, self.recorder.paused = self.recorder.paused, True
        try:
            yield
        finally:
            self.recorder.paused = paused


def repeated_blocks(model: nn.Module, left_out: LeftOut = NOTHING_LEFT_OUT) -> list[tuple[str, nn.Module]]:
    """The outermost modules that may run twice and have parameters, children and a sibling like them."""
    structure = model_state.structure_of(model)
    blocks: list[tuple[str, nn.Module]] = []
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        counts: dict[int, int] = {}
        for _, child in children:
            counts[structure[child]] = counts.get(structure[child], 0) + 1
        for child_path, child in children:
            is_block = counts[structure[child]] > 1 and any(True for _ in child.children())
            if is_block and any(True for _ in child.parameters()) and not left_out.bars(child_path):
                blocks.append((child_path, child))
            else:
                pending.append((child_path, child))
    return sorted(blocks, key=lambda block: block[0])


@contextmanager
def _blocks_checkpointed(model: nn.Module, left_out: LeftOut) -> Iterator[None]:
    attached: list[CheckpointAttachment] = []
    try:
        for path, block in repeated_blocks(model, left_out):
            owners = [(owner, name) for owner in block.modules() for name in owner._buffers]
            attachment = CheckpointAttachment(block, path, owners, uses=Uses(True, True, True))
            with uninterrupted(), suppress(AttachError):
                attachment.attach()
                attached.append(attachment)
        yield
    finally:
        with uninterrupted():
            for attachment in reversed(attached):
                attachment.undo()


@contextmanager
def buffer_contents(model: nn.Module) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Puts the contents and the version of every buffer back at the end of the block.

    Yields:
        Tells (module path, name) of those that have other contents now.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    versions = Versions(buffer for buffer, _ in before)

    def changed() -> list[tuple[str, str]]:
        other = {id(buffer) for buffer, value in before if not _is_same(buffer, value)}
        modules = model.named_modules()
        owned = ((path, name, value) for path, module in modules for name, value in module._buffers.items())
        return [(path, name) for path, name, value in owned if id(value) in other]

    try:
        yield changed
    finally:
        with uninterrupted():
            for buffer, value in before:
                buffer.data.copy_(value)
            versions.restore()  # for graphs that already hold buffers


def _is_same(buffer: Tensor, before: Tensor) -> bool:
    try:
        return buffer.layout is not torch.strided or torch.equal(buffer.detach(), before)
    except RuntimeError:  # not for every dtype
        return False


def trace_empirical(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: StepFacts,
    passes: int,
    draw: float = HIGHEST_DRAW,
) -> tracer.Trace:
    """Traces a step by running it.

    Where blocks cannot run twice, which nobody knows yet, the step is run once more with all as they are.

    Args:
        model: any module, on its device. Left as it was.
        args: positional part of one training batch.
        kwargs: keyword part.
        step: what else decides the step.
        passes: how often the step is run; the last run counts, after one-time caches have been filled.
        draw: stands for single random numbers in the last run, see `StaticRecorder`.

    Raises:
        Exception: whatever the model raises on this batch.
    """
    try:
        with leftovers.none_left() as watch:
            blocks = _blocks_checkpointed(model, step.left_out)
            return _traced(watch, model, (args, kwargs), step, passes, draw, blocks)
    except (MemoryError, leftovers.LeftoverError, torch.cuda.OutOfMemoryError):
        raise
    except Exception:  # a block's recompute may raise anything, from its own code, too
        if not repeated_blocks(model, step.left_out):
            raise
    with leftovers.none_left() as watch:
        return _traced(watch, model, (args, kwargs), step, passes, draw, nullcontext())


def _traced(
    watch: leftovers.Watch,
    model: nn.Module,
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    step: StepFacts,
    passes: int,
    draw: float,
    blocks: AbstractContextManager[None],
) -> tracer.Trace:
    with ExitStack() as stack:
        stack.enter_context(model_state.training_flags(model, step.training))
        changed_buffers = stack.enter_context(buffer_contents(model))
        stack.enter_context(silent(model))
        stack.enter_context(as_planned(model, step.path.half))
        stack.enter_context(blocks)
        stack.enter_context(UndoneWrites())
        for _ in range(passes - 1):
            with model_state.preserved(model, contents=True, batch=batch):
                _warm_up(model, *copied_batch(*batch), step)
        # A codebook that the first forward fills is filled now: a plan must know of it all the same.
        filled = changed_buffers() if passes > 1 else []
        return _record(watch, model, *copied_batch(*batch), step, draw, filled)


def copied_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch on its own memory: a model may write to its inputs, though hardly to sparse ones."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    result: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, copied, (args, kwargs))
    return result


def _warm_up(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepFacts) -> None:
    earlier = nodes_of((args, kwargs))
    loss = loss_of(step.run(model, args, kwargs))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if loss is not None and parameters:
        check_apart(loss, earlier, parameters)
        torch.autograd.grad(loss, parameters, allow_unused=True)


def _record(
    watch: leftovers.Watch,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: StepFacts,
    draw: float,
    filled: list[tuple[str, str]],
) -> tracer.Trace:
    recorder = _RealRecorder(_core.Graph(), step.target, draw)
    watch.add(recorder)
    calls = tracer.CallRecorder(model, recorder)
    saves = _RealSaves(recorder)
    buckets = GradientBuckets(model)
    forward = functools.partial(buckets.forward, functools.partial(calls.run, step, args, kwargs))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    earlier = nodes_of((args, kwargs))

    def backward(loss: Tensor) -> list[Tensor | None]:
        check_apart(loss, earlier, trainable)
        with buckets.watched(recorder, trainable):
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True) if trainable else []
        return buckets.completed(recorder, trainable, gradients)

    gc.collect()  # what a real step has room for
    batch = args, kwargs
    with model_state.preserved(model, contents=True, batch=batch) as changes, tracer.no_collection():
        calls.declare_residents((args, kwargs), step)
        buckets.declare(recorder)
        outside = buckets.outside(trainable)
        present = those_present(step, outside, lambda: {id(it) for it in outside if bytes_here(it.grad)})
        for parameter in present:
            recorder.graph.add_resident(parameter.numel() * parameter.element_size(), _core.CATEGORY_GRADIENT)
        with observed_by(saves), calls.attached(), recorder:
            hooks = (saves.pack, saves.unpack)
            gradients = tracer.run_step(recorder, forward, hooks, backward, trainable, step)
        notes = _optimizer_phase(recorder, trainable, gradients, step)
        del gradients
        tracer.settle(recorder, model, changes, forward, batch, step)
    changes.buffers += filled
    trace = tracer.finish(recorder, calls, changes, "empirical")
    trace.notes += notes + buckets.notes
    trace.has_drawn = recorder.has_drawn
    trace.optimizer_switches = free_switches(step.optimizer, step.target.foreach)
    return trace


def _optimizer_phase(
    recorder: GraphRecorder,
    trainable: list[nn.Parameter],
    gradients: list[Tensor | None],
    step: StepFacts,
) -> list[str]:
    """Records the optimizer step on fakes: a real one would change the weights."""
    with mode_of_fakes() as mode, recorder:
        fakes: dict[int, nn.Parameter] = {}
        for parameter in trainable:
            fakes[id(parameter)] = fake = nn.Parameter(mode.from_tensor(parameter.detach()))
            recorder.names[id(fake)] = recorder.names[id(parameter)]
            known = recorder.buffer_of(parameter)
            if known is not None:
                recorder.same_as(fake, known)
        optimizers = fake_optimizers(recorder, list(fakes.values()), step, lambda real: fakes.get(id(real)))
        for parameter, gradient in zip(trainable, gradients, strict=False):
            if gradient is not None:
                fake = fakes[id(parameter)]
                fake.grad = mode.from_tensor(gradient)
                known = recorder.buffer_of(gradient)
                if known is not None:
                    recorder.same_as(fake.grad, known)
        for optimizer in optimizers if step.gradients else ():
            optimizer.step()
    return [note for optimizer in optimizers for note in optimizer.notes]
