# SPDX-License-Identifier: Apache-2.0
"""Tensors that a call writes to in place although no trace saw it: a teacher that follows from some step on.

Where a trace sees such writes the module is not recomputed (`GraphRecorder`). What begins in a later step is
seen by its versions: a call that has moved one has its recompute's write to it undone, by a copy that is
taken before the recompute. A recompute that reads what was written has other values than its forward, and is
found by these.

`.data` leaves the version alone, and so do batch norms and fused observers for their statistics. Where the
model's code names it, and of what may be statistics, contents are compared, too, of large tensors a sample;
on the host only. Writes through a view of NumPy are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain, islice
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from memscale.state.tensor_versions import Versions
from memscale.techniques.checkpoint.outliving import Memory
from memscale.techniques.checkpoint.recompute_check import Fingerprint, fingerprint
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.leaves import is_sparse
from memscale.torchkit.torch_settings import has_modes, without_modes

_MOST: Final = 1_000
"""Weights and buffers of one module that is referred to."""

_LARGEST_STATISTICS: Final = 1 << 14
"""Elements: one for each channel."""


class WrittenTensors:
    """Those of some tensors that a call writes to.

    Args:
        tensors: that it can reach, before it; each may come more than once.
        by_contents: contents are compared, too.
    """

    __slots__ = ("_before", "_written")

    def __init__(self, tensors: Iterable[Tensor], by_contents: bool = False) -> None:
        present = {
            id(tensor): tensor for tensor in tensors if not (tensor.is_inference() or is_sparse(tensor))
        }
        self._before = [
            (
                tensor,
                tensor._version,
                _contents(tensor) if by_contents or _may_be_statistics(tensor) else None,
            )
            for tensor in present.values()
        ]
        self._written: list[weakref.ref[Tensor]] = []

    def after(self) -> None:
        """The call is over."""
        self._written = list(map(weakref.ref, self.present()))
        self._before = []

    @property
    def have_graph(self) -> bool:
        """Whether one of them has a graph; before `after`."""
        return any(tensor.grad_fn is not None for tensor, *_ in self._before)

    def present(self) -> list[Tensor]:
        """Those that have been written to since; before `after`."""
        return [
            tensor
            for tensor, version, contents in self._before
            if tensor._version != version or (contents is not None and _contents(tensor) != contents)
        ]

    def protect(self, stack: ExitStack) -> None:
        """What they hold now comes again when `stack` closes."""
        alive = [tensor for tensor in (ref() for ref in self._written) if tensor is not None]
        if alive:
            stack.callback(
                _put_back, [(tensor, tensor.detach().clone()) for tensor in alive], Versions(alive)
            )


class _Below(NamedTuple):
    """What a module has in it, read once: to walk through a model takes longer than a call's other notes."""

    modules: frozenset[int]
    tensors: tuple[weakref.ref[Tensor], ...]


_below: weakref.WeakKeyDictionary[nn.Module, _Below] = weakref.WeakKeyDictionary()


def tensors_beside(parts: Sequence[nn.Module], referred: Iterable[nn.Module]) -> list[Tensor]:
    """Weights and buffers of modules that others refer to, such as a teacher's.

    Args:
        parts: those that refer to them. What they are in themselves, a model that its layers know, is left
            out: its weights are looked at where they are read.
        referred: by these.
    """
    refs: list[weakref.ref[Tensor]] = []
    for module in referred:
        below = _below.get(module)
        if below is None:
            weights = islice(chain(module.parameters(), module.buffers()), _MOST)
            below = _Below(frozenset(map(id, module.modules())), tuple(map(weakref.ref, weights)))
            _below[module] = below
        if id(parts[0]) not in below.modules:
            refs += below.tensors
    return [tensor for tensor in (ref() for ref in refs) if tensor is not None]


def _may_be_statistics(tensor: Tensor) -> bool:
    """Whether operators may write to it without moving its version: running statistics, observed ranges."""
    return tensor.dim() < 2 and not tensor.requires_grad and tensor.numel() <= _LARGEST_STATISTICS


def _contents(tensor: Tensor) -> Fingerprint:
    if not tensor.is_cpu:  # a card's would have to be waited for
        return None
    with without_modes() if has_modes() else nullcontext():
        plain = tensor.detach()
        return fingerprint(plain, sampled=True) if Memory.of(plain) else None


def _put_back(contents: list[tuple[Tensor, Tensor]], versions: Versions) -> None:
    with torch.no_grad():
        for tensor, before in contents:
            tensor.detach().copy_(before)
    versions.restore()


never_compiled(WrittenTensors, tensors_beside, _may_be_statistics, _contents, _put_back)
