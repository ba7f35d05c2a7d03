# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing of one module: drop what its forward saves, run it again in backward.

    forward    run the module; every tensor that autograd would save becomes a numbered placeholder
    backward   the first placeholder that is asked for runs the forward once more, from the same inputs,
               random state, buffers and autocast state, and stops as soon as the last number is reached

The second run must be invisible, so everything that the first run could have changed is put back:

* random number generators replay the first run's numbers, then continue where they were;
* module buffers that the forward updates (running statistics) are exchanged for copies of their value
  before the first run, so the second run reads what the first one read and updates throw-away copies;
* what cannot be put back (in-place writes to foreign tensors, changed Python attributes) is found by the
  planner beforehand, and such a module is never given to this technique.

Three silent ways to a wrong gradient are turned into errors here: an input changed in place after the
first run, a saved tensor changed in place before its use (plain autograd's own check is off for tensors
that pass through hooks), and a second run that saves other tensors than the first.

This is not `torch.utils.checkpoint`, because the planner needs three things that it does not give: buffers
that are updated once, random state touched only where there is randomness, and a report of each saved
tensor to a recording profiler. Inside `torch.compile` the call is handed to `torch.utils.checkpoint`,
which the compiler knows.
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from memscale.errors import RecomputeError
from memscale.techniques.forward_slot import ForwardSlot, StandIn

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

BufferRef = tuple[nn.Module, str]
"""A registered buffer, as its module and its name there."""


class SaveObserver(Protocol):
    """A recording profiler that wants to see the saved tensors of checkpointed calls."""

    def on_pack(self, tensor: Tensor) -> object:
        """A tensor was saved; the result names the save in later reports."""

    def on_unpack(self, save: object) -> None:
        """Backward asked for it."""

    def on_release(self, save: object) -> None:
        """Autograd dropped it."""

    def recomputing(self, begins: bool) -> None:
        """A second run begins or ends; what happens in between is not part of the plain step."""


_observer: SaveObserver | None = None


@contextmanager
def observed_by(observer: SaveObserver) -> Iterator[None]:
    """Reports every save of every checkpointed call inside the block to `observer`."""
    global _observer
    before = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = before


class _Stop(BaseException):
    """Ends a second run once everything that backward needs has been saved.

    Not an `Exception`, so that a forward's own `except Exception` does not swallow it.
    """


