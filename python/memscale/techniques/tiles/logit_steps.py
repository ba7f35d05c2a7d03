# SPDX-License-Identifier: Apache-2.0
"""Operations between a language model's head and its loss that keep the classes of a token together.

Two kinds. What works on each element by itself (a soft cap, a scale, a cast, a bias) is one more thing to do
to every tile. What changes the shape in front of the classes, or picks rows, says which hidden state a row
belongs to: the same operation on row numbers tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale.techniques.tiles.tiled_loss import Each


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        run: the operation itself.
        rows: what it does to row numbers, which have the shape of the logits without the classes.
        each: what it does to each element, if that is what it does.
        before: shape, strides and dtype of what it is applied to.
        after: those of its result.
        is_view: the result shares memory with what it is made from.
        turns: the classes are no longer the last dimension; only a loss may follow.
    """

    run: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    each: Each | None
    before: Tensor
    after: Tensor
    is_view: bool
    turns: bool = False

    @property
    def needs_value(self) -> bool:
        """Its gradient depends on what it is applied to."""
        return self.each is not None and self.each.name == "tanh"


def is_plain(value: Any) -> bool:
    """An ordinary tensor, or its fake."""
    return type(value) in (Tensor, nn.Parameter, FakeTensor) and value.layout is torch.strided


Found = tuple[Any, Step | None]
"""The tensor that an operation is applied to, and the step; (None, None) for an operation that is no step,
no step for one that returns the tensor itself."""

_NOTHING: Found = (None, None)


def step_of(
    func: Any,
    args: Any,
    kwargs: Any,
    deferred: Callable[[Any], bool],
    meta_of: Callable[[Any], Tensor],
) -> Found:
    """What an operation is in a chain.

    Args:
        func: as `__torch_function__` gets it.
        args: its arguments.
        kwargs: by keyword.
        deferred: whether a value is a tensor whose operations can be put off.
        meta_of: shape, strides and dtype of such a tensor.
    """
    if func in _REVERSED and len(args) == 2 and not deferred(args[0]):
        args = (args[1], args[0])
    if not args or not deferred(args[0]):
        return _NOTHING
    if any(map(deferred, (*args[1:], *kwargs.values()))):
        return _NOTHING
    logits, *rest = args
    step = _MAKERS[func](func, meta_of(logits), rest, kwargs)
    if step is NotImplemented:
        return _NOTHING
    return logits, step


