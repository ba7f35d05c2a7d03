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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from memscale.errors import RecomputeError
from memscale.state.attribute_tables import AttributeTables, has_foreign_hooks
from memscale.state.process_tables import Kept, KeptTensors
from memscale.techniques.checkpoint.autocast_state import AutocastPresent, autocast_nesting, autocast_state
from memscale.techniques.checkpoint.buffer_copies import Place, copies_of, views_in_attributes
from memscale.techniques.checkpoint.context_copies import ContextCopy
from memscale.techniques.checkpoint.copied_tensors import is_copied
from memscale.techniques.checkpoint.late_hooks import hooks_taken_off
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.techniques.checkpoint.whole_recomputes import runs_to_the_end
from memscale.techniques.checkpoint.written_tensors import WrittenTensors, tensors_beside
from memscale.torchkit import cached_casts, python_generators
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.exchange_lock import lock_of
from memscale.torchkit.leaves import gradient_of, has_gradient_hooks
from memscale.torchkit.torch_settings import TorchSettings, has_modes, users_modes, without_modes
from memscale.uninterrupted import uninterrupted
from memscale.weights.placed_gradients import set_gradient
from memscale.weights.placement import lasting_address

BufferRef = tuple[nn.Module, str]
"""A registered buffer, as its module and its name there."""

