# SPDX-License-Identifier: Apache-2.0
"""Copies of buffers that a forward changes: what lies on the same memory lies on the same memory again.

A module may keep running statistics in one flat buffer and others as views of it, and may hold further views
as plain attributes. What is written through one of them is read through another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale.torchkit.compiled import never_compiled

_ALIGNMENT = 16
_HOLDERS = (Tensor, dict, list)
_REGISTRIES = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))
_DEPTH = 3

Place = tuple[Any, Any]
"""A dictionary or list, and the key there."""


def copies_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A copy of each tensor, by the tensor's id.

    Of a memory on which several lie, the part that they span is copied once.
    """
    by_memory: dict[Any, dict[int, Tensor]] = {}
    for tensor in tensors:
        by_memory.setdefault(_memory_of(tensor), {})[id(tensor)] = tensor
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for group in by_memory.values():
            if len(group) == 1:
                found.update((key, tensor.clone()) for key, tensor in group.items())
            else:
                found.update(_copied_together(list(group.values())))
    return found


def _memory_of(tensor: Tensor) -> Any:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
        return id(tensor)  # has a way of its own to be copied
    return "memory", tensor.untyped_storage()._cdata


def _copied_together(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    spans = [_span(tensor) for tensor in tensors]
    start = min(first for first, _ in spans) // _ALIGNMENT * _ALIGNMENT
    end = max(last for _, last in spans)
    about = tensors[0]
    held = torch.empty(0, dtype=torch.uint8, device=about.device)
    memory = held.set_(about.untyped_storage(), start, (end - start,), (1,)).clone().untyped_storage()
    found = {}
    for tensor, (first, _) in zip(tensors, spans, strict=True):
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = (first - start) // tensor.dtype.itemsize
        found[id(tensor)] = copy.set_(memory, offset, tensor.shape, tensor.stride())
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the one after its last."""
    first = int(tensor.storage_offset())
    steps = (int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + sum(steps) + 1 if tensor.numel() else first
    return first * tensor.dtype.itemsize, last * tensor.dtype.itemsize


def views_in_attributes(
    modules: Iterable[nn.Module], tensors: Sequence[Tensor]
) -> list[tuple[Place, Tensor]]:
    """Where modules hold tensors on the memory of some, beside what is registered."""
    memories = {memory for memory in map(_memory_of, tensors) if type(memory) is tuple}
    if not memories:
        return []
    found = []
    for module in modules:
        attributes = {
            name: value
            for name, value in module.__dict__.items()
            if type(value) in _HOLDERS and name not in _REGISTRIES
        }
        for place, value in _tensors_in(attributes, _DEPTH):
            if _memory_of(value) in memories:
                in_module = place[0] is attributes
                found.append(((module.__dict__, place[1]) if in_module else place, value))
    return found


def _tensors_in(container: Any, depth: int) -> Iterator[tuple[Place, Tensor]]:
    items = container.items() if type(container) is dict else enumerate(container)
    for key, value in list(items):
        if type(value) is Tensor:
            yield (container, key), value
        elif type(value) in (dict, list) and depth > 1 and len(value) <= 1000:
            yield from _tensors_in(value, depth - 1)


never_compiled(copies_of, _memory_of, _copied_together, _span, views_in_attributes, _tensors_in)
