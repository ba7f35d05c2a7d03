# SPDX-License-Identifier: Apache-2.0
"""Finds when the plain step would have freed a tensor that the recorder holds.

A real step needs what autograd saves, and the inputs of its recomputes. So the memory stays, and its
end says nothing about the plain step. What is held is an alias with a reference of its own to the storage;
once there are no other references, the step has let go:

    references to a storage = those of the step + aliases here
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _of_the_object() -> int:
    """References that the Python object for a storage counts for: one or none, by PyTorch's version."""
    probe = torch.empty(1)
    storage = probe.untyped_storage()
    key, alive = storage._cdata, weakref.ref(storage)
    del storage
    count = 1 if _use_count is None else _use_count(key)
    return count - 1 if alive() is not None else 0


class NaturalEnds:
    """Holds tensors, and tells when nobody else does.

    Args:
        ended: called with the buffer of a tensor that the step has let go.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._base = _of_the_object()
        self._aliases: dict[int, int] = {}  # address of a storage → aliases of it
        self._waiting: dict[int, int] = {}  # address of a storage that the step holds → its buffer
        self._refs: set[_AliasRef] = set()

    def alias(self, tensor: Tensor, buffer: int | None) -> Tensor:
        """Another tensor on the same memory, to be held in its place.

        Args:
            tensor: of the step.
            buffer: made in the step; None: its end is not asked for.
        """
        alias = tensor.detach()
        key = alias.untyped_storage()._cdata
        self._aliases[key] = self._aliases.get(key, 0) + 1
        ref = _AliasRef(alias, self._gone)
        ref.key = key
        self._refs.add(ref)
        if buffer is not None and _use_count is not None:
            self._waiting[key] = buffer
        return alias

    def look(self) -> None:
        """Tells what has been let go since it was last asked."""
        for key in [key for key in self._waiting if not self._is_held_elsewhere(key)]:
            self._ended(self._waiting.pop(key))

    def is_held_elsewhere(self, alias: Tensor) -> bool:
        """Whether somebody else holds the memory of an alias."""
        return _use_count is not None and self._is_held_elsewhere(alias.untyped_storage()._cdata)

    def _is_held_elsewhere(self, key: int) -> bool:
        assert _use_count is not None
        return _use_count(key) - self._base > self._aliases[key]

    def _gone(self, ref: _AliasRef) -> None:
        self._refs.discard(ref)
        self._aliases[ref.key] -= 1
        if not self._aliases[ref.key]:  # from here on the storage's own death tells
            del self._aliases[ref.key]
            self._waiting.pop(ref.key, None)


class _AliasRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to an alias that remembers its storage."""

    __slots__ = ("key",)
    key: int
