# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop changes between forward and backward: `parameter.data.add_(…)`, `parameter.data = …`.

What is written through `.data` does not move the version, and plain autograd does not mind. A recompute
would read the changed weight. So code that asks a parameter for its `.data`, or sets it, while calls wait
for their recompute leaves a copy for these; most loops never do. A forward that does leaves a copy for
itself, which is dropped when it is over and has changed nothing. Streamed weights leave none: their bytes
are in several places.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.torch_settings import has_modes, without_modes
from memscale.weights.placement import is_streamed

_NAME: Final = "data"
_base: Final[Any] = torch._C.TensorBase.data

_lock = threading.RLock()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class WeightCopies:
    """Of the weights of one call, those that somebody may have changed since.

    Args:
        weights: its parameters and buffers.
    """

    __slots__ = ("__weakref__", "_before", "_weights")

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def of_forward(self) -> AbstractContextManager[None]:
        """For the time of the call. From then on, what others ask for counts."""
        return _InProgress(self)

    def is_over(self) -> None:
        """The call is."""
        if self._before:
            self._before = {key: item for key, item in self._before.items() if _differs(*item)}
        with _lock:
            _waiting.add(self)

    def lacks(self, weight: Tensor) -> bool:
        """Whether the call reads a weight, and has no copy of it."""
        return id(weight) not in self._before and any(item is weight for item in self._weights)

    def add(self, weight: Tensor, copy: Tensor) -> None:
        """A copy of a weight as it has been up to now."""
        self._before[id(weight)] = weight, copy

    def restore(self, stack: ExitStack) -> None:
        """Fills weights as the call had them. What they hold now comes again when `stack` closes."""
        for weight, before in self._before.values():
            if is_streamed(weight) or not _differs(weight, before):
                continue
            present = _base.__get__(weight)
            stack.callback(_fill, weight, present, present.clone())
            if _form(present) == _form(before):
                present.copy_(before)  # what was saved of its memory stays so
            else:
                _base.__set__(weight, before.clone())


_waiting: weakref.WeakSet[WeightCopies] = weakref.WeakSet()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _differs(weight: Tensor, before: Tensor) -> bool:
    present = _base.__get__(weight)
    return _form(present) != _form(before) or not torch.equal(present, before)


def _fill(weight: Tensor, data: Tensor, contents: Tensor) -> None:
    data.copy_(contents)
    _base.__set__(weight, data)


class _Inside(threading.local):
    """Of the forwards and recomputes that are in progress in this thread, the inner one last."""

    def __init__(self) -> None:
        self.calls: list[WeightCopies | None] = []


_inside = _Inside()


class _InProgress:
    """A forward or a recompute, for the time of a block."""

    __slots__ = ("_call",)

    def __init__(self, call: WeightCopies | None) -> None:
        self._call = call

    def __enter__(self) -> None:
        _inside.calls.append(self._call)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _inside.calls.pop()
        if kind is None and self._call is not None:
            self._call.is_over()


_RECOMPUTE: Final = _InProgress(None)


def of_recompute() -> AbstractContextManager[None]:
    """What the block asks for leaves no copies."""
    return _RECOMPUTE


def _read(parameter: Any) -> Any:
    if _waiting or _inside.calls:
        _copy(parameter)
    return _base.__get__(parameter)


def _copy(parameter: Tensor) -> None:
    with _lock:
        found = _inside.calls[-1:] or list(_waiting)
        lacking = [copies for copies in found if copies is not None and copies.lacks(parameter)]
    if lacking and not is_streamed(parameter):
        with torch.no_grad(), without_modes() if has_modes() else nullcontext():
            copy = _base.__get__(parameter).clone()
        for copies in lacking:
            copies.add(parameter, copy)


def _write(parameter: Any, value: Any) -> None:
    if _waiting or _inside.calls:
        _copy(parameter)
    _base.__set__(parameter, value)


_READS: Final = property(_read, _write, doc=_base.__doc__)


def watch(module: nn.Module) -> None:
    """Calls of a module, or of its children, are recomputed from now on."""
    with _lock:
        _watched.add(module)
        if _NAME not in vars(nn.Parameter):
            nn.Parameter.data = _READS  # type: ignore[assignment]


def unwatch(module: nn.Module) -> None:
    """Ends `watch`. After the last module `Parameter.data` is PyTorch's again."""
    with _lock:
        _watched.discard(module)
        if not _watched and vars(nn.Parameter).get(_NAME) is _READS:
            del nn.Parameter.data


never_compiled(WeightCopies, _InProgress, _form, _differs, _fill, of_recompute, _read, _copy, _write)
