# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop changes between forward and backward: `parameter.data.add_(…)`, `parameter.data = …`.

What is written through `.data` does not move the version, and plain autograd does not mind. A recompute would
read the changed weight. So code that asks a parameter for its `.data` while calls wait for their recompute
leaves a copy for these, and code that sets it leaves what it held; most loops never do. What forwards ask for
leaves none, nor do streamed weights, whose bytes are in several places.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
        weights: `State.tensors`, when the call is over.
    """

    __slots__ = ("__weakref__", "_before", "_weights")

    def __init__(self, weights: Sequence[tuple[Any, ...]]) -> None:
        self._weights = weights
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        with _lock:
            _waiting.add(self)

    def lacks(self, weight: Tensor) -> bool:
        """Whether the call reads a weight, and has no copy of it."""
        return id(weight) not in self._before and any(item[2] is weight for item in self._weights)

    def add(self, weight: Tensor, copy: Tensor) -> None:
        """A copy of a weight as it has been up to now."""
        self._before[id(weight)] = weight, copy

    def restore(self, stack: ExitStack) -> None:
        """Fills weights as the call had them. What they hold now comes again when `stack` closes."""
        for weight, before in self._before.values():
            present = _base.__get__(weight)
            if is_streamed(weight):
                continue
            if (present.shape, present.dtype, present.device) != (before.shape, before.dtype, before.device):
                stack.callback(_base.__set__, weight, present)
                _base.__set__(weight, before)
            elif not torch.equal(present, before):
                stack.callback(present.copy_, present.clone())
                present.copy_(before)


_waiting: weakref.WeakSet[WeightCopies] = weakref.WeakSet()


class _Inside(threading.local):
    """How many forwards and recomputes are in progress in this thread."""

    depth = 0


_inside = _Inside()


@contextmanager
def forward_in_progress() -> Iterator[None]:
    """Reads in the block leave no copies."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _read(parameter: Any) -> Any:
    if _waiting and not _inside.depth:
        _copy(parameter)
    return _base.__get__(parameter)


def _copy(parameter: Tensor) -> None:
    with _lock:
        lacking = [copies for copies in _waiting if copies.lacks(parameter)]
    if lacking and not is_streamed(parameter):
        with torch.no_grad(), without_modes() if has_modes() else nullcontext():
            copy = _base.__get__(parameter).clone()
        for copies in lacking:
            copies.add(parameter, copy)


def _write(parameter: Any, value: Any) -> None:
    if _waiting and not _inside.depth:
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


never_compiled(WeightCopies, forward_in_progress, _read, _copy, _write)
