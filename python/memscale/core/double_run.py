# SPDX-License-Identifier: Apache-2.0
"""Runs a step in float64, as the reference for rounding errors of lower precision.

    parameters, buffers, batch    ─► exchanged for float64 copies, for the time of the block
    `x.float()`, `dtype=...`      ─► float64 as well: models go up to float32 where it matters
    autocast                      ─► off
    random numbers                ─► drawn as float32 and widened: those of the plain step

Random numbers that a kernel draws inside (fused attention with dropout on a card) cannot be reproduced. Then
the reference belongs to another step, and `errors_of` says so: no rounding error is as large as a tenth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from memscale.ops.op_facts import facts

BOUND = 1.5
"""What an inexact technique may err, as a multiple of what plain PyTorch errs."""

_ANOTHER_STEP = 0.1
"""A relative error of plain PyTorch that no rounding explains."""

_FEW_ROUNDINGS = 4
"""What one gradient of few elements may be off in any case: a technique adds some roundings to each."""

_WIDER: dict[Any, torch.dtype] = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}

_DEFAULT_DTYPE = frozenset({"aten::rand", "aten::randn", "aten::normal"})
"""Random operations that make a tensor of the default dtype, unless they are given another one."""


def widened(value: Any) -> Any:
    """A tensor of floating-point or complex numbers in float64 or complex128; anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype not in _WIDER:
        return value
    return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)


class _Doubling(TorchDispatchMode):
    """Answers requests for a lower precision with float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        if facts(func).random:
            return _drawn(func, args, kwargs)
        if facts(func).name == "_grouped_mm":
            return grouped_product(*args, **kwargs)
        return func(*map(_wider, args), **{name: _wider(value) for name, value in kwargs.items()})


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float64 else value


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """A random operation, with the numbers that float32 would draw."""
    if func._schema.name in _DEFAULT_DTYPE and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}  # the default is float64 at present
    narrow_args, narrow_kwargs = tree_map(_narrow, (args, kwargs))
    made = func(*narrow_args, **narrow_kwargs)
    if facts(func).writes:
        for whole, narrow in zip(args, narrow_args, strict=True):
            if isinstance(whole, Tensor) and narrow is not whole:
                whole.copy_(narrow)
        return args[0]
    if facts(func).name == "native_dropout":
        source, share = args[0], args[1]
        return source * made[1] / (1 - share if share < 1 else 1), made[1]
    return tree_map(lambda value: widened(value), made)


def grouped_product(
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """Products of groups of rows or columns, each with a matrix of its own: PyTorch has none in float64."""
    if offs is None:
        return first @ second
    ends = [0, *offs.tolist()]
    spans = list(itertools.pairwise(ends))
    if first.dim() == 2 and second.dim() == 2:
        return torch.stack([first[:, begin:end] @ second[begin:end] for begin, end in spans])
    if first.dim() == 2:
        made = first.new_zeros(first.shape[0], second.shape[-1])
        for (begin, end), matrix in zip(spans, second, strict=True):
            made[begin:end] = first[begin:end] @ matrix
        return made
    made = first.new_zeros(first.shape[1], second.shape[-1])
    for (begin, end), matrix in zip(spans, first, strict=True):
        made[:, begin:end] = matrix @ second[:, begin:end]
    return made


def _swap(place: Any, key: str, value: Any, stack: ExitStack) -> None:
    stack.callback(place.__setitem__, key, place[key])
    place[key] = value


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Runs the block with a model in float64; afterwards it is what it was, object by object.

    Raises:
        Exception: whatever an operation raises that has no float64.
    """
    known: dict[int, Any] = {}

    def wide(value: Tensor) -> Any:
        if id(value) not in known:
            made = widened(value)
            if isinstance(value, nn.Parameter) and made is not value:
                made = nn.Parameter(made.detach(), value.requires_grad)
            known[id(value)] = made
        return known[id(value)]

    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for module in model.modules():
            for registry in (module._parameters, module._buffers):
                for name, value in list(registry.items()):
                    if value is not None and wide(value) is not value:
                        _swap(registry, name, wide(value), stack)
        for module in model.modules():  # plain tensors, and lists of parameters such as an LSTM keeps
            for name, value in list(module.__dict__.items()):
                if isinstance(value, Tensor):
                    _swap(module.__dict__, name, wide(value), stack)
                elif type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value):
                    items = (wide(item) if isinstance(item, Tensor) else item for item in value)
                    _swap(module.__dict__, name, type(value)(items), stack)
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.float64)
        for kind in {"cpu", *(value.device.type for value in model.parameters())}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_Doubling())  # type: ignore[no-untyped-call]
        yield