Stamp = tuple[int, int]
"""Version and storage of a tensor: in-place changes move the one, `.data = ...` the other.

Not the address: FSDP gives a parameter's memory back after forward and fills it anew before backward.
"""


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


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; -1 for one from inference mode, which has no counter."""
    return -1 if tensor.is_inference() else tensor._version


def stamp_of(tensor: Tensor) -> Stamp:
    """What moves when a tensor is written to, other than past autograd."""
    has_storage = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return version_of(tensor), lasting_address(tensor) if has_storage else 0


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
        if not any(map(has_foreign_hooks, parts)):
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


class State:
    """Everything beside the arguments that decides what a forward computes."""

    __slots__ = (
        "attributes", "autocast", "buffers", "check", "context", "copies", "cpu_rng", "cuda_rng",
        "flags", "foreign", "generators", "gradients", "has_graded", "has_hooked", "is_checked", "kinds",
        "moved", "next_hook", "path", "registries", "settings", "tensors", "uses", "vacant", "views",
        "written",
    )  # fmt: skip

    attributes: AttributeTables
    context: ContextCopy
    settings: TorchSettings
    written: WrittenTensors

    def __init__(self) -> None:
        self.autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
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
        self.flags: list[tuple[nn.Module, bool]] = []
        self.kinds: list[type[nn.Module]] = []  # of the same modules
        self.foreign: list[tuple[Tensor, Stamp]] = []
        # (registry, name, tensor, stamp, requires_grad) of every parameter and buffer, down to the leaves.
        self.tensors: list[tuple[dict[str, Any], str, Tensor, Stamp, bool]] = []
        # Those of parameters and of buffers, with their names, and names without a tensor.
        self.registries: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.vacant: list[tuple[dict[str, Any], str]] = []

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
        with without_modes() if modes else nullcontext():
            # Not those of operators: they may follow tensors, and what a recompute makes lives on.
            functions = [mode for mode in modes if isinstance(mode, TorchFunctionMode)]
            state._read(body, parts, leaves, functions)
        return state

    def _read(
        self, body: Body, parts: Sequence[nn.Module], leaves: Sequence[Any], modes: Sequence[Any]
    ) -> None:
        alive = [ref() for ref in body.foreign]
        self.foreign = [(tensor, stamp_of(tensor)) for tensor in alive if tensor is not None]
        with lock_of([*parts, *(owner for owner, _ in body.buffers)]):
            self._note_modules(parts, body.buffers)
            if self.foreign:
                self._copy_attributes(parts)
            self.attributes = AttributeTables(parts, body.kept, modes, [tensor for tensor, _ in self.foreign])
        found = [*self.attributes.tensors, *tensors_beside(parts, self.attributes.referred)]
        self.written = WrittenTensors(found, body.writes_past_versions)
        self.attributes.tensors, self.attributes.referred = [], []
        self.next_hook = RemovableHandle.next_id
        self.gradients = [
            (tensor, gradient_of(tensor))
            for _, _, tensor, _, requires_grad in self.tensors
            if requires_grad and tensor.is_leaf
        ]
        self.context = ContextCopy()
        self.autocast = [autocast_state(kind) for kind in body.device_kinds]
        draws = body.uses.torch_generators  # what most calls need for a moment only takes no tensor
        self.cpu_rng = torch.get_rng_state() if draws else python_generators.cpu_state()
        if "cuda" in body.device_kinds:
            devices = {leaf.get_device() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
            self.cuda_rng = {device: torch.cuda.get_rng_state(device) for device in devices}
        self.uses = body.uses
        self.generators: python_generators.States | None = python_generators.present()

    def _note_modules(self, parts: Sequence[nn.Module], changing: Sequence[BufferRef]) -> None:
        """What is in the modules; of buffers that the call changes, copies."""
        copied = {(id(module._buffers), name) for module, name in changing}
        self.kinds = list(map(type, parts))
        for module in parts:
            self.flags.append((module, module.training))
            for registry in (module._parameters, module._buffers):
                self.registries.append((registry, tuple(registry.keys())))
                for name, value in registry.items():
                    if value is None:
                        self.vacant.append((registry, name))
                    else:
                        stamp = stamp_of(value)
                        self.tensors.append((registry, name, value, stamp, value.requires_grad))
                        if is_copied(value) and (id(registry), name) not in copied:
                            self.copies.append((registry, name, value, stamp, value.clone()))
        if changing:
            self._copy_changing(parts, changing)

    def _copy_changing(self, parts: Sequence[nn.Module], changing: Sequence[BufferRef]) -> None:
        """Copies buffers that the call changes, each once, whatever its names, and with them other views."""
        bound = [(module, name, module._buffers[name]) for module, name in changing]
        buffers = [value for *_, value in bound if value is not None]
        views = views_in_attributes(parts, buffers)
        clones = copies_of([*buffers, *(value for _, value in views)])
        self.buffers = [
            (module, name, clones[id(value)]) for module, name, value in bound if value is not None
        ]
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
        self.has_graded = any(gradient_of(tensor) != before for tensor, before in self.gradients)
        if not self.uses.python_generators and self.generators is not None and self.generators.are_present():
            self.generators = None
        if not self.uses.torch_generators:
            with without_modes() if has_modes() else nullcontext():
                self._forget_unused_rng()

    def read_tensors(self) -> list[Any]:
        """Parameters, buffers and tensors from outside that the call reads, and copies of them."""
        copied = [item[2] for item in self.copies]
        buffers = [module._buffers.get(name) for module, name, _ in self.buffers]
        return [item[2] for item in self.tensors] + [item[0] for item in self.foreign] + copied + buffers

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
    def restored(self) -> Iterator[None]:
        """Puts the state back for the recompute, and the present one back afterwards.

        All of the present one: a recompute ends with the last tensor that is wanted, before its code has put
        back by itself what it has set.

        Raises:
            RecomputeError: a recompute would do something twice.
        """
        if self.has_graded and any(has_gradient_hooks(tensor) for tensor, _ in self.gradients):
            what = f"the forward of module {self.path!r} changes gradients of parameters"
            raise self.check.fail(RecomputeError(what, self.path, None, _GRADED))
        differing = self.attributes.differing()
        changed = [item for item in self.copies if stamp_of(item[2]) != item[3]]
        exchanges = bool(differing or changed) or self._has_gone()
        with self._lock() if exchanges else nullcontext(), ExitStack() as stack:
            if has_modes():
                stack.enter_context(without_modes())
            if self.has_hooked:
                stack.enter_context(hooks_taken_off())
            if self.uses.gradients or self.has_graded:
                self._hide_gradients(stack)
            if exchanges:
                stack.callback(_Present(self.flags, self.registries, self.tensors).put_back)
            else:
                stack.callback(self._undo)
            self._enter_autocast(stack)
            self._replay_generators(stack)
            self._check_contents({id(tensor) for _, _, tensor, _, _ in changed})
            self.written.protect(stack)
            copies = self._restore_modules() if exchanges else {}
            self.attributes.restore(stack, differing, self._taken)
            for (holder, key), before in self.views:
                stack.callback(holder.__setitem__, key, holder[key])
                holder[key] = copies[id(before)]
            for place, name, _, _, before in changed:
                stack.callback(place.__setitem__, name, place[name])
                place[name] = before.clone()
            self.settings.restore(stack)
            try:
                yield
            finally:
                with uninterrupted():
                    stack.close()

    def _enter_autocast(self, stack: ExitStack) -> None:
        """Autocast as the forward had it."""
        stack.callback(AutocastPresent(kind for kind, *_ in self.autocast).put_back)
        nesting = autocast_nesting()
        for kind, dtype, enabled, cached in self.autocast:
            if enabled or autocast_state(kind)[2]:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        if nesting and not cached_casts.has_any(item[2] for item in self.tensors):
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

    def _undo(self) -> None:
        """Takes back what a recompute has set in modules that were as its forward had them."""
        if self._has_gone():
            with self._lock():
                if self._has_gone():
                    self._restore_modules()

    def _hide_gradients(self, stack: ExitStack) -> None:
        """Gradients that have come since the call, or that its forward has changed once already.

        Not where nobody is known to look: another thread may add to them at the same time.
        """
        for tensor, _ in self.gradients:
            stack.callback(set_gradient, tensor, tensor.grad)
            tensor.grad = None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with the context variables of the first run. What it sets of them is lost."""
        return self.context.run(function, *args, **kwargs)

    def _has_gone(self) -> bool:
        """Whether modules have anything else now than what was written down.

        Who does not hold the lock may see another thread's for a moment, and then looks again with the lock.
        """
        if self.buffers or any(module.training != training for module, training in self.flags):
            return True
        if [type(module) for module, _ in self.flags] != self.kinds:
            return True
        if any(tuple(registry.keys()) != names for registry, names in self.registries):
            return True
        if any(_bound(registry, name) is not None for registry, name in self.vacant):
            return True
        return any(
            _bound(registry, name) is not tensor or (tensor.requires_grad != before and tensor.is_leaf)
            for registry, name, tensor, _, before in self.tensors
        )

    def _lock(self) -> AbstractContextManager[Any]:
        owners = (module for module, *_ in self.buffers)
        return lock_of([*(module for module, _ in self.flags), *owners])

    def _check_contents(self, copied: Collection[int]) -> None:
        """A weight that plain autograd need not have saved is read again here, so it must be the same.

        Args:
            copied: ids of tensors that have changed and were copied before.
        """
        for tensor, stamp in self.foreign:
            if stamp_of(tensor) != stamp and id(tensor) not in copied:
                self._has_changed(tensor, stamp)
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

    def _restore_modules(self) -> dict[int, Tensor]:
        """The same weights, flags and buffers as in the first run, whatever has been bound or set since.

        Returns:
            Copies of what is held of buffers and views, by its id: a second backward (retain_graph) starts
            from the same values again.
        """
        for (module, training), kind in zip(self.flags, self.kinds, strict=True):
            _set_flags(module, training, kind)
        changed = self._changed_places()
        for registry, names in self.registries:
            if tuple(registry.keys()) != names:
                _refill(registry, {name: registry.get(name) for name in names})
        for registry, name in self.vacant:
            if registry[name] is not None:
                registry[name] = None
        for registry, name, tensor, _, requires_grad in self.tensors:
            if (id(registry), name) in changed:
                continue
            if _bound(registry, name) is not tensor:
                registry[name] = tensor
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
        again = copies_of([*(before for *_, before in self.buffers), *(before for _, before in self.views)])
        copies: dict[int, Tensor] = {}
        for module, name, before in self.buffers:
            present = module._buffers[name]
            module._buffers[name] = copies.setdefault(id(present), again[id(before)])
        for registry, name, tensor, *_ in self.tensors if copies else ():
            if id(tensor) in copies and _bound(registry, name) is tensor:  # the same buffer by another name
                registry[name] = copies[id(tensor)]
        return again


