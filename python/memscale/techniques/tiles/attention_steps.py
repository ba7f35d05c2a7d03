# SPDX-License-Identifier: Apache-2.0
"""Operations between the scores of an attention and its values that keep each query's scores apart.

An operation is a step if it makes of the scores [..., queries, keys] something of the same last two sizes,
and each row of it of the same row alone: a scale, a bias or mask that is added or filled in, a soft cap, a
cast, softmax over the keys, another shape of the leading dimensions. Then it can be run on a tile of queries,
with the same rows of the tensors that take part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memscale.techniques.tiles.logit_steps import is_plain
from memscale.techniques.tiles.tiled_loss import autocast_as, autocast_now


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among an operation's arguments: its number, or -1 for the scores."""

    number: int


@dataclass(frozen=True)
class Form:
    """What is known of scores that are not computed; they are contiguous.

    Attributes:
        shape: [..., queries, keys].
        dtype: of them.
        device: where they would be.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Step:
    """One operation, without the tensors that take part in it.

    Attributes:
        func: the operation, which changes nothing in place.
        args: its arguments, a `Slot` in place of each tensor.
        kwargs: by keyword.
        lead: leading dimensions of the result, if the operation changes nothing else.
        after: the result's form.
        autocast: as it was.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lead: tuple[int, ...] | None
    after: Form
    autocast: tuple[tuple[str, torch.dtype, bool, bool], ...]

    @property
    def is_view(self) -> bool:
        """The result shares memory with what it is made from."""
        return self.lead is not None

    @property
    def takes_any_shape(self) -> bool:
        """A tensor in it may be expanded to the shape of the scores."""
        return self.func not in (torch.masked_fill, Tensor.masked_fill)

    def run(self, scores: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The operation, on all queries or on some.

        Args:
            scores: [..., queries, keys].
            tensors: that take part; of those that have a row for each query, the same rows.
        """
        if self.lead is not None:
            return scores.reshape(*self.lead, *scores.shape[-2:])

        def filled(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            return scores if value.number < 0 else tensors[value.number]

        with autocast_as(self.autocast):
            made: Tensor = self.func(
                *map(filled, self.args), **{name: filled(value) for name, value in self.kwargs.items()}
            )
        return made if made.dtype == self.after.dtype else made.to(self.after.dtype)


def rows_of(tensor: Tensor, queries: int, rows: slice) -> Tensor:
    """What belongs to some queries of a tensor that is broadcast over [..., queries, keys]."""
    if tensor.dim() < 2 or tensor.shape[-2] != queries:
        return tensor
    return tensor[..., rows, :]


@dataclass(frozen=True)
class Found:
    """A step and the tensors in it; `in_place` if it changes the scores themselves."""

    step: Step
    tensors: tuple[Tensor, ...]
    in_place: bool = False


def step_of(func: Any, args: Any, kwargs: Any, scores: Tensor, form: Form) -> Found | str | None:
    """What an operation is.

    Args:
        func: as `__torch_function__` gets it.
        args: its arguments.
        kwargs: by keyword.
        scores: which of them the scores are.
        form: theirs.

    Returns:
        A step; None if the operation returns the scores themselves; why it is neither.
    """
    others = [value for value in (*args, *kwargs.values()) if value is not scores]
    if len(others) != len(args) + len(kwargs) - 1:
        return "they meet themselves"
    if func in _DROPOUTS:
        return _dropout(*args, **kwargs)
    if func in _SHAPES:
        return _reshaped(func, args, kwargs, scores, form)
    if func is Tensor.contiguous and len(args) == 1 and not kwargs:
        return None
    if func in _CASTS or func in (Tensor.to, Tensor.type, Tensor.type_as):
        return _cast(func, args, kwargs, form)
    made = _CHANGES.get(func, func)
    if made not in _SIMPLE:
        return f"{getattr(func, '__name__', func)} looks at them"
    if made in _SOFTMAX and not _over_keys(args, kwargs, form):
        return "softmax is not over the keys"
    if func in _CHANGES and args[0] is not scores:
        return "something else is changed in place"
    return _simple(made, args, kwargs, scores, form, func in _CHANGES)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> str | None:
    return "dropout draws random numbers" if training and p > 0 else None


def _over_keys(args: Any, kwargs: Any, form: Form) -> bool:
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    return dim in (-1, len(form.shape) - 1)


def _reshaped(func: Any, args: Any, kwargs: Any, scores: Tensor, form: Form) -> Found | str | None:
    """`view`, `reshape`, `unsqueeze` and their kind, of the leading dimensions."""
    if args[0] is not scores or any(isinstance(value, (Tensor, torch.dtype)) for value in args[1:]):
        return "another view is taken of them"
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        before = torch.empty(form.shape, device="meta")
        after = func(before, *args[1:], **kwargs)
    if after is before:
        return None
    if after.dim() < 3 or after.shape[-2:] != form.shape[-2:] or after.numel() != before.numel():
        return "another view is taken of them"
    lead = tuple(after.shape[:-2])
    changed = Form(after.shape, form.dtype, form.device)
    return Found(Step(func, (), {}, lead, changed, autocast_now()), ())


def _cast(func: Any, args: Any, kwargs: Any, form: Form) -> Found | str | None:
    """`float()`, `to(dtype)`, `type(dtype)`, `type_as(tensor)`."""
    dtype = _CASTS.get(func)
    if dtype is None:
        if kwargs.keys() - {"dtype"} or len(args) + len(kwargs) != 2:
            return "they are copied"
        dtype = args[1] if len(args) > 1 else kwargs["dtype"]
        if func is Tensor.type_as:
            dtype = dtype.dtype if is_plain(dtype) and dtype.device == form.device else None
    elif len(args) + len(kwargs) != 1:
        return "they are copied"
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        return "they are made something other than numbers"
    if dtype == form.dtype:
        return None
    changed = Form(form.shape, dtype, form.device)
    return Found(Step(Tensor.to, (Slot(-1), dtype), {}, None, changed, autocast_now()), ())


def _simple(
    func: Any, args: Any, kwargs: Any, scores: Tensor, form: Form, in_place: bool
) -> Found | str | None:
    """An operation on elements, or softmax: whatever it does, it does it to any number of rows."""
    tensors: list[Tensor] = []

    def emptied(value: Any) -> Any:
        if value is scores:
            return Slot(-1)
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return Slot(len(tensors) - 1)

    slots = tuple(map(emptied, args)), {name: emptied(value) for name, value in kwargs.items()}
    for value in (*slots[0], *slots[1].values()):
        if not isinstance(value, (int, float, str, type(None), torch.dtype, Slot)):
            return "something strange meets them"
    size = len(form.shape)
    for tensor in tensors:
        ends = tensor.shape[-2:] if tensor.dim() > 1 else (1, *tensor.shape[-1:])
        if not is_plain(tensor) or tensor.dim() > size or (tensor.device != form.device and tensor.dim()):
            return "a strange tensor meets them"
        if any(own not in (1, other) for own, other in zip(ends, form.shape[-len(ends) :], strict=True)):
            return "a tensor of another shape meets them"
    step = Step(func, *slots, None, form, autocast_now())
    dtype = _dtype_after(step, tensors, form)
    if dtype is None or not dtype.is_floating_point:
        return "they become something else"
    after = Form(form.shape, form.dtype if in_place else dtype, form.device)
    return Found(Step(func, *slots, None, after, step.autocast), tuple(tensors), in_place)


def _dtype_after(step: Step, tensors: Sequence[Tensor], form: Form) -> torch.dtype | None:
    """Dtype of the result, by the operation on no queries at all; None if its shape is another one."""
    none = form.shape[:-2] + torch.Size((0, form.shape[-1]))
    queries = form.shape[-2]
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        nothing = torch.empty(none, dtype=form.dtype, device=form.device)
        beside = [rows_of(without_data(tensor), queries, slice(0, 0)) for tensor in tensors]

        def filled(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            return nothing if value.number < 0 else beside[value.number]

        kwargs = {name: filled(value) for name, value in step.kwargs.items()}
        try:
            made: Tensor = step.func(*map(filled, step.args), **kwargs)
        except Exception:  # on the scores themselves plain PyTorch raises its own
            return None
    return made.dtype if made.shape == none else None


def without_data(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device with the memory of one number."""
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


_SHAPES = frozenset(
    (
        Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten,
        torch.unflatten, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze,
    )
)  # fmt: skip

_DROPOUTS = frozenset((F.dropout, torch.dropout, torch.dropout_))

_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}