def double_batch(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64."""
    return tree_map_only(Tensor, widened, batch)


@dataclass(frozen=True)
class Errors:
    """Relative errors of one group of tensors against float64: the norm of all differences over the norm.

    Attributes:
        kind: of the group.
        plain: of plain PyTorch.
        planned: of the treated step.
        unit: below it nothing is an error: one rounding at the precision of the results, or for a single
            gradient what plain PyTorch errs over all of them.
        name: of the gradient, where it is a single one.
    """

    kind: str
    plain: float
    planned: float
    unit: float
    name: str = ""

    @property
    def bound(self) -> float:
        """What the treated step may err."""
        return BOUND * max(self.plain, self.unit)

    @property
    def within(self) -> bool:
        """No more than that, or both alike beyond numbers."""
        return self.planned <= self.bound or (math.isnan(self.plain) and math.isnan(self.planned))

    @property
    def excess(self) -> float:
        """The error as a multiple of what is allowed."""
        return 0.0 if self.within else self.planned / self.bound if self.bound else math.inf

    @property
    def is_other_step(self) -> bool:
        """Plain PyTorch is so far off that float64 has computed something else."""
        return not self.plain < _ANOTHER_STEP


def errors_of(
    kind: str, truth: Mapping[Any, Tensor], plain: Mapping[Any, Tensor], planned: Mapping[Any, Tensor]
) -> Errors:
    """Compares a group of tensors. All three have the same keys.

    Args:
        kind: of the group.
        truth: in float64.
        plain: of the plain step.
        planned: of the treated step.
    """
    whole = math.sqrt(sum(_square(value) for value in truth.values()))
    own = math.sqrt(sum(_square(plain[key].to(value.dtype) - value) for key, value in truth.items()))
    theirs = math.sqrt(sum(_square(planned[key].to(value.dtype) - value) for key, value in truth.items()))
    unit = max((torch.finfo(value.dtype).eps for value in plain.values() if _rounds(value)), default=0.0)
    scale = whole or 1.0
    return Errors(kind, own / scale, theirs / scale, unit)


def errors_of_each(
    truth: Mapping[Any, Tensor] | None,
    plain: Mapping[Any, Tensor],
    planned: Mapping[Any, Tensor],
    whole: Errors,
) -> tuple[Errors, ...]:
    """The errors of gradients one by one: the sum over all would hide a small one that is wrong.

    Each is relative to its own norm, and may be what `whole` is at least: plain PyTorch hits some gradients
    better than others by luck, the more so the fewer elements they have.

    A gradient whose parts cancel (a bias of keys, whose gradient is zero in exact arithmetic) is nothing but
    the rounding of its parts. Those are as large as gradients are in this model, so where plain PyTorch is
    off by a tenth or more, errors are relative to the root mean square of all gradients. Without float64
    nobody knows which gradients these are, and it holds for every gradient that is smaller.

    Args:
        truth: in float64, by (kind, name); None: differences from the plain step.
        plain: of the plain step.
        planned: of the treated step.
        whole: the errors over all of them, from `errors_of`.
    """
    right = {key: value.double() for key, value in plain.items()} if truth is None else truth
    elements = sum(value.numel() for value in right.values())
    mean = math.sqrt(sum(_square(value) for value in right.values()) / max(elements, 1))
    unit = max(whole.plain, whole.unit if truth is None else _FEW_ROUNDINGS * whole.unit)
    made = []
    for key, value in right.items():
        size = math.sqrt(_square(value))
        own = math.sqrt(_square(plain[key].to(value.dtype) - value))
        theirs = math.sqrt(_square(planned[key].to(value.dtype) - value))
        if truth is None or not own < _ANOTHER_STEP * size:
            size = max(size, mean * math.sqrt(value.numel()))
        scale = size or 1.0
        made.append(Errors(whole.kind, own / scale, theirs / scale, unit, name=str(key[-1])))
    return tuple(made)


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _square(tensor: Tensor) -> float:
    if not _rounds(tensor):
        tensor = tensor.double()
    return float(torch.linalg.vector_norm(tensor.detach())) ** 2
