# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing of one module: drop what its forward saves, recompute it in backward.

    forward    run the module; every tensor that autograd would save becomes a numbered placeholder
    backward   the first placeholder that is asked for runs the forward once more, from the same inputs,
               random state, buffers and autocast state, and stops as soon as the last number is reached

A selective checkpoint keeps the outputs of some operations in between (kept_outputs.py): the recompute takes
them instead of computing them. What autograd saves of their memory, or of the inputs', costs nothing more, so
it stays saved. What the checkpoint itself holds, the inputs for the recompute, may wait off the device.

the recompute must be invisible, so everything that the first run could have changed is put back:

* random number generators replay the first run's numbers, then continue where they were;
* module buffers that the forward updates (running statistics) are exchanged for copies of their value
  before the first run, so the recompute reads what the first one read and updates throw-away copies;
* what cannot be put back (in-place writes to foreign tensors, changed Python attributes) is found by the
  planner beforehand, and such a module is never given to this technique.

Three silent ways to a wrong gradient are turned into errors here: an input changed in place after the
first run, a saved tensor changed in place before its use (plain autograd's own check is off for tensors
that pass through hooks), and a recompute that saves other tensors than the first.

This is not `torch.utils.checkpoint`, because the planner needs three things that it does not give: buffers
that are updated once, random state touched only where there is randomness, and a report of each saved
tensor to a recording profiler. Inside `torch.compile` the call is handed to `torch.utils.checkpoint`,
which the compiler knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memscale.errors import RecomputeError
from memscale.offload.engine import Boundary, Held
from memscale.state.module_notes import version_of
from memscale.state.process_tables import Kept as KeptPlace
from memscale.techniques.checkpoint import data_reads, global_hooks, outliving
from memscale.techniques.checkpoint.call_kinds import came_later, recomputing, stands_aside
from memscale.techniques.checkpoint.checkpoint_state import (
    NO_USES,
    Body,
    BufferRef,
    State,
    Uses,
    all_below,
    check_version,
)
from memscale.techniques.checkpoint.flat_call import flattened
from memscale.techniques.checkpoint.given_caches import are_filled
from memscale.techniques.checkpoint.kept_outputs import (
    Keeping,
    Kept,
    KeptOperations,
    KeptOutputs,
    Taking,
    detached,
    storage_of,
)
from memscale.techniques.checkpoint.outliving import Memory, known_memory
from memscale.techniques.checkpoint.recompute import Recompute, Stop, error_of, is_parameter, origin_of
from memscale.techniques.checkpoint.recompute_check import (
    OTHER_AGAIN,
    OTHER_WAY,
    SAME_AGAIN,
    UNCHECKED,
    Fingerprint,
    RecomputeCheck,
    SavedFlow,
    fingerprint,
    is_scratch_on_card,
)
from memscale.techniques.checkpoint.save_observers import SaveObserver, observed
from memscale.torchkit import batched_backward
from memscale.torchkit.compiled import checkpoints_when_compiled, never_compiled
from memscale.torchkit.forward_slot import ForwardSlot, StandIn, serial_numbers
from memscale.torchkit.leaves import is_sparse


class _Held:
    """A save that stays as it is, with the version that autograd would check.

    Parameters; in a selective checkpoint also what lies on the memory of kept outputs or inputs.
    """

    __slots__ = ("origin", "path", "tensor", "version")

    def __init__(self, tensor: Tensor, path: str, origin: str = "") -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.path = path
        self.origin = origin


class Saved:
    """Placeholder for one saved tensor. Autograd owns it; the region only watches it."""

    __slots__ = ("__weakref__", "dtype", "fingerprint", "index", "is_sampled", "memory", "region", "shape")

    def __init__(self, region: Region, index: int, tensor: Tensor) -> None:
        self.region = region
        self.index = index
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.is_sampled = False
        self.fingerprint: Fingerprint = None
        self.memory: Memory | None = None
        if region.is_checked and region.compares(tensor):
            self.is_sampled = region.body.check.is_sampled(index)
            self.fingerprint = fingerprint(tensor, self.is_sampled)
            self.memory = Memory.of(tensor)


