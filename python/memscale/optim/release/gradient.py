# SPDX-License-Identifier: Apache-2.0
"""Released gradients: complete, off the device, and still tensors like any other to all code.

`p.grad` is a `ReleasedGradient`: a tensor with a storage of its own, which has no bytes while they are
offloaded. Every operation on it passes `__torch_dispatch__`, which

    brings the bytes back,
    runs the operation on a plain tensor that shares the storage, so that views are views of the gradient,
    lets them go again; what the operation has written is offloaded again.

Operations on lists (`_foreach_...`, fused steps, a scaler's check) are run for one position after the other,
which is what they compute, and only one gradient is here at a time. What reads memory past PyTorch's
dispatcher (`data_ptr`, NumPy, pickle) is led to a plain tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from memscale.optim.release.changes import change_of, is_same_anywhere, is_zeroing
from memscale.optim.release.gradient_bytes import GradientBytes
from memscale.optim.release.window import ReleaseWindow
from memscale.torchkit.extents import fills_memory
from memscale.torchkit.leaves import storage_bytes

_aten = torch.ops.aten


class ReleasedGradient(Tensor):
    """A gradient whose bytes may be offloaded. Made by `release`."""

    memscale_bytes: GradientBytes

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on what it needs of it."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ReleasedGradient) and torch.Tag.inplace_view in func.tags:
            return _reshape(func, first, args, kwargs)
        if isinstance(first, (list, tuple)) and _is_by_position(func) and _is_alike(args):
            return _one_by_one(func, args, kwargs)
        if isinstance(first, ReleasedGradient) and _run_offloaded(func, first, args, kwargs):
            return first
        return _run(func, args, kwargs)

    # ---- what does not pass the dispatcher ---------------------------------------------------------

    def data_ptr(self) -> int:
        """Its address. From now on it stays where it is."""
        self._stay()
        return super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Its storage. From now on it stays where it is."""
        self._stay()
        return super().untyped_storage()

    def _stay(self) -> None:
        with plain(self):
            self.memscale_bytes.stays = True

    @property
    def data(self) -> Tensor:
        """As PyTorch's: the same memory, unknown to autograd."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        self._stay()
        self.memscale_bytes.changed()
        value = value.detach()
        self.memscale_bytes.plain.data = value
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's. It stays for as long as the array does."""
        return self._as_plain().numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_plain().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        """As PyTorch's."""
        return self.detach().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_plain().__dlpack__(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return self._as_plain().__repr__(**kwargs)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._as_plain(), memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    def _as_plain(self) -> Tensor:
        """An ordinary tensor with the same memory."""
        return self.detach().requires_grad_(self.requires_grad)


def release(gradient: Tensor, window: ReleaseWindow) -> ReleasedGradient | None:
    """A released gradient in place of one that is complete; None where it cannot be one.

    Its bytes leave when the window wants them to.
    """
    if type(gradient) is not Tensor or gradient.requires_grad or not fills_its_storage(gradient):
        return None
    made = torch.Tensor._make_subclass(ReleasedGradient, gradient)
    made.memscale_bytes = GradientBytes(window, gradient)
    return made


def fills_its_storage(tensor: Tensor) -> bool:
    """Whether a gradient is all of its memory, each element once. Others stay."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.storage_offset() == 0
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and (tensor.is_contiguous() or _aten.is_non_overlapping_and_dense.default(tensor))
        and not (tensor.is_neg() or tensor.is_conj())
    )


def bytes_here(gradient: Tensor | None) -> int:
    """Bytes of a gradient that are in memory; one that is offloaded stays there."""
    if isinstance(gradient, ReleasedGradient):
        return gradient.memscale_bytes.plain.untyped_storage().nbytes()
    return 0 if gradient is None else storage_bytes([getattr(gradient, "_local_tensor", gradient)])


@contextmanager
def plain(gradient: Tensor) -> Iterator[Tensor]:
    """A gradient as an ordinary tensor, to be used inside the block only. Writes to it do not count."""
    if not isinstance(gradient, ReleasedGradient):
        yield gradient
        return
    held = gradient.memscale_bytes
    with held.window.using([held], []):
        yield held.plain


def start(gradient: ReleasedGradient, begin: int, end: int, into: Tensor) -> Callable[[], None]:
    """Starts to copy elements of a gradient, counted in the order of memory.

    Args:
        gradient: whose. It is not to be changed before the copy is complete.
        begin: the first.
        end: behind the last.
        into: flat and contiguous, with its dtype, for `end - begin` elements; on its device, or on the host.

    Returns:
        What waits until they are there.
    """
    held = gradient.memscale_bytes
    with held.window.lock:
        if into.device.type != held.plain.device.type:
            changes, dtype = held.changes_to_come, held.plain.dtype
            if not all(is_same_anywhere(change, dtype) for change in changes):
                return held.start_by_card(begin, end, into)
        return held.start(begin, end, into)


def put(gradient: ReleasedGradient, begin: int, values: Tensor) -> None:
    """Sets elements of a gradient, counted as in `start`.

    Args:
        gradient: whose. None of them is on its way to anybody.
        begin: the first.
        values: flat, with its dtype.

    Raises:
        OSError: others could not be read back.
    """
    held = gradient.memscale_bytes
    with held.window.lock:
        held.set(begin, begin + values.numel(), values)
        held.window.note(held)


def as_ordinary(gradient: ReleasedGradient) -> Tensor:
    """The ordinary tensor in place of a released one, for good."""
    held = gradient.memscale_bytes
    with held.window.using([held], []):
        held.stays = True
        held.changed()
    return held.plain


# ---- operations --------------------------------------------------------------------------------------


def _run_offloaded(func: Any, gradient: ReleasedGradient, args: Any, kwargs: Any) -> bool:
    """Does what can be done to a gradient while it is offloaded, if it is that."""
    held = gradient.memscale_bytes
    with held.window.lock:
        if held.users or (held.here and (held.stays or not held.is_backed or held.is_held())):
            return False
        if is_zeroing(func):
            held.zero()
            return True
        change = change_of(func, args, kwargs)
        if change is not None:
            held.change(change)
            return True
        return func is _aten.add_.Tensor and _is_sum(gradient, args, kwargs) and held.add(args[1])


def _is_sum(gradient: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether something of the same form is added, as autograd does."""
    other = args[1]
    return (
        type(other) is Tensor
        and kwargs.get("alpha", 1) == 1
        and other.layout is torch.strided
        and other.dtype is gradient.dtype
        and other.device == gradient.device
        and other.shape == gradient.shape
        and other.stride() == gradient.stride()
        and not (other.is_neg() or other.is_conj())
    )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation with all that it works on here."""
    leaves, _ = tree_flatten((args, kwargs))
    given = {id(leaf): leaf.memscale_bytes for leaf in leaves if isinstance(leaf, ReleasedGradient)}
    gradients = list(given.values())
    with gradients[0].window.using(gradients, _written(func, args, kwargs)):
        return _run_plain(func, args, kwargs)


def _run_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation on the plain tensors. When it returns, nobody has these who had them not before."""
    given: dict[int, ReleasedGradient] = {}

    def seen(value: Any) -> Any:
        if isinstance(value, ReleasedGradient):
            given[id(value.memscale_bytes.plain)] = value
            return value.memscale_bytes.plain
        return value

    made = func(*tree_map(seen, args), **tree_map(seen, kwargs))
    return tree_map(lambda value: given.get(id(value), value), made)


def _reshape(func: Any, gradient: ReleasedGradient, args: Any, kwargs: Any) -> ReleasedGradient:
    """Runs what changes sizes, strides or the storage in place, such as `t_` and `set_`."""
    gradient._stay()
    data, others = gradient.memscale_bytes.plain.detach(), args[1:]
    if any(isinstance(leaf, ReleasedGradient) for leaf in tree_flatten((others, kwargs))[0]):
        _run(func, (data, *others), kwargs)
    else:
        func(data, *others, **kwargs)
    gradient.data = data
    return gradient


def _written(func: Any, args: Any, kwargs: Any) -> list[GradientBytes]:
    """The gradients that an operation writes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        leaves, _ = tree_flatten(value)
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            continue  # a fused step writes them when it unscales them, only
        found += [leaf.memscale_bytes for leaf in leaves if isinstance(leaf, ReleasedGradient)]
    return found


_BY_POSITION = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


def _is_by_position(func: Any) -> bool:
    """Whether an operation on lists does the same for each position, alone."""
    return bool(func._schema.name.startswith(_BY_POSITION))


def _is_alike(args: Any) -> bool:
    """Whether an operation on lists chooses the same kernel for a position as for all of them.

    On a card it has one for a whole list of tensors that are dense and lie in the same order, and otherwise
    goes through them with the operation for single tensors, which may round otherwise.
    """
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if all(isinstance(item, Tensor) for item in value)]
    if not any(item.is_cuda for value in lists for item in value):
        return True
    first = lists[0][0]
    return all(
        (isinstance(item, ReleasedGradient) or (item.layout is torch.strided and fills_memory(item)))
        and item.dtype is first.dtype
        and item.device == first.device
        and (len(value) != len(lists[0]) or item.stride() == lists[0][position].stride())
        for value in lists
        for position, item in enumerate(value)
        if item.dim() > 0  # step counters, and numbers
    )


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation on lists for one position after the other."""
    count = len(args[0])
    made = []
    for position in range(count):

        def part(value: Any, position: int = position) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == count
            return [value[position]] if is_list else value

        part_args = tuple(map(part, args))
        part_kwargs = {name: part(value) for name, value in kwargs.items()}
        made.append(_one(func, part_args, part_kwargs))
    return _joined(made)


def _one(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0][0]
    if isinstance(gradient, ReleasedGradient) and _run_offloaded(func, gradient, args, kwargs):
        return None
    leaves, _ = tree_flatten((args, kwargs))
    if any(isinstance(leaf, ReleasedGradient) for leaf in leaves):
        return _run(func, args, kwargs)
    return func(*args, **kwargs)


def _joined(made: list[Any]) -> Any:
    """The results for single positions as the result for all: nothing, a list, or several lists."""
    if not made or made[0] is None:
        return None
    if isinstance(made[0], list) and (not made[0] or isinstance(made[0][0], Tensor)):
        return [item for part in made for item in part]
    return tuple([item for part in parts for item in part] for parts in zip(*made, strict=True))
