# SPDX-License-Identifier: Apache-2.0
"""Snapshot of what a forward reads beside its arguments, so that a recompute reads the same.

    before the first run   State.before    what there is, with versions and addresses
    after it               forget_unused_rng
    around the second      restored        all of it back, and afterwards the present state again

What can be put back is put back: generators, buffers, training flags, `requires_grad`, rebound parameters,
attributes and what hangs on them (`attribute_tables`), places of the process that the forward is known to
change (`process_tables`), autocast, PyTorch's settings and modes (`torch_settings`), context variables. What
cannot be put back (contents of weights and of tensors from outside) must not have changed, which is checked.

What is put back lies in the modules' registries, where other threads look, too: `exchange_lock`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from memscale.errors import RecomputeError
from memscale.state.attribute_tables import AttributeTables, has_foreign_hooks
from memscale.state.module_notes import ModuleNotes, Stamp, stamp_of, stamps_of, version_of
from memscale.state.process_tables import Kept, KeptTensors
from memscale.techniques.checkpoint.autocast_state import AutocastPresent, autocast_state
from memscale.techniques.checkpoint.buffer_copies import Place, copies_of, views_in_attributes
from memscale.techniques.checkpoint.context_copies import ContextCopy
from memscale.techniques.checkpoint.copied_tensors import is_copied
from memscale.techniques.checkpoint.late_hooks import hooks_taken_off
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.techniques.checkpoint.registered import PresentModules, Registered, bound, refill, set_flags
from memscale.techniques.checkpoint.whole_recomputes import runs_to_the_end
from memscale.techniques.checkpoint.written_tensors import WrittenTensors, tensors_beside
from memscale.torchkit import cached_casts, python_generators
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.exchange_lock import lock_of
from memscale.torchkit.leaves import gradients_of, has_gradient_hooks
from memscale.torchkit.torch_settings import TorchSettings, has_modes, users_modes, without_modes
from memscale.uninterrupted import uninterrupted
from memscale.weights.placed_gradients import set_gradient

BufferRef = tuple[nn.Module, str]
"""A registered buffer, as its module and its name there."""


def check_version(tensor: Tensor, version: int, path: str, origin: str = "") -> None:
    """Raises what autograd raises for a saved tensor that has changed.

    Args:
        tensor: as it is now.
        version: its version when it was saved.
        path: of the module that needs it.
        origin: where it comes from, in autograd's words; "" for naming the module instead.

    Raises:
        RuntimeError: it has changed.
    """
    if version_of(tensor) != version:
        whose = origin or f"used by module {path!r}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}], {whose}, is at version "
            f"{version_of(tensor)}; "
            f"expected version {version} instead"
        )


class Uses(NamedTuple):
    """What a forward uses beside modules and arguments, as far as is known before it runs.

    Such a generator is replayed even where it ends where it began, as behind `torch.random.fork_rng()`.
    """

    torch_generators: bool = False
    python_generators: bool = False  # or NumPy's
    gradients: bool = False  # of parameters; or it runs a backward of its own


NO_USES: Final = Uses()


class Body:
    """What is known of a forward that is to be run twice.

    Attributes:
        path: of the module, for errors.
        uses: what else it uses.
        foreign: tensors from outside model and arguments that it reads.
        check: of its recomputes.
        kept: places of the process that it changes.
        writes_past_versions: it may write to tensors without moving their versions.
        has_cards: the process has cards.
        device_kinds: devices whose generators and autocast count.
    """

    def __init__(
        self,
        path: str,
        buffers: Sequence[BufferRef] = (),
        uses: Uses = NO_USES,
        foreign: Sequence[weakref.ref[Tensor]] = (),
        check: RecomputeCheck = UNCHECKED,
        kept: Sequence[Kept] = (),
    ) -> None:
        self.path = path
        self.check = check
        self.kept = tuple(kept)
        self.writes_past_versions = any(
            place.past_versions for place in kept if isinstance(place, KeptTensors)
        )
        self._buffers = [(weakref.ref(owner), name) for owner, name in buffers]
        self.uses = uses
        self._has_warned_of_hooks = False
        self._is_whole: bool | None = None
        self.foreign = tuple(foreign)
        self.has_cards = torch.cuda.is_available()
        self.device_kinds = ("cpu", "cuda") if self.has_cards else ("cpu",)

    def is_recomputed_whole(self, parts: Iterable[nn.Module]) -> bool:
        """Whether a recompute does not end as soon as all is there, by the code of its modules."""
        if self._is_whole is None:
            self._is_whole = runs_to_the_end(parts)
        return self._is_whole

    def has_new_hooks(self, parts: Iterable[nn.Module]) -> bool:
        """Whether one of the modules has got a hook since the plan was made: then a forward runs as it is.

        A hook that was there before the step has led to another plan. This one came in the middle of it.
        """
        hooked = [part for part in parts if part._forward_hooks or part._forward_pre_hooks]
        if not any(map(has_foreign_hooks, hooked)):
            return False
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            logging.getLogger("memscale").warning(
                "a forward hook came to a part of %r while the model ran: its calls are not checkpointed "
                "while the hook is there, and take more memory than planned",
                self.path,
            )
        return True

    @property
    def buffers(self) -> list[BufferRef]:
        """Buffers that the forward changes."""
        owners = [(owner(), name) for owner, name in self._buffers]
        return [(owner, name) for owner, name in owners if owner is not None]


_NONE_WRITTEN: Final = WrittenTensors(())


class State:
    """Everything beside the arguments that decides what a forward computes."""

    __slots__ = (
        "_registered", "attributes", "autocast", "buffers", "changing", "check", "context", "copies",
        "cpu_rng", "cuda_rng", "foreign", "generators", "gradients", "has_graded", "has_hooked",
        "is_checked", "leaves", "moved", "next_hook", "notes", "path", "settings", "uses", "views", "written",
    )  # fmt: skip

    attributes: AttributeTables
    context: ContextCopy
    notes: ModuleNotes
    settings: TorchSettings
    written: WrittenTensors

    def __init__(self) -> None:
        self._registered: Registered | None = None
        self.autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.changing: frozenset[int] = frozenset()  # ids of these buffers as they were bound
        self.views: list[tuple[Place, Tensor]] = []  # of the same memory, in attributes
        self.cpu_rng: bytes | Tensor | None = None
        self.cuda_rng: dict[int, Tensor] = {}
        self.uses = NO_USES
        self.has_graded, self.has_hooked = False, True  # until the call is over
        self.path = ""
        self.check = UNCHECKED
        self.is_checked = False  # the values of recomputes tell whether what has moved is the same
        self.moved: RecomputeError | None = None
        # (where it is, its name there, tensor, stamp, copy) of small ones that the call reads.
        self.copies: list[tuple[dict[str, Any], str, Tensor, Stamp, Tensor]] = []
        self.foreign: list[tuple[Tensor, Stamp]] = []
        self.leaves: list[Tensor] = []  # that get gradients
        self.gradients: list[tuple[int, int]] = []  # of these

    @property
    def registered(self) -> Registered:
        """What is in the modules, name by name."""
        if self._registered is None:
            self._registered = Registered(self.notes)
        return self._registered

    @property
    def flags(self) -> list[tuple[nn.Module, bool]]:
        """Modules, and which were in training mode."""
        return list(zip(self.notes.modules, self.notes.flags, strict=True))

    @property
    def tensors(self) -> list[tuple[dict[str, Any], str, Tensor, Stamp, bool]]:
        """(registry, name, tensor, stamp, requires_grad) of every parameter and buffer."""
        return self.registered.tensors

    @classmethod
    def before(cls, body: Body, parts: Sequence[nn.Module], leaves: Sequence[Any]) -> State:
        """Reads the state that a call is about to use.

        Args:
            body: what runs.
            parts: whose parameters, buffers, flags and attributes it reads: `all_below` of its modules.
            leaves: its arguments.
        """
        state = cls()
        state.path, state.check = body.path, body.check
        state.settings = TorchSettings()
        modes = users_modes()
        if not modes:
            state._read(body, parts, leaves, ())
            return state
        with without_modes():
            # Not those of operators: they may follow tensors, and what a recompute makes lives on.
            functions = [mode for mode in modes if isinstance(mode, TorchFunctionMode)]
            state._read(body, parts, leaves, functions)
        return state

    def _read(
        self, body: Body, parts: Sequence[nn.Module], leaves: Sequence[Any], modes: Sequence[Any]
    ) -> None:
        if body.foreign:
            alive = [ref() for ref in body.foreign]
            self.foreign = [(tensor, stamp_of(tensor)) for tensor in alive if tensor is not None]
        changing = body.buffers
        with lock_of([*parts, *(owner for owner, _ in changing)] if changing else parts):
            self.attributes = AttributeTables(parts, body.kept, modes, [tensor for tensor, _ in self.foreign])
            self.notes = self.attributes.notes
            if changing:
                self._copy_changing(parts, changing)
            self._copy_small(changing)
            if self.foreign:
                self._copy_attributes(parts)
        found = self.attributes.tensors
        if self.attributes.referred:
            found = [*found, *tensors_beside(parts, self.attributes.referred)]
        self.written = WrittenTensors(found, body.writes_past_versions) if found else _NONE_WRITTEN
        self.attributes.tensors, self.attributes.referred = [], []
        self.next_hook = RemovableHandle.next_id
        notes = self.notes
        self.leaves = [
            tensor
            for tensor, graded in zip(notes.tensors, notes.graded, strict=True)
            if graded and tensor.is_leaf
        ]
        self.gradients = gradients_of(self.leaves)
        self.context = ContextCopy()
        self.autocast = [autocast_state(kind) for kind in body.device_kinds]
        draws = body.uses.torch_generators  # what most calls need for a moment only takes no tensor
        self.cpu_rng = torch.get_rng_state() if draws else python_generators.cpu_state()
        if "cuda" in body.device_kinds:
            devices = {leaf.get_device() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
            self.cuda_rng = {device: torch.cuda.get_rng_state(device) for device in devices}
        self.uses = body.uses
        self.generators: python_generators.States | None = python_generators.present()

    def _copy_small(self, changing: Sequence[BufferRef]) -> None:
        """Copies small tensors that are registered, but for buffers that the call changes."""
        plain = [tensor for tensor in self.notes.tensors if type(tensor) is Tensor]
        if not any(is_copied(tensor) and id(tensor) not in self.changing for tensor in plain):
            return
        copied = {(id(module._buffers), name) for module, name in changing}
        for registry, name, value, stamp, _ in self.tensors:
            if is_copied(value) and (id(registry), name) not in copied:
                self.copies.append((registry, name, value, stamp, value.clone()))

    def _copy_changing(self, parts: Sequence[nn.Module], changing: Sequence[BufferRef]) -> None:
        """Copies buffers that the call changes, each once, whatever its names, and with them other views."""
        places = [(module, name, module._buffers[name]) for module, name in changing]
        buffers = [value for *_, value in places if value is not None]
        views = views_in_attributes(parts, buffers)
        clones = copies_of([*buffers, *(value for _, value in views)])
        self.buffers = [
            (module, name, clones[id(value)]) for module, name, value in places if value is not None
        ]
        self.changing = frozenset(map(id, buffers))
        self.views = [(place, clones[id(value)]) for place, value in views]

    def _copy_attributes(self, parts: Sequence[nn.Module]) -> None:
        """Copies small tensors from outside that are plain attributes."""
        small = {id(tensor): stamp for tensor, stamp in self.foreign if is_copied(tensor)}
        for module in parts if small else ():
            for name, value in module.__dict__.items():
                if isinstance(value, Tensor) and id(value) in small:
                    self.copies.append((module.__dict__, name, value, small[id(value)], value.clone()))

    def after(self) -> None:
        """What the call has done decides what a recompute needs and may do."""
        self.written.after()
        self.has_hooked = RemovableHandle.next_id != self.next_hook
        self.has_graded = gradients_of(self.leaves) != self.gradients
        if not self.uses.python_generators and self.generators is not None and self.generators.are_present():
            self.generators = None
        if not self.uses.torch_generators:
            if not has_modes():
                self._forget_unused_rng()
                return
            with without_modes():
                self._forget_unused_rng()

    def read_tensors(self) -> list[Any]:
        """Parameters, buffers and tensors from outside that the call reads, and copies of them."""
        copied = [item[2] for item in self.copies]
        buffers = [module._buffers.get(name) for module, name, _ in self.buffers]
        return self.notes.tensors + [item[0] for item in self.foreign] + copied + buffers

    def _forget_unused_rng(self) -> None:
        """A generator that nobody is known to use and that did not move need not be replayed."""
        if isinstance(self.cpu_rng, bytes):
            state, self.cpu_rng = self.cpu_rng, None
            if state != python_generators.cpu_state():
                self.cpu_rng = python_generators.cpu_tensor(state).clone()
        for device, before in list(self.cuda_rng.items()):
            if torch.equal(before, torch.cuda.get_rng_state(device)):
                del self.cuda_rng[device]

    @contextmanager
    def restored(self, more: Callable[[ExitStack], None] | None = None) -> Iterator[None]:
        """Puts the state back for the recompute, and the present one back afterwards.

        All of the present one: a recompute ends with the last tensor that is wanted, before its code has put
        back by itself what it has set.

        Args:
            more: puts back what else there is, until the stack closes.

        Raises:
            RecomputeError: a recompute would do something twice.
        """
        if self.has_graded and any(map(has_gradient_hooks, self.leaves)):
            what = f"the forward of module {self.path!r} changes gradients of parameters"
            raise self.check.fail(RecomputeError(what, self.path, None, _GRADED))
        is_same = self.attributes.are_modules_same()
        differing = self.attributes.differing(is_same)
        changed = self._changed_copies()
        exchanges = bool(differing or changed) or not (is_same or not (self.buffers or self._has_gone()))
        with ExitStack() as stack:
            if exchanges or self.buffers:
                stack.enter_context(self._lock())
            if has_modes():
                stack.enter_context(without_modes())
            if self.has_hooked:
                stack.enter_context(hooks_taken_off())
            if self.uses.gradients or self.has_graded:
                self._hide_gradients(stack)
            if exchanges:
                stack.callback(PresentModules(self.notes, self.registered).put_back)
            else:
                stack.callback(self._undo, is_same)
            self._enter_autocast(stack)
            self._replay_generators(stack)
            self._check_contents({id(tensor) for _, _, tensor, _, _ in changed})
            self.written.protect(stack)
            if exchanges:
                self._restore_modules()
            copies = self._exchange_buffers(stack) if self.buffers else {}
            self.attributes.restore(stack, differing, self._taken, is_same and not exchanges)
            for (holder, key), before in self.views:
                stack.callback(holder.__setitem__, key, holder[key])
                holder[key] = copies[id(before)]
            for place, name, _, _, before in changed:
                stack.callback(place.__setitem__, name, place[name])
                place[name] = before.clone()
            if more is not None:
                more(stack)
            self.settings.restore(stack)
            try:
                yield
            finally:
                with uninterrupted():
                    stack.close()

    def _enter_autocast(self, stack: ExitStack) -> None:
        """Autocast as the forward had it."""
        present = AutocastPresent(kind for kind, *_ in self.autocast)
        stack.callback(present.put_back)
        for (kind, dtype, enabled, cached), now in zip(self.autocast, present.states, strict=True):
            if enabled or now[2]:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        if present.nesting and not cached_casts.has_any(self.notes.tensors):
            # The casts of a recompute would be there until the caller's block ends, after a step, too.
            torch.set_autocast_cache_enabled(False)

    def _replay_generators(self, stack: ExitStack) -> None:
        """Random generators as the forward found them."""
        if self.cpu_rng is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            python_generators.set_cpu(self.cpu_rng)
        for device, before in self.cuda_rng.items():
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
            torch.cuda.set_rng_state(before, device)
        if self.generators is not None:
            stack.callback(python_generators.present().put_back)
            self.generators.put_back()

    def _undo(self, were_same: bool) -> None:
        """Takes back what a recompute has set in modules that were as its forward had them."""
        if self.attributes.are_modules_same():
            return
        if were_same:
            self.attributes.put_modules_back()
        if self._has_gone():
            with self._lock():
                if self._has_gone():
                    self._restore_modules(with_changing=True)

    def _hide_gradients(self, stack: ExitStack) -> None:
        """Gradients that have come since the call, or that its forward has changed once already.

        Not where nobody is known to look: another thread may add to them at the same time.
        """
        for tensor in self.leaves:
            stack.callback(set_gradient, tensor, tensor.grad)
            tensor.grad = None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with the context variables of the first run. What it sets of them is lost."""
        return self.context.run(function, *args, **kwargs)

    def _changed_copies(self) -> list[tuple[dict[str, Any], str, Tensor, Stamp, Tensor]]:
        """Of `copies`: those whose tensors have changed since."""
        return [item for item in self.copies if stamp_of(item[2]) != item[3]]

    def _has_gone(self) -> bool:
        """Whether modules have anything else now than what was written down.

        Who does not hold the lock may see another thread's for a moment, and then looks again with the lock.
        """
        registered, notes = self.registered, self.notes
        if notes.flags != [module.training for module in notes.modules]:
            return True
        if notes.kinds != list(map(type, notes.modules)):
            return True
        if any(tuple(registry.keys()) != names for registry, names in registered.registries):
            return True
        if any(bound(registry, name) is not None for registry, name in registered.vacant):
            return True
        return any(
            bound(registry, name) is not tensor or (tensor.requires_grad != before and tensor.is_leaf)
            for registry, name, tensor, _, before in registered.tensors
        )

    def _lock(self) -> AbstractContextManager[Any]:
        owners = (module for module, *_ in self.buffers)
        return lock_of([*self.notes.modules, *owners])

    def _check_contents(self, copied: Collection[int]) -> None:
        """A weight that plain autograd need not have saved is read again here, so it must be the same.

        Args:
            copied: ids of tensors that have changed and were copied before.
        """
        for tensor, stamp in self.foreign:
            if stamp_of(tensor) != stamp and id(tensor) not in copied:
                self._has_changed(tensor, stamp)
        notes, now = self.notes, stamps_of(self.notes.tensors)
        if now == notes.stamps or all(
            stamp == before or id(tensor) in self.changing
            for tensor, before, stamp in zip(notes.tensors, notes.stamps, now, strict=True)
        ):
            return
        changed = self._changed_places()
        for registry, name, tensor, stamp, _ in self.tensors:
            if stamp_of(tensor) != stamp and id(tensor) not in copied and (id(registry), name) not in changed:
                self._has_changed(tensor, stamp)

    def _has_changed(self, tensor: Tensor, stamp: Stamp) -> None:
        """A tensor has changed since the call: raises autograd's words where it has some.

        One that has moved may hold the same: a streamed weight after `detach`, a model sent to and fro.
        """
        what = f"a tensor that module {self.path!r} reads was given other data (`.data = ...`)"
        has_moved = True
        try:
            check_version(tensor, stamp[0], self.path)
        except RuntimeError as found:
            what, has_moved = str(found), False
        error = RecomputeError(what, self.path, None, _CHANGED)
        if not (has_moved and self.is_checked):
            raise self.check.fail(error)
        self.moved = error

    def _taken(self, name: str) -> RecomputeError:
        what = f"the forward of module {self.path!r} takes from a {name}, which cannot be copied"
        return self.check.fail(RecomputeError(what, self.path, None, _TAKEN))

    def _changed_places(self) -> set[tuple[int, str]]:
        return {(id(module._buffers), name) for module, name, _ in self.buffers}

    def _restore_modules(self, with_changing: bool = False) -> None:
        """The same weights, flags and buffers as in the first run, whatever has been bound or set since.

        Args:
            with_changing: buffers that the call changes, too. They are not exchanged for copies.
        """
        notes, registered = self.notes, self.registered
        for module, training, kind in zip(notes.modules, notes.flags, notes.kinds, strict=True):
            set_flags(module, training, kind)
        changed = set() if with_changing else self._changed_places()
        for registry, names in registered.registries:
            if tuple(registry.keys()) != names:
                refill(registry, {name: registry.get(name) for name in names})
        for registry, name in registered.vacant:
            if registry[name] is not None:
                registry[name] = None
        for registry, name, tensor, _, requires_grad in registered.tensors:
            if (id(registry), name) in changed:
                continue
            if bound(registry, name) is not tensor:
                registry[name] = tensor
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)

    def _exchange_buffers(self, stack: ExitStack) -> dict[int, Tensor]:
        """Copies of what buffers held in place of them, until `stack` closes.

        Returns:
            Copies of what is held of buffers and views, by its id: a second backward (retain_graph) starts
            from the same values again.
        """
        again = copies_of([*(before for *_, before in self.buffers), *(before for _, before in self.views)])
        copies: dict[int, Tensor] = {}
        for module, name, before in self.buffers:
            present = module._buffers[name]
            stack.callback(module._buffers.__setitem__, name, present)
            module._buffers[name] = copies.setdefault(id(present), again[id(before)])
        # The same buffer by another name.
        if sum(id(tensor) in copies for tensor in self.notes.tensors) > len(self.buffers):
            for registry, name, tensor, *_ in self.tensors:
                if id(tensor) in copies and bound(registry, name) is tensor:
                    stack.callback(registry.__setitem__, name, tensor)
                    registry[name] = copies[id(tensor)]
        return again


_GRADED: Final = "it runs a backward of its own, for which hooks on parameters would fire twice"

_TAKEN: Final = "what a forward has taken from an iterator cannot be given back for its recompute"

_CHANGED: Final = "a tensor that its forward reads has changed between forward and backward"


def all_below(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules and what they contain, each once."""
    found: dict[nn.Module, None] = {}
    pending = [*modules][::-1]
    while pending:
        module = pending.pop()
        if module in found:
            continue
        found[module] = None
        children = module._modules
        if children:
            pending += [child for child in [*children.values()][::-1] if child is not None]
    return list(found)


never_compiled(check_version, is_copied, Body, State, all_below)
