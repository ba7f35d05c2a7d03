# SPDX-License-Identifier: Apache-2.0
"""Selective checkpoints: outputs of some operations that wait in a cache for the recompute.

    first run     Keeping   every operation passes; a kept one leaves an alias of what it made in the cache
    recompute    Taking    a kept operation is answered from the cache and does not run

An operation is known by its name and by how many of that name the call has run before it. Both runs count in
the same way, on the thread of the call, so what other threads do does not matter.

Correctness never rests on the cache. An operation whose output is not there, or was written to since, simply
runs. Never kept, whatever the plan says:

* views, and operations that write anywhere: their effect is more than their output;
* what has moved a random generator, which would be behind in the recompute;
* autocast's casts: it caches those of weights, so the recompute makes fewer or more of them;
* outputs that share memory with an input, are of a tensor subclass, or have no version counter.

Aliases are detached: an output itself would lead from the cache to its autograd node, from there to what the
node saved, and so back to the cache. They share their version counter with the output, though, which is how a
later change in place shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memscale.ops.op_facts import OpFacts, facts

Kept = frozenset[tuple[str, int]]
"""Operations: name, and how many of that name the call has run before."""

_ORDINARY = (Tensor, nn.Parameter)
"""Not subclasses, whose memory may lie elsewhere."""

_AUTOCAST_CASTS = frozenset({"_to_copy"})


class _Role:
    """What one operator overload means to a selective checkpoint: it may be kept, or it writes."""

    __slots__ = ("name", "ordinals", "random", "writes")

    def __init__(self, info: OpFacts, func: OpOverload[..., Any], ordinals: frozenset[int]) -> None:
        self.name = info.name
        self.ordinals = ordinals
        self.random = info.random
        # Position and name of the arguments that it changes.
        self.writes = [(index, func._schema.arguments[index].name) for index in info.writes]


class KeptOperations:
    """The operations that a module's calls keep, looked up by operator overload.

    Attributes:
        kept: as given.
        roles: what has been looked up; None for operators that do not matter.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.roles: dict[Any, _Role | None] = {}
        ordinals: dict[str, set[int]] = {}
        for name, ordinal in kept:
            ordinals.setdefault(name, set()).add(ordinal)
        self._ordinals = {name: frozenset(numbers) for name, numbers in ordinals.items()}

    def learn(self, func: Any) -> _Role | None:
        """The role of an operator that is met for the first time."""
        role = None
        if isinstance(func, OpOverload):  # not one of higher order
            info = facts(func)
            ordinals = self._ordinals.get(info.name, frozenset())
            if info.writes or (ordinals and not info.is_view and info.name not in _AUTOCAST_CASTS):
                role = _Role(info, func, ordinals)
        self.roles[func] = role
        return role


class _Entry:
    """What one operation made."""

    __slots__ = ("func", "result", "storages", "tensors")

    def __init__(
        self, func: Any, result: Any, tensors: list[tuple[Tensor, int]], storages: frozenset[int]
    ) -> None:
        self.func = func
        self.result = result
        self.tensors = tensors
        self.storages = storages