class _Present:
    """What modules have before a recompute: flags, what is registered, and who requires gradients."""

    def __init__(
        self,
        flags: Sequence[tuple[nn.Module, bool]],
        registries: Sequence[tuple[dict[str, Any], tuple[str, ...]]],
        tensors: Sequence[tuple[dict[str, Any], str, Tensor, Stamp, bool]],
    ) -> None:
        self._flags = [(module, module.training, type(module)) for module, _ in flags]
        # A scripted module's registry gives other objects each time.
        self._registries = [
            (registry, dict(registry)) for registry, _ in registries if isinstance(registry, dict)
        ]
        self._leaves = [(item[2], item[2].requires_grad) for item in tensors if item[2].is_leaf]

    def put_back(self) -> None:
        for module, training, kind in self._flags:
            _set_flags(module, training, kind)
        for registry, before in self._registries:
            if registry.keys() != before.keys() or any(registry[name] is not before[name] for name in before):
                _refill(registry, before)
        for tensor, requires_grad in self._leaves:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def _set_flags(module: nn.Module, training: bool, kind: type[nn.Module]) -> None:
    if module.training != training:
        module.training = training
    if type(module) is not kind:
        module.__class__ = kind


_GRADED: Final = "it runs a backward of its own, for which hooks on parameters would fire twice"

_TAKEN: Final = "what a forward has taken from an iterator cannot be given back for its recompute"

_CHANGED: Final = "a tensor that its forward reads has changed between forward and backward"


def _bound(registry: dict[str, Any], name: str) -> Any:
    # A scripted module's registry has no `get`.
    return registry[name] if name in registry else None  # noqa: SIM401


def _refill(registry: dict[str, Any], values: dict[str, Any]) -> None:
    registry.clear()
    registry.update(values)


def all_below(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules and what they contain, each once."""
    found: dict[nn.Module, None] = {}
    for module in modules:
        _add_below(module, found)
    return list(found)


def _add_below(module: nn.Module, found: dict[nn.Module, None]) -> None:
    if module in found:
        return
    found[module] = None
    for child in module._modules.values():
        if child is not None:
            _add_below(child, found)


never_compiled(check_version, version_of, stamp_of, is_copied, Body, State)
never_compiled(all_below, _add_below)