class _Kept:
    """A saved parameter, or a view of one: kept as it is, with the version that autograd would check."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


class _Saved:
    """Placeholder for one saved tensor. Autograd owns it; the region only watches it."""

    __slots__ = ("__weakref__", "dtype", "index", "region", "report", "shape")

    def __init__(self, region: _Region, index: int, tensor: Tensor) -> None:
        self.region = region
        self.index = index
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.report = None if _observer is None else (_observer, _observer.on_pack(tensor))

    def __del__(self) -> None:
        if self.report is not None:
            self.report[0].on_release(self.report[1])


def _is_parameter(tensor: Tensor) -> bool:
    base = tensor._base
    return isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


class _Region:
    """One execution of a checkpointed forward, from its start until autograd has dropped its last save."""

    __slots__ = ("forward", "leaves", "recomputed", "saves", "spec", "state", "versions")

    def __init__(self, forward: CheckpointedForward, args: Any, kwargs: Any) -> None:
        self.forward = forward
        self.leaves, self.spec = _flatten(args, kwargs)
        self.versions = [(i, leaf._version) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.state = _State.before(forward, self.leaves)
        self.saves: list[weakref.ref[_Saved]] = []
        # Graph task → index → (tensor, version at its save). One backward call is one graph task.
        self.recomputed: dict[int, dict[int, tuple[Tensor, int]]] = {}

    def pack(self, tensor: Tensor) -> object:
        if _is_parameter(tensor):
            return _Kept(tensor)
        saved = _Saved(self, len(self.saves), tensor)
        self.saves.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _Kept):
            _check_version(saved.tensor, saved.version, self.forward.path)
            return saved.tensor
        assert isinstance(saved, _Saved)
        if saved.report is not None:
            saved.report[0].on_unpack(saved.report[1])
        task = torch._C._current_graph_task_id()
        values = self.recomputed.get(task)
        if values is None or saved.index not in values:
            # First use in this backward, or a second use of one that was handed out already.
            self.recomputed.clear()
            values = self.recomputed[task] = self.run_again()
        tensor, version = values.pop(saved.index)
        _check_version(tensor, version, self.forward.path)
        return tensor

    def run_again(self) -> dict[int, tuple[Tensor, int]]:
        """Second run. Returns the saved tensors that are still wanted, by number."""
        alive = [save() for save in self.saves]
        wanted = {save.index: save for save in alive if save is not None}
        last = max(wanted)
        values: dict[int, tuple[Tensor, int]] = {}
        count, stopped = 0, False

        def pack(tensor: Tensor) -> object:
            nonlocal count, stopped
            if _is_parameter(tensor):
                return tensor
            index = count
            count += 1
            value = tensor.detach()
            save = wanted.get(index)
            if save is not None:
                self.check_same(save, value)
                values[index] = (value, value._version)
            if index == last:
                stopped = True
                raise _Stop
            return value

        args, kwargs = self.inputs()
        try:
            with ExitStack() as stack:
                if _observer is not None:
                    _observer.recomputing(True)
                    stack.callback(_observer.recomputing, False)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(self.state.restored())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value))
                self.forward.original(*args, **kwargs)
        except (_Stop, Exception):
            # Not always _Stop: while PyTorch records the memory history, it loses the exception on its way
            # through the operator and raises SystemError; and a forward may turn what it catches into its
            # own.
            if not stopped:
                raise
        finally:
            del args, kwargs
        if stopped:
            return values
        raise RecomputeError(
            f"module {self.forward.path!r} saved {len(self.saves)} tensors in forward but only {count} when "
            "it ran again: its forward must do the same twice; see enable_checkpointing"
        )

    def check_same(self, save: _Saved, value: Tensor) -> None:
        if value.shape != save.shape or value.dtype != save.dtype:
            raise RecomputeError(
                f"module {self.forward.path!r}: saved tensor {save.index} was {tuple(save.shape)} "
                f"{save.dtype} in forward and {tuple(value.shape)} {value.dtype} when the module ran again: "
                "its forward must do the same twice; see enable_checkpointing"
            )

    def inputs(self) -> tuple[Any, Any]:
        for index, version in self.versions:
            _check_version(self.leaves[index], version, self.forward.path)
        args, kwargs = self.spec.unflatten(self.leaves)
        return args, kwargs


def _flatten(args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, spec


def _check_version(tensor: Tensor, version: int, path: str) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}], used by module {path!r}, is at version "
            f"{tensor._version}; "
            f"expected version {version} instead"
        )


Stamp = tuple[int, int]
"""Version and address of a tensor's data: in-place changes move the one, `.data = ...` the other."""


def _stamp(tensor: Tensor) -> Stamp:
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _check_stamp(tensor: Tensor, stamp: Stamp, path: str) -> None:
    if _stamp(tensor) != stamp:
        _check_version(tensor, stamp[0], path)
        raise RuntimeError(
            f"a tensor that module {path!r} reads was given other data between forward and backward "
            "(`.data = ...`): the checkpointed forward cannot be run again on what it read"
        )