class _Reported(Saved):
    """One that an observer hears of. Only these have a `__del__`, in which Python would lose Ctrl-C."""

    __slots__ = ("observer", "save")

    def __init__(self, region: Region, index: int, tensor: Tensor, observer: SaveObserver) -> None:
        super().__init__(region, index, tensor)
        self.observer, self.save = observer, observer.on_pack(tensor)

    def __del__(self) -> None:
        self.observer.on_release(self.save)


class _Packing:
    """Autograd has this, and `_unpacked`, of every save: a region would stay for what has no need of it."""

    __slots__ = ("region",)

    def __init__(self, region: Region | None) -> None:
        self.region = region

    def __call__(self, tensor: Tensor) -> object:
        assert self.region is not None
        return self.region.pack(tensor)


def _unpacked(saved: Saved | _Held) -> Tensor:
    """The tensor behind what was packed, for backward."""
    if isinstance(saved, Saved):
        return saved.region.unpack(saved)
    if saved.tensor._version != saved.version:
        check_version(saved.tensor, saved.version, saved.path, saved.origin)
    return saved.tensor


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_NOTHING: Final = nullcontext()
_NOWHERE: Final = frozenset({0})
"""Of what `storage_of` knows no storage."""


def _itself(saved: Tensor) -> Tensor:
    """Unpacks what a recompute saves, which nobody asks for."""
    return saved