_SOFTMAX = frozenset((F.softmax, torch.softmax, Tensor.softmax))

_CHANGES: dict[Any, Any] = {
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), torch.add),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), torch.sub),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), torch.mul),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), torch.div),
    Tensor.masked_fill_: torch.masked_fill,
    **dict.fromkeys((Tensor.tanh_, torch.tanh_), torch.tanh),
}
"""Changes in place, and the same not in place."""

_SIMPLE = _SOFTMAX | frozenset(
    (
        torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, torch.div,
        torch.true_divide, torch.divide, Tensor.div, Tensor.true_divide, Tensor.divide, Tensor.__truediv__,
        torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, torch.subtract, Tensor.sub,
        Tensor.subtract, Tensor.__sub__, torch.masked_fill, Tensor.masked_fill, torch.where, Tensor.where,
        torch.tanh, Tensor.tanh, torch.clamp, Tensor.clamp, torch.nan_to_num, Tensor.nan_to_num,
        torch.maximum, Tensor.maximum,
    )
)  # fmt: skip

FUNCTIONS = _SHAPES | _DROPOUTS | _SIMPLE | frozenset(
    (*_CASTS, *_CHANGES, Tensor.to, Tensor.type, Tensor.type_as, Tensor.contiguous)
)  # fmt: skip
"""What `step_of` takes."""
