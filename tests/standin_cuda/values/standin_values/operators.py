# SPDX-License-Identifier: Apache-2.0
"""One operator of the CUDA build with values: the original allocates, the CPU's operator computes.

    original kernel      allocates results and scratch by the caching allocator, advances the generator;
                         the kernels that it launches do nothing
    CPU's operator       computes on the same bytes (memory.py); what it returns is copied into the results

What the original calls through the dispatcher comes here again, and then only allocates: `inside` says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from standin_values import memory, randomness

HALVES = (torch.float16, torch.bfloat16)

MOST_BYTES = int(os.environ.get("STANDIN_COMPUTE_BYTES") or 0)
"""Operators on more bytes of floating-point numbers than these only allocate; 0: all compute."""

Formula = Callable[..., Any]


class _Inside(threading.local):
    depth = 0


inside = _Inside()


@contextmanager
def only_allocating(on: bool = True) -> Iterator[None]:
    """Operators in it allocate and do not compute (off: they compute again)."""
    before, inside.depth = inside.depth, int(on)
    try:
        yield
    finally:
        inside.depth = before


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results, with `change` applied to what is not a list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    return change(value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in arguments or results, in order."""
    found: list[Tensor] = []
    mapped(lambda item: found.append(item) if isinstance(item, Tensor) else None, value)
    return found


def _float_bytes(args: Any, kwargs: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point())


class Operator:
    """One overload: its original kernel and how to compute it.

    Args:
        overload: of torch.ops.aten.
        formula: computes on CPU tensors; the overload itself if it has a CPU kernel.
        allocate: False: the original is not asked, results are allocated as the formula shapes them.
        single: halves are computed in single precision, not only where the CPU has no kernel for them.
    """

    def __init__(
        self, overload: Any, formula: Formula | None = None, allocate: bool = True, single: bool = False
    ) -> None:
        self.overload = overload
        self.name = str(overload).encode()
        self.formula = formula or overload
        self.allocate = allocate
        self.single = single
        self.packet = getattr(torch.ops.aten, overload._schema.name.removeprefix("aten::"))
        self.kernel = torch.library.get_kernel(overload, "CUDA")
        arguments = overload._schema.arguments
        self.written = [
            (index, argument.name)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.numbers = [i for i, argument in enumerate(arguments) if str(argument.type) == "Tensor"]
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags or "dropout" in overload.name()
        self.takes_generator = any(argument.name == "generator" for argument in arguments)

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        allocate = self.allocate and not self._has_number(args)
        if inside.depth and (allocate or not self.overload._schema.returns):
            return self.kernel.call_boxed(keys, *args, **kwargs)
        if MOST_BYTES and allocate and _float_bytes(args, kwargs) > MOST_BYTES:
            with only_allocating():
                return self.kernel.call_boxed(keys, *args, **kwargs)
        written = self._mutated(args, kwargs)
        memory.begin(self.name, tensors_of((args, kwargs)), written)
        if not allocate:
            return self._without_original(args, kwargs)
        seed = randomness.seed_of(args, kwargs) if self.draws else None
        aliases = memory.Aliases()
        saved = [(tensor, aliases.of(tensor).clone()) for tensor in written]
        with only_allocating():
            result = self.kernel.call_boxed(keys, *args, **kwargs)
        memory.begin(self.name, (), tensors_of(result))
        for tensor, before in saved:
            if tensor.shape == before.shape:
                aliases.of(tensor).copy_(before)
        values = self._values(aliases, args, kwargs, seed)
        self._store(aliases, result, values, written)
        return result

    def _has_number(self, args: tuple[Any, ...]) -> bool:
        """True if a tensor argument is a number of the program: PyTorch hands it over as such, and an
        original cannot be called with it. Only element-wise operators have that; they allocate no scratch."""
        return any(
            index < len(args) and isinstance(args[index], (int, float, complex)) for index in self.numbers
        )

    def _mutated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        given = [args[index] if index < len(args) else kwargs.get(name) for index, name in self.written]
        return [tensor for tensor in tensors_of(given) if tensor.is_cuda]

    def _values(self, aliases: memory.Aliases, args: Any, kwargs: Any, seed: int | None) -> Any:
        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                return aliases.of(value) if value.is_cuda else value
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value

        args, kwargs = mapped(on_host, args), mapped(on_host, kwargs)
        with torch.no_grad():
            if seed is None:
                return self._computed(args, kwargs)
            with randomness.host_generator(seed) as generator:
                if self.takes_generator:
                    args, kwargs = randomness.with_generator(generator, args, kwargs)
                return self._computed(args, kwargs)

    def _computed(self, args: Any, kwargs: Any) -> Any:
        """Half precision for which the CPU has no kernel is computed in single precision."""
        formula = (
            self.packet if self._has_number(args) else self.formula
        )  # it chooses the overload for numbers
        halves = any(tensor.dtype in HALVES for tensor in tensors_of((args, kwargs)))
        try:
            if not (self.single and halves):
                return formula(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not halves:
                raise RuntimeError(f"stand-in CUDA: {self.overload} on the CPU: {error}") from error
        return self._in_single(args, kwargs)

    def _in_single(self, args: Any, kwargs: Any) -> Any:
        wide: list[tuple[Tensor, Tensor]] = []

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype in HALVES:
                wide.append((value, value.float()))
                return wide[-1][1]
            return torch.float32 if value in HALVES else value

        try:
            values = self.formula(*mapped(widened, args), **mapped(widened, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(f"stand-in CUDA: {self.overload} on the CPU: {error}") from error
        if self.written:
            for narrow, value in wide:
                narrow.copy_(value)
        return values

    def _store(self, aliases: memory.Aliases, result: Any, values: Any, written: list[Tensor]) -> None:
        theirs = result if isinstance(result, (list, tuple)) else (result,)
        ours = values if isinstance(values, (list, tuple)) else (values,)
        for target, value in zip(theirs, ours, strict=True):
            if isinstance(target, (list, tuple)):
                self._store(aliases, target, value, written)
            elif isinstance(target, Tensor) and isinstance(value, Tensor):
                if any(target is tensor for tensor in written):
                    continue
                place = aliases.of(target) if target.is_cuda else target
                one_is_empty = place.numel() == 0 or value.numel() == 0  # what only one of both devices keeps
                if not one_is_empty and place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    def _without_original(self, args: Any, kwargs: Any) -> Any:
        aliases = memory.Aliases()
        with only_allocating(False):
            values = self._values(aliases, args, kwargs, None)

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            memory.begin(self.name, (), (made,))
            memory.Aliases().of(made).copy_(value)
            return made

        if not self.written:
            return mapped(placed, values)
        return self._resized(args, kwargs, aliases, values)

    def _resized(self, args: Any, kwargs: Any, aliases: memory.Aliases, values: Any) -> Any:
        """out= of a size that the values decide: their aliases have been resized, now the tensors are."""
        targets = self._mutated(args, kwargs)
        for target, value in zip(targets, tensors_of(values), strict=True):
            if target.shape != value.shape:
                target.resize_(value.shape)
            place = memory.Aliases().of(target)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        return targets[0] if len(targets) == 1 else tuple(targets)
