# SPDX-License-Identifier: Apache-2.0
"""Results of operations on fake tensors, remembered by what the operations were given.

A trace runs the same operation on the same shapes once per layer and per plan, and most of its time went into
PyTorch's mode of fakes. That remembers results, too (torch/_subclasses/fake_tensor.py), but asks each tensor
of each call for twelve things. Here five and a few conditions are enough, because only what is usual is
remembered: an operator of PyTorch's own, on strided fakes of real numbers, whose results are fresh, views of
its one tensor, or the tensor that it writes. All else goes to the mode, as does every call the first time.

The mode's own answer is what is remembered, so a result here is never another one than there. What the mode
remembers by itself is: there, two results that are one tensor (the gradients of an LSTM's two biases) are two
the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from memscale.ops.real_layouts import corrected

MOST = 1 << 15
"""Calls that are remembered; then all are forgotten. One takes about a kilobyte."""

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are part of a key as they are."""

_BY_VALUES = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
"""Tags of operators whose results, or arguments afterwards, are not told by shapes."""


class _UnusualError(Exception):
    """A call, or a result, that is not remembered."""


class _Made(NamedTuple):
    """How a result is made.

    Attributes:
        of: place of the argument that it is, or is a view of; -1: a tensor of its own.
        form: shape, stride, dtype, device and offset; None where it is the argument itself.
    """

    of: int
    form: tuple[Any, ...] | None


class _Results(NamedTuple):
    """What a call returns: one tensor, or a sequence of them (and of None)."""

    sequence: Callable[[Iterable[Tensor | None]], Any] | None
    made: Sequence[_Made | None]


def mode_of_fakes() -> FakeTensorMode:
    """A mode that takes real tensors beside fakes, and remembers nothing by itself."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def on_memory_of_its_own(mode: FakeTensorMode, form: Sequence[Any], size: int) -> Tensor:
    """A fake on fresh memory.

    Args:
        mode: of fakes.
        form: shape, stride, dtype, device and offset.
        size: bytes of its memory.
    """
    shape, stride, dtype, device, offset = form
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(torch.UntypedStorage(size, device="meta"), offset, shape, stride)
    return FakeTensor(mode, meta, device)


_known: dict[tuple[Any, ...], _Results | None] = {}


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` under a mode of fakes.

    Args:
        func: the operator overload.
        args: its arguments, fakes or not.
        kwargs: the others.
    """
    try:
        key, mode = _key(func, args, kwargs)
        known = _known.get(key, _UNSEEN)
    except (_UnusualError, TypeError):  # the second: an argument that has no hash
        return func(*args, **kwargs)
    if known is _UNSEEN:
        return _first(key, func, args, kwargs)
    if known is None:
        return func(*args, **kwargs)
    results = [made and _make(made, mode, args) for made in known.made]
    return results[0] if known.sequence is None else known.sequence(results)


def forget() -> None:
    """Every call is new again."""
    _known.clear()


def remembered_count() -> int:
    """Calls whose results are remembered, and those that are known to be unusual."""
    return len(_known)


def is_usual(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one whose result may be remembered."""
    try:
        hash(_key(func, args, kwargs)[0])
    except (_UnusualError, TypeError):
        return False
    return True


def knows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call's result is remembered."""
    return is_usual(func, args, kwargs) and _known.get(_key(func, args, kwargs)[0]) is not None


_UNSEEN: Any = object()


def _first(key: tuple[Any, ...], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a call that has not been seen, and remembers what it returns."""
    result = laid_out(func, args, kwargs)
    if len(_known) >= MOST:
        _known.clear()
    try:
        _known[key] = _learned(key, func, (args, kwargs), result)
    except _UnusualError:
        _known[key] = None
    return result


def laid_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` under a mode of fakes, with the layout that the operator gives its results."""
    given: list[Tensor] = []
    collect((*args, *kwargs.values()), given)
    relaid = partial(_relaid, of=set(map(_memory, given)))
    return corrected(func, args, kwargs, func(*args, **kwargs), relaid)


def _relaid(fake: Tensor, stride: tuple[int, ...], of: set[int]) -> Tensor:
    """The fake with other strides: on the memory that it is a view of, or on memory of its own."""
    if type(fake) is not FakeTensor:
        return fake
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device="meta")
        if _memory(fake) in of:
            meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, stride)
    return FakeTensor(fake.fake_mode, meta, fake.fake_device)


# ---- what a call was given ---------------------------------------------------------------------------


@cache
def _is_usual(func: Any) -> bool:
    return func.namespace == "aten" and _BY_VALUES.isdisjoint(func.tags)


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """All that the results follow from, and the mode of the fakes.

    Raises:
        _UnusualError: there is more that they could follow from.
    """
    if not _is_usual(func) or torch.is_inference_mode_enabled():
        raise _UnusualError
    parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    mode = _describe(args, parts, None)
    mode = _describe(kwargs.values(), parts, mode)
    if mode is None:
        raise _UnusualError
    return tuple(parts), mode