class _State:
    """Everything beside the arguments that decides what a forward computes."""

    __slots__ = (
        "autocast",
        "buffers",
        "cpu_rng",
        "cuda_rng",
        "flags",
        "foreign",
        "path",
        "python_rng",
        "tensors",
    )

    def __init__(self) -> None:
        self.autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.cpu_rng: Tensor | None = None
        self.cuda_rng: dict[int, Tensor] = {}
        self.python_rng: Any = None
        self.path = ""
        self.flags: list[tuple[nn.Module, bool]] = []
        self.foreign: list[tuple[Tensor, Stamp]] = []
        # (registry, name, tensor, stamp, requires_grad) of every parameter and buffer, down to the leaves.
        self.tensors: list[tuple[dict[str, Any], str, Tensor, Stamp, bool]] = []

    @classmethod
    def before(cls, forward: CheckpointedForward, leaves: Sequence[Any]) -> _State:
        """Reads the state that a call is about to use."""
        state = cls()
        state.path = forward.path
        alive = [ref() for ref in forward.foreign]
        state.foreign = [(tensor, _stamp(tensor)) for tensor in alive if tensor is not None]
        for module in forward.module.modules():
            state.flags.append((module, module.training))
            for registry in (module._parameters, module._buffers):
                for name, value in registry.items():
                    if value is not None:
                        state.tensors.append((registry, name, value, _stamp(value), value.requires_grad))
        state.autocast = [_autocast_state(kind) for kind in forward.device_kinds]
        state.cpu_rng = torch.get_rng_state()
        if "cuda" in forward.device_kinds:
            devices = {leaf.get_device() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
            state.cuda_rng = {device: torch.cuda.get_rng_state(device) for device in devices}
        if forward.python_random:
            state.python_rng = _python_rng()
        with torch.no_grad():
            for module, name in forward.buffers:
                value = module._buffers[name]
                if value is not None:
                    state.buffers.append((module, name, value.clone()))
        return state

    def forget_unused_rng(self) -> None:
        """After the call: a generator that did not move need not be replayed."""
        if self.cpu_rng is not None and torch.equal(self.cpu_rng, torch.get_rng_state()):
            self.cpu_rng = None
        for device, before in list(self.cuda_rng.items()):
            if torch.equal(before, torch.cuda.get_rng_state(device)):
                del self.cuda_rng[device]
        if self.python_rng is not None and _same_python_rng(self.python_rng, _python_rng()):
            self.python_rng = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the state back for the second run, and the present one back afterwards."""
        with ExitStack() as stack:
            for kind, dtype, enabled, cached in self.autocast:
                if enabled or _autocast_state(kind)[2]:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
                    )
            if self.cpu_rng is not None:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.cpu_rng)
            for device, before in self.cuda_rng.items():
                stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
                torch.cuda.set_rng_state(before, device)
            if self.python_rng is not None:
                stack.callback(_set_python_rng, _python_rng())
                _set_python_rng(self.python_rng)
            self._restore_modules(stack)
            for module, name, before in self.buffers:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                # A copy of the copy: a second backward (retain_graph) starts from the same value again.
                module._buffers[name] = before.clone()
            yield

    def _restore_modules(self, stack: ExitStack) -> None:
        """The same weights, flags and buffers as in the first run, whatever has been bound or set since."""
        for tensor, stamp in self.foreign:
            _check_stamp(tensor, stamp, self.path)
        changed = {(id(module._buffers), name) for module, name, _ in self.buffers}
        for module, training in self.flags:
            if module.training != training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training
        for registry, name, tensor, stamp, requires_grad in self.tensors:
            if (id(registry), name) in changed:
                continue
            # A weight that plain autograd need not have saved is read again here, so it must be the same.
            _check_stamp(tensor, stamp, self.path)
            if registry.get(name) is not tensor:
                stack.callback(registry.__setitem__, name, registry.get(name))
                registry[name] = tensor
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                stack.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(requires_grad)


def _autocast_state(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    return (
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )


def _python_rng() -> tuple[Any, Any]:
    numpy = _loaded_numpy()
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_python_rng(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        _loaded_numpy().random.set_state(state[1])


def _same_python_rng(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] == b[0] and str(a[1]) == str(b[1])


def _loaded_numpy() -> Any:
    return sys.modules.get("numpy")


class CheckpointedForward(StandIn):
    """Stands in for `module.forward` while the technique is attached."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        original: Callable[..., Any],
        buffers: Sequence[BufferRef] = (),
        python_random: bool = False,
        foreign: Sequence[weakref.ref[Tensor]] = (),
    ) -> None:
        super().__init__(module, original)
        self.foreign = tuple(foreign)
        self.path = path
        self._buffers = [(weakref.ref(owner), name) for owner, name in buffers]
        self.python_random = python_random
        self.device_kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

    @property
    def buffers(self) -> list[BufferRef]:
        """Buffers that the forward changes."""
        owners = [(owner(), name) for owner, name in self._buffers]
        return [(owner, name) for owner, name in owners if owner is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with its saved tensors dropped, or as it is where there is nothing to save."""
        if (
            self.passive
            or not torch.is_grad_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.original, *args, use_reentrant=False, **kwargs)
        region = _Region(self, args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            result = self.original(*args, **kwargs)
        region.state.forget_unused_rng()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        module, original = self.copied_original(memo)
        if id(self) in memo:  # copied on the way, as the copied module's forward
            return memo[id(self)]  # type: ignore[no-any-return]
        buffers = [(copy.deepcopy(owner, memo), name) for owner, name in self.buffers]
        twin = CheckpointedForward(module, self.path, original, buffers, self.python_random, self.foreign)
        twin.passive = self.passive
        return twin


class CheckpointAttachment:
    """Checkpointing of one module, as the executor attaches it."""

    name = "checkpoint"

    def __init__(
        self,
        module: nn.Module,
        path: str,
        buffers: Sequence[BufferRef] = (),
        python_random: bool = False,
        foreign: Sequence[weakref.ref[Tensor]] = (),
    ) -> None:
        self.module = module
        self.path = path
        self.buffers = buffers
        self.python_random = python_random
        self.foreign = list(foreign)

    def attach(self) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced.
        """
        self.slot = ForwardSlot(self.module, self.path)
        original = self.module.forward
        made = CheckpointedForward(
            self.module, self.path, original, self.buffers, self.python_random, self.foreign
        )
        self.slot.put(made)

    def undo(self) -> None:
        """Restores `module.forward`."""
        self.slot.remove()