class KeptOutputs:
    """What one call has kept, until its recompute is over.

    Args:
        inputs: those of the call's arguments that the region holds until its end.

    Attributes:
        entries: by name and ordinal.
        storages: addresses of the inputs' memory and of everything that was ever entered. Both live for as
            long as the call runs, so that no address is given to another tensor.
    """

    __slots__ = ("entries", "storages", "written")

    def __init__(self, inputs: Iterable[Any] = ()) -> None:
        self.entries: dict[tuple[str, int], _Entry] = {}
        self.storages = set(storages_of(inputs))
        self.written: list[_Entry] = []  # not to be used any more, but `storages` has their addresses

    def hold(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on memory that stays anyway."""
        return type(tensor) is Tensor and storage_of(tensor) in self.storages

    def add(self, key: tuple[str, int], func: Any, made: Any, arguments: list[Any]) -> None:
        """Enters what an operation has made, if that can be given out again.

        Args:
            key: name and ordinal.
            func: the operator overload.
            made: its result.
            arguments: what it was given, positional and by keyword.
        """
        outputs = list(_tensors(made))
        if not outputs or not all(map(_can_be_kept, outputs)):
            return
        storages = frozenset(map(storage_of, outputs))
        for tensor in _tensors(arguments):
            if type(tensor) not in _ORDINARY or storage_of(tensor) in storages:
                return
        tensors: list[tuple[Tensor, int]] = []
        result = _aliased(made, tensors)
        self.entries[key] = _Entry(func, result, tensors, storages)
        self.storages |= storages

    def note_write(self, tensors: Iterable[Tensor]) -> None:
        """Takes out what was written to, even where no version counter shows it (`.data`)."""
        changed = {storage_of(tensor) for tensor in tensors} & self.storages
        if changed:
            hit = [key for key, entry in self.entries.items() if entry.storages & changed]
            self.written += [self.entries.pop(key) for key in hit]

    def take(self, key: tuple[str, int], func: Any) -> _Entry | None:
        """What an operation made in the first run, if that is still as it was made."""
        entry = self.entries.get(key)
        if entry is None or entry.func is not func:
            return None
        for tensor, version in entry.tensors:
            if tensor._version != version:
                return None
        return entry

    def clear(self) -> None:
        """Lets go of everything."""
        self.entries.clear()
        self.storages.clear()
        self.written.clear()


class _Counting(TorchDispatchMode):
    """What both runs share: each operation is known by its name and how many of that name ran before it."""

    supports_higher_order_operators = True

    def __init__(self, operations: KeptOperations, outputs: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.outputs = outputs
        self.roles = operations.roles
        self.counts: dict[str, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled part of a module runs compiled; its inside is not ours to keep."""
        return True


class _Uncounted(dict[str, int]):
    """In place of counts: no operation has a number that is kept."""

    def get(self, name: str, default: int | None = None) -> int:  # type: ignore[override]
        return -1


@contextmanager
def uncounted() -> Iterator[None]:
    """For operations that are no part of the call, such as those of hooks: the recompute is without them."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counting)]
    counts = [mode.counts for mode in modes]
    for mode in modes:
        mode.counts = _Uncounted()
    try:
        yield
    finally:
        for mode, before in zip(modes, counts, strict=True):
            mode.counts = before


class Keeping(_Counting):
    """Runs every operation, and keeps the outputs of some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        try:
            role = self.roles[func]
        except KeyError:
            role = self.operations.learn(func)
        if role is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if role.writes:
            result = func(*args, **kwargs)
            if self.outputs.storages:
                self.outputs.note_write(_tensors(_written(role, args, kwargs)))
            return result
        ordinal = self.counts.get(role.name, 0)
        self.counts[role.name] = ordinal + 1
        if ordinal not in role.ordinals:
            return func(*args, **kwargs)
        return self._keep(role, ordinal, func, args, kwargs)

    def _keep(self, role: _Role, ordinal: int, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        watch = _Generators(arguments) if role.random else None
        result = func(*args, **kwargs)
        if watch is None or not watch.moved(result):
            self.outputs.add((role.name, ordinal), func, result, arguments)
        return result


class Taking(_Counting):
    """Answers kept operations from the cache, and runs the others.

    the recompute is always under this mode where the first was under `Keeping`, with nothing in the cache
    too: under any mode some composite functions take another way (`linear` adds its bias out of place).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation, or does not."""
        try:
            role = self.roles[func]
        except KeyError:
            role = self.operations.learn(func)
        if role is None or role.writes:
            return func(*args, **kwargs) if kwargs else func(*args)
        ordinal = self.counts.get(role.name, 0)
        self.counts[role.name] = ordinal + 1
        if ordinal in role.ordinals:
            entry = self.outputs.take((role.name, ordinal), func)
            if entry is not None:
                return entry.result
        return func(*args, **kwargs) if kwargs else func(*args)


class _Generators:
    """Tells whether an operation has drawn from a random generator."""

    def __init__(self, arguments: list[Any]) -> None:
        self.own = any(isinstance(value, torch.Generator) for value in arguments)
        self.cpu = torch.get_rng_state()
        devices = {tensor.get_device() for tensor in _tensors(arguments) if tensor.is_cuda}
        self.cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def moved(self, result: Any) -> bool:
        """Whether an operation has drawn from a generator; True also where that is unknown."""
        for tensor in _tensors(result):
            if tensor.device.type != "cpu" and tensor.get_device() not in self.cuda:
                return True
        return (
            self.own
            or not torch.equal(self.cpu, torch.get_rng_state())
            or any(
                not torch.equal(old, torch.cuda.get_rng_state(device)) for device, old in self.cuda.items()
            )
        )


def storage_of(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0 where it has none of its own (a sparse tensor, a subclass)."""
    if tensor.layout is not torch.strided or type(tensor) not in _ORDINARY:
        return 0
    address: int = tensor.untyped_storage()._cdata
    return address


def storages_of(tensors: Iterable[Any]) -> frozenset[int]:
    """Addresses of the storages of all tensors among some values."""
    return frozenset(map(storage_of, _tensors(list(tensors)))) - {0}


def _can_be_kept(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference()


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors in an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _written(role: _Role, args: Any, kwargs: Any) -> list[Any]:
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in role.writes]


def _aliased(value: Any, tensors: list[tuple[Tensor, int]]) -> Any:
    """A result with detached aliases in place of its tensors; these are entered in `tensors` as well."""
    if isinstance(value, Tensor):
        # The mode is called below autograd, where a detached tensor would get a version counter of its own.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = value.detach()
        tensors.append((alias, alias._version))
        return alias
    if isinstance(value, (tuple, list)):
        return type(value)(_aliased(item, tensors) for item in value)
    return value


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, for ordinary tensors unseen by dispatch modes, which would take most of its time."""
    if type(tensor) is not Tensor:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()