def _describe(values: Iterable[Any], parts: list[Any], mode: Any) -> Any:
    """Adds what counts of each value. Returns the mode of the fakes among them and before."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if mode is None:
                mode = value.fake_mode
            if value.fake_mode is not mode or not _is_ordinary(value):
                raise _UnusualError
            parts += _form(value)
        elif kind in _PLAIN:  # with its type: 1, 1.0 and True are equal, and lead to other dtypes
            parts += (kind, value)
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            mode = _describe(value, parts, mode)
        else:
            raise _UnusualError
    return mode


def _is_ordinary(fake: FakeTensor) -> bool:
    if fake.constant is not None or fake.layout is not torch.strided or fake.dtype.is_complex:
        return False
    return not (fake.is_neg() or fake.is_inference())


def _form(fake: FakeTensor) -> tuple[Any, ...]:
    return fake.shape, fake.stride(), fake.dtype, fake.fake_device, fake.storage_offset()


# ---- what it returned ----------------------------------------------------------------------------------


def _learned(
    key: tuple[Any, ...], func: Any, given: tuple[Sequence[Any], dict[str, Any]], result: Any
) -> _Results:
    """How the results of a call are made again.

    Raises:
        _UnusualError: not from forms alone.
    """
    args, kwargs = given
    after, mode = _key(func, args, kwargs)
    if after != key:  # it changed the form of what it was given
        raise _UnusualError
    sequence = type(result) if type(result) in (list, tuple) else None
    results = [result] if sequence is None else result
    made = [None if one is None else _how(func, given, one) for one in results]
    fresh = [_memory(one) for how, one in zip(made, results, strict=True) if how is not None and how.of < 0]
    if len(set(fresh)) < len(fresh) or (sequence is None and result is None):
        raise _UnusualError
    for how, one in zip(made, results, strict=True):
        if how is not None and torch._C._dispatch_key_set(
            _make(how, mode, args)
        ) != torch._C._dispatch_key_set(one):
            raise _UnusualError
    return _Results(sequence, made)


def _how(func: Any, given: tuple[Sequence[Any], dict[str, Any]], result: Any) -> _Made:
    args, kwargs = given
    if type(result) is not FakeTensor or not _is_ordinary(result):
        raise _UnusualError
    for place, argument in enumerate(args):
        if argument is result:
            if not func._schema.is_mutable:
                raise _UnusualError
            return _Made(place, None)
    if result.requires_grad:
        raise _UnusualError
    sources: list[Tensor] = []
    collect((*args, *kwargs.values()), sources)
    if _memory(result) in map(_memory, sources):
        places = [place for place, argument in enumerate(args) if argument is sources[0]]
        if len(sources) != 1 or not places:
            raise _UnusualError
        return _Made(places[0], _form(result))
    if not _fills_its_memory(result):
        raise _UnusualError
    return _Made(-1, _form(result))


def collect(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Adds the tensors among values and the lists in them."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            collect(value, tensors)


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fills_its_memory(fake: FakeTensor) -> bool:
    """Whether its storage is what `empty_strided` makes for its form."""
    last = sum((size - 1) * step for size, step in zip(fake.shape, fake.stride(), strict=True))
    elements = 0 if 0 in fake.shape else last + 1
    return fake.storage_offset() == 0 and fake.untyped_storage().nbytes() == elements * fake.element_size()


def _make(made: _Made, mode: Any, args: Sequence[Any]) -> Tensor:
    if made.form is None:
        argument: Tensor = args[made.of]
        return argument
    shape, stride, dtype, device, offset = made.form
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if made.of >= 0:
            meta.set_(args[made.of].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, meta, device)


def on_copies(func: Any, args: Any, kwargs: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """Runs an operation on copies of real tensors. Where it returns one of them, the tensor is returned.

    PyTorch's mode of fakes does not serve: where only a number comes with real tensors (`mul_(0.9)`), it runs
    on their own memory, whatever their size.
    """
    originals: dict[int, Tensor] = {}
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy = copy_of(tensor)
            originals[id(copy)] = tensor
        return copies[id(tensor)]

    result = func(*tree_map_only(Tensor, copied, args), **tree_map_only(Tensor, copied, kwargs))
    return tree_map_only(Tensor, lambda made: originals.get(id(made), made), result)


_ONE_DTYPE = {"aten::index_put": 2, "aten::index_put_": 2, "aten::index_add": 3, "aten::index_add_": 3}
"""Operations whose kernels want the argument at this place in the dtype of the first; fakes take any."""


def check_dtypes(func: Any, args: Any) -> None:
    """Raises where a kernel would, and the fakes would not, for arguments of two dtypes."""
    place = _ONE_DTYPE.get(func._schema.name)
    if place is not None and len(args) > place and args[0].dtype is not args[place].dtype:
        dtypes = f"{args[0].dtype} and {args[place].dtype}"
        raise RuntimeError(f"{func._schema.name}: dtypes {dtypes} do not match")


_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


def without_masks(func: Any, args: Any) -> Any:
    """Real masks among the indices as numbers: how many elements they choose is known, but not to a fake."""
    if func._schema.name not in _INDEXING or not isinstance(args[0], FakeTensor):
        return args
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8) or isinstance(index, FakeTensor):
            indices.append(index)
            continue
        with unset_fake_temporarily():
            indices.extend(index.nonzero(as_tuple=True))
    return (args[0], indices, *args[2:])