class Region:
    """One execution of a checkpointed forward, from its start until autograd has dropped its last save.

    Attributes:
        body: what is known of the forward.
        serial: when it began, among stand-ins.
        run: the forward.
        operations: what a selective checkpoint keeps; None for a plain one.
        boundary: inputs that leave the device until the recompute; None: they stay.
        copies: of weights that may be changed through `.data`; None: somebody looks on.
        hooks: global ones that the recompute needs.
        kept: the outputs kept, from the first run until the second is over.
        moving: positions of the inputs that leave. What is saved of them is dropped, too.
        outside: memory of inputs that stay, and of buffers that the call does not change.
        observer: who looks on, in backward too, which may be another thread's.
        is_checked: the recompute is compared with the forward by value.
        flow: of its saves, while the forward runs; None: the module's calls are known.
    """

    __slots__ = (
        "body",
        "boundary",
        "copies",
        "flow",
        "hooks",
        "is_checked",
        "kept",
        "leaves",
        "moving",
        "observer",
        "operations",
        "outside",
        "recomputed",
        "run",
        "saves",
        "serial",
        "spec",
        "state",
        "versions",
    )  # fmt: skip

    def __init__(
        self,
        body: Body,
        parts: Sequence[nn.Module],
        run: Callable[..., Any],
        call: tuple[Any, Any],
        operations: KeptOperations | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        self.body = body
        self.serial = next(serial_numbers)
        self.hooks: global_hooks.Record | None = None
        self.run = run
        observer = self.observer = observed.by
        self.boundary = boundary if observer is None else None
        self.leaves, self.spec = flattened(call)
        self.versions = [
            (i, version_of(leaf)) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)
        ]
        if observer is not None:
            self.leaves = [observer.on_hold(leaf) if type(leaf) is Tensor else leaf for leaf in self.leaves]
        if observer is None:
            self.state = State.before(body, parts, self.leaves)
        else:
            with self.unseen():
                self.state = State.before(body, parts, self.leaves)
        self.copies = data_reads.WeightCopies(self.state.notes.tensors) if observer is None else None
        self.is_checked = self.state.is_checked = observer is None and body.check.of_call()
        self.flow = SavedFlow(self.leaves) if self.is_checked and not body.check.knows_flow else None
        # By number; None where the save itself stays.
        self.saves: list[weakref.ref[Saved] | None] = []
        # Graph task → index → (tensor, version at its save). One backward call is one graph task.
        self.recomputed: dict[int, dict[int, tuple[Tensor, int]]] = {}
        self.operations = operations if observer is None else None
        self.moving = [] if self.boundary is None else self.boundary.among(self.leaves)
        self.kept = None if self.operations is None else KeptOutputs(self.staying())
        # What is saved of this memory costs nothing more: it stays saved, and asks for no recompute.
        outside = self._outside() if observer is None else ()
        self.outside = frozenset(map(storage_of, outside)) - _NOWHERE

    def _outside(self) -> list[Tensor]:
        """Tensors that the region holds until its end, and that are as they are now in backward, too."""
        changing = self.state.changing
        return [leaf for leaf in self.staying() if isinstance(leaf, Tensor)] + [
            tensor
            for tensor in self.state.notes.tensors
            if type(tensor) is not nn.Parameter
            and not isinstance(tensor, nn.Parameter)
            and id(tensor) not in changing
        ]

    def unseen(self) -> AbstractContextManager[None]:
        """For what is not part of the plain step."""
        return _NOTHING if self.observer is None else self.observer.unseen()

    def compares(self, tensor: Tensor) -> bool:
        """Of a checked call: whether a save is compared, as all are but what has bytes that nobody writes.

        On the host these are the workspaces of oneDNN's recurrent layers, which follow from tensors that are
        saved beside them.
        """
        if self.body.has_cards and is_scratch_on_card(tensor):
            return False
        may_be = tensor.dtype is torch.uint8 and tensor.dim() == 1
        return not (may_be and any(issubclass(kind, nn.RNNBase) for kind in self.state.notes.kinds))

    def staying(self) -> list[Any]:
        """The arguments that are held here until the recompute."""
        moving = self.moving
        if not moving:
            return self.leaves
        return [leaf for index, leaf in enumerate(self.leaves) if index not in moving]

    def first_run(self, args: Any, kwargs: Any) -> Any:
        """Runs the forward with its saved tensors dropped."""
        packing = _Packing(self)
        with (
            self.copies.of_forward() if self.copies is not None else _NOTHING,
            torch.autograd.graph.saved_tensors_hooks(packing, _unpacked),
        ):
            rare = self.state.attributes.recorded(), global_hooks.observing()
            if all(isinstance(context, nullcontext) for context in rare) and self.operations is None:
                result = self.run(*args, **kwargs)
            else:
                result = self._first_run_in(*rare, args, kwargs)
        packing.region = None
        if self.kept is not None and all(save is None for save in self.saves):
            self.kept = None  # nothing was dropped, so nothing will be asked for
        if self.is_checked:
            self.body.check.learn(self.flow, len(self.saves))
            self.flow = None
            self._note_memory()
        if self.observer is None:
            self.state.after()
        else:
            with self.unseen():
                self.state.after()
        if self.boundary is not None:
            self.offload_entry(self.boundary)
        return result

    def _first_run_in(
        self,
        recorded: AbstractContextManager[None],
        observing: AbstractContextManager[global_hooks.Record | None],
        args: Any,
        kwargs: Any,
    ) -> Any:
        with recorded, observing as self.hooks:
            if self.operations is None or self.kept is None:
                return self.run(*args, **kwargs)
            with Keeping(self.operations, self.kept):
                return self.run(*args, **kwargs)

    def _note_memory(self) -> None:
        """Of saves: forgets what nobody else has or the recompute reads again, notes what the others hold."""
        known: set[int] | None = None
        for ref in self.saves:
            save = None if ref is None else ref()
            if save is None or save.memory is None:
                continue
            address = save.memory.address
            if address is not None and known is None:
                known = known_memory((*self.staying(), *self.state.read_tensors()))
            if address is None or address in (known or ()):
                save.memory = None
            else:
                save.memory.note(None if save.is_sampled else save.fingerprint)
                outliving.wait(save.memory)

    def offload_entry(self, boundary: Boundary) -> None:
        """Lets inputs leave until the recompute."""
        for index, version in self.versions:
            check_version(self.leaves[index], version, self.body.path)
        held = boundary.offload.hold((self.leaves[index] for index in self.moving), boundary.ahead_bytes)
        for index, item in zip(self.moving, held, strict=True):
            self.leaves[index] = item

    def pack(self, tensor: Tensor) -> object:
        """What autograd gets in place of a tensor that it saves in the first run."""
        if is_parameter(tensor):
            return _Held(tensor, self.body.path)
        is_strided = tensor.layout is torch.strided
        if not is_strided and is_sparse(tensor):  # a graph, mostly, which is there before and after the step
            return _Held(tensor.detach(), self.body.path, origin_of(tensor))
        outside = self.outside
        if (
            self.kept.hold(tensor)
            if self.kept is not None
            else bool(outside) and is_strided and storage_of(tensor) in outside
        ):
            self.saves.append(None)  # numbered all the same, as the recompute does
            if self.flow is not None:
                self.flow.add(tensor)
            return _Held(detached(tensor), self.body.path, origin_of(tensor))
        about, observer = (self, len(self.saves), tensor), self.observer
        saved = Saved(*about) if observer is None else _Reported(*about, observer)
        self.saves.append(weakref.ref(saved))
        if self.flow is not None:
            self.flow.add(tensor)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """The tensor behind one that was dropped, for backward.

        Raises:
            RuntimeError: it was changed in place.
            RecomputeError: the recompute went another way than the first.
        """
        if isinstance(saved, _Reported):
            saved.observer.on_unpack(saved.save)
        task = torch._C._current_graph_task_id()
        values = self.recomputed.get(task)
        if values is None or saved.index not in values:
            # First use in this backward, or a second use of one that was handed out already.
            self.recomputed.clear()
            values = self.recomputed[task] = self.run_again()
        tensor, version = values.pop(saved.index)
        if tensor._version != version:
            check_version(tensor, version, self.body.path)
        if saved.memory is not None:
            check, path, index = self.body.check, self.body.path, saved.index
            if saved.memory.differs(tensor, lambda: check.fail(outliving.error_of(path, index))):
                raise check.fail(outliving.error_of(path, index))
        return tensor

    def run_again(self) -> dict[int, tuple[Tensor, int]]:
        """The recompute. Returns the saved tensors that are still wanted, by number, with their versions."""
        alive = [save() for save in self.saves if save is not None]
        recompute = Recompute(self, [save for save in alive if save is not None])
        # What was kept is for one recompute; another one at the same time, in another thread, finds nothing.
        kept, self.kept = self.kept, None
        try:
            self._run_under(recompute, kept or KeptOutputs())
        finally:
            # A graph of the recompute that the forward has kept somewhere holds `pack`, and with it these.
            recompute.wanted.clear()
            if kept is not None:
                kept.clear()
        if recompute.difference is not None:
            raise self.body.check.fail(self.state.moved or self._error(*recompute.difference))
        if recompute.is_over:
            return recompute.values
        path, count = self.body.path, f"{recompute.count} tensors instead of {len(self.saves)}"
        what = f"the recompute of module {path!r} saved {count}"
        raise self.body.check.fail(RecomputeError(what, path, None, OTHER_WAY))

    def _run_under(self, recompute: Recompute, kept: KeptOutputs) -> None:
        args, kwargs = self.inputs()
        try:
            with (
                self._set_apart(),
                data_reads.of_recompute(),
                torch.enable_grad(),
                recomputing.of(self.serial),
                self.state.restored(None if self.copies is None else self.copies.restore),
                torch.autograd.graph.saved_tensors_hooks(recompute.pack, _itself),
            ):
                if self.operations is None:
                    self.state.run(self.run, *args, **kwargs)
                else:
                    with Taking(self.operations, kept):
                        self.state.run(self.run, *args, **kwargs)
        except (Stop, Exception):
            # Not always Stop: while PyTorch records the memory history, it loses the exception on its way
            # through the operator and raises SystemError; and a forward may turn what it catches into its
            # own.
            if not recompute.is_over:
                raise
        finally:
            del args, kwargs

    def _set_apart(self) -> AbstractContextManager[Any]:
        """For a recompute: what few of them need."""
        contexts = batched_backward.set_aside(), self.unseen(), global_hooks.silenced(self.hooks)
        needed = [context for context in contexts if not isinstance(context, nullcontext)]
        return _entered(needed) if needed else _NOTHING

    def _error(self, index: int, differs: str, value: Fingerprint, is_sampled: bool) -> RecomputeError:
        """What to raise for a saved tensor that came out otherwise. One more recompute tells why."""
        cause = OTHER_WAY
        if value is not None:
            probe = Recompute(self, [], index, value, is_sampled)
            try:
                self._run_under(probe, KeptOutputs())
            except Exception:
                probe.difference = index, "", None, is_sampled
            cause = SAME_AGAIN if probe.difference is None else OTHER_AGAIN
        return error_of(self.body.path, index, differs, cause)

    def inputs(self) -> tuple[Any, Any]:
        """The arguments of the call, which must not have been changed in place."""
        leaves = list(self.leaves)
        for index, version in self.versions:
            if isinstance(leaves[index], Held):
                leaves[index] = leaves[index].tensor()
            else:
                check_version(leaves[index], version, self.body.path)
        args, kwargs = self.spec.unflatten(leaves)
        return args, kwargs