def _on_meta(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Tensor:
    """The operation on shapes alone. Raises what plain PyTorch raises."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        result: Tensor = func(meta, *map(_without_data, args), **kwargs)
    return result


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _only_numbers(values: Any) -> bool:
    return all(
        isinstance(value, (int, str, type(None)))
        or (isinstance(value, (tuple, list)) and all(isinstance(item, int) for item in value))
        for value in values
    )


# ---- shapes ------------------------------------------------------------------------------------------


def _same_rows(index: Tensor) -> Tensor:
    return index


def _reshaped(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """Rows stay in order: `view`, `flatten`, `unsqueeze` and their kind."""
    if not _only_numbers((*args, *kwargs.values())):
        return NotImplemented
    after = _on_meta(func, meta, args, kwargs)
    classes = meta.shape[-1]
    if after is meta:
        return None
    if after.dim() < 2 or after.shape[-1] != classes or after.numel() != meta.numel():
        return NotImplemented
    lead = after.shape[:-1]
    return Step(
        run=lambda logits: func(logits, *args, **kwargs),
        rows=lambda index: index.reshape(lead),
        each=None,
        before=meta,
        after=after,
        is_view=True,
    )


def _copied(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """`contiguous`, `clone`."""
    if args or kwargs:
        return NotImplemented
    after = _on_meta(func, meta, (), {})
    if after is meta:
        return None
    return Step(lambda logits: func(logits), _same_rows, None, meta, after, is_view=False)


def _picked(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """`logits[..., :-1, :]`: whole numbers and slices of all dimensions but the classes."""
    if kwargs or len(args) != 1:
        return NotImplemented
    items = args[0] if isinstance(args[0], tuple) else (args[0],)
    if sum(item is Ellipsis for item in items) > 1 or not all(map(_is_basic, items)):
        return NotImplemented
    everything = slice(None)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        gap = meta.dim() - len(items) + 1
        items = (*items[:place], *[everything] * gap, *items[place + 1 :])
    lead = (*items, *[everything] * (meta.dim() - len(items)))[:-1]
    if len(items) > meta.dim() or (len(items) == meta.dim() and not _is_whole(items[-1])):
        return NotImplemented
    after = _on_meta(func, meta, args, {})
    if after.dim() < 2:
        return NotImplemented
    key = args[0]
    return Step(lambda logits: logits[key], lambda index: index[lead], None, meta, after, is_view=True)


def _is_basic(item: Any) -> bool:
    if isinstance(item, slice):
        return all(bound is None or type(bound) is int for bound in (item.start, item.stop, item.step))
    return item is Ellipsis or type(item) is int


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _turned(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """[batch, length, classes] as [batch, classes, length], as a cross-entropy takes it."""
    if kwargs or meta.dim() != 3 or not all(type(item) is int for item in args):
        return NotImplemented
    if {item % 3 for item in args} != {1, 2} or len(args) != 2:
        return NotImplemented
    after = _on_meta(func, meta, args, {})
    return Step(lambda logits: func(logits, *args), _same_rows, None, meta, after, is_view=True, turns=True)


def _permuted(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """The same, as `permute(0, 2, 1)`."""
    order = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or meta.dim() != 3 or [type(item) for item in order] != [int, int, int]:
        return NotImplemented
    if [item % 3 for item in order] != [0, 2, 1]:
        return NotImplemented
    after = _on_meta(func, meta, args, {})
    return Step(lambda logits: func(logits, *args), _same_rows, None, meta, after, is_view=True, turns=True)


# ---- elements ----------------------------------------------------------------------------------------


def _cast(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """`float()`, `to(dtype)`."""
    dtype = _CASTS.get(func)
    if dtype is None:
        if kwargs.keys() - {"dtype"} or len(args) + len(kwargs) != 1:
            return NotImplemented
        dtype = args[0] if args else kwargs["dtype"]
    elif args or kwargs:
        return NotImplemented
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        return NotImplemented
    if dtype == meta.dtype:
        return None
    return _each("cast", None, meta, _on_meta(Tensor.to, meta, (dtype,), {}))


def _tanh(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    if args or kwargs:
        return NotImplemented
    return _each("tanh", None, meta, _on_meta(torch.tanh, meta, (), {}))


def _arithmetic(func: Any, meta: Tensor, args: Any, kwargs: Any) -> Any:
    """Logits and a number, or a tensor of one element, or of one per class."""
    name = _ARITHMETIC[func]
    if kwargs or len(args) != 1:
        return NotImplemented
    operand = args[0]
    if isinstance(operand, Tensor):
        single = operand.dim() == 0
        by_class = operand.dim() > 0 and operand.numel() == operand.shape[-1] == meta.shape[-1]
        if not is_plain(operand) or operand.requires_grad or not (single or by_class):
            return NotImplemented
    elif type(operand) not in (int, float):
        return NotImplemented
    after = _on_meta(getattr(torch, name), meta, (operand,), {})
    if after.shape != meta.shape or not after.dtype.is_floating_point:
        return NotImplemented
    return _each(name, operand, meta, after)


def _each(name: str, operand: Any, before: Tensor, after: Tensor) -> Step:
    each = Each(name, operand, after.dtype)
    return Step(each.run, _same_rows, each, before, after, is_view=False)


_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}

_REVERSED = frozenset(
    (torch.mul, torch.multiply, torch.add, Tensor.mul, Tensor.add, Tensor.__mul__, Tensor.__add__)
)
"""These may have the logits in the second place."""

_ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), "mul"),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.div, torch.true_divide, torch.divide, Tensor.div, Tensor.true_divide), "div"),
    **dict.fromkeys((Tensor.divide, Tensor.__truediv__), "div"),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "add"),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__), "sub"),
}

_MAKERS: dict[Any, Callable[[Any, Tensor, Any, Any], Any]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshaped),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze), _reshaped),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten), _reshaped),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _copied),
    Tensor.__getitem__: _picked,
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.swapdims), _turned),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((*_CASTS, Tensor.to, Tensor.type), _cast),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}

FUNCTIONS = frozenset(_MAKERS)
"""What `step_of` takes."""