never_compiled(_Held, Saved, _Reported, _Packing, _unpacked, _entered, _itself, Region, is_sparse)


class CheckpointedForward(StandIn):
    """Stands in for `module.forward` while the technique is attached."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        body: Body,
        operations: KeptOperations | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        super().__init__(module, original)
        self.body = body
        self.operations = operations
        self.boundary = boundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with its saved tensors dropped, or as it is where there is nothing to save."""
        if torch.compiler.is_compiling():  # first of all: the compiler cannot see through what follows
            plain = self.passive or not torch.is_grad_enabled() or are_filled((*args, *kwargs.values()))
            if plain or not checkpoints_when_compiled():
                return self.run_original(*args, **kwargs)
            return checkpoint(self.run_original, *args, use_reentrant=False, **kwargs)
        aside = self.passive or stands_aside() or came_later(self)
        if aside or are_filled((*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        parts = all_below((self.module,))
        if self.body.has_new_hooks(parts[1:]):
            return self.original(*args, **kwargs)
        region = Region(self.body, parts, self.original, (args, kwargs), self.operations, self.boundary)
        return region.first_run(args, kwargs)


class CheckpointAttachment:
    """Checkpointing of one module, as the executor attaches it.

    Args:
        module: whose forward is to run twice.
        path: its qualified name.
        buffers: registered buffers that the forward changes.
        uses: what else it uses.
        foreign: tensors from outside model and arguments that it reads.
        kept: operations whose outputs wait for the recompute, so that it need not compute them again; by
            name (`op_facts.facts(func).name`) and by how many of that name a call has run before. What is not
            safe to keep is computed again, so any set gives the same gradients.
        boundary: as for `Region`.
        check: of its recomputes.
        in_process: places of the process that it changes.
    """

    name = "checkpoint"

    def __init__(
        self,
        module: nn.Module,
        path: str,
        buffers: Sequence[BufferRef] = (),
        uses: Uses = NO_USES,
        foreign: Sequence[weakref.ref[Tensor]] = (),
        kept: Kept = frozenset(),
        boundary: Boundary | None = None,
        check: RecomputeCheck = UNCHECKED,
        in_process: Sequence[KeptPlace] = (),
    ) -> None:
        self.module = module
        self.path = path
        self.check = check
        self.buffers = buffers
        self.uses = uses
        self.foreign = list(foreign)
        self.kept = kept
        self.boundary = boundary
        self.in_process = in_process

    def attach(self) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced.
        """
        self.slot = ForwardSlot(self.module, self.path)
        body = Body(self.path, self.buffers, self.uses, self.foreign, self.check, self.in_process)
        operations = KeptOperations(self.kept) if self.kept else None
        present = self.slot.present
        self.slot.put(CheckpointedForward(self.module, present, body, operations, self.boundary))
        data_reads.watch(self.module)

    def undo(self) -> None:
        """Restores `module.forward`."""
        self.slot.remove()
        data_reads.unwatch(self.module)
