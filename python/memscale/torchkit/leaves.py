# SPDX-License-Identifier: Apache-2.0
"""Tensors in a model's inputs and outputs, also inside objects that PyTorch's pytree does not open.

Also the storages behind tensors: a sparse tensor has several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEEPEST = 3

LONGEST = 1024
"""Entries of a container in an object; a longer one is a data set that a batch knows, and not looked into."""


def tensors_of(value: Any, depth: int = _DEEPEST) -> list[Tensor]:
    """The tensors in a batch or an output, in order.

    Args:
        value: of any structure.
        depth: how many objects deep to look: dataclasses, mappings and namespaces that are no node of
            PyTorch's trees, and instances that hold tensors as attributes, such as a batch of graphs.
    """
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth:
            found += tensors_of(_parts(leaf), depth - 1)
    return found


def parts_of(tensor: Tensor) -> list[Tensor]:
    """What holds a tensor's memory: itself, or indices and values of a sparse one. None if nobody knows."""
    if tensor.layout is torch.strided:
        return [tensor]
    names = _PARTS.get(tensor.layout, ())
    return [getattr(tensor, name)() for name in names]


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}


def is_sparse(tensor: Tensor) -> bool:
    """Whether indices and values hold it, in any form."""
    return tensor.layout is not torch.strided and tensor.layout is not torch.jagged


class SparseSizes(NamedTuple):
    """Sizes of a sparse tensor that are noted on its fake, which has no elements.

    Attributes:
        storages: bytes of the storages behind it.
        coordinates: see `coordinate_bytes`.
    """

    storages: int
    coordinates: int


def noted_sizes(tensor: Tensor) -> SparseSizes | None:
    """The sizes that `note_sizes` has put on a fake; None: none."""
    return getattr(tensor, "_memscale_sparse_sizes", None)


def note_sizes(tensor: Tensor, noted: SparseSizes) -> None:
    """Notes on a fake the sizes of the tensor that it stands for."""
    tensor._memscale_sparse_sizes = noted  # type: ignore[attr-defined]


def sizes_to_note(tensor: Tensor) -> SparseSizes:
    """The sizes of a tensor that is about to get a fake."""
    return SparseSizes(storage_bytes([tensor]), coordinate_bytes([tensor]))


def coordinate_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of sparse tensors in the form in which each element has its place, which kernels convert to."""
    size = 0
    for tensor in tensors:
        noted = noted_sizes(tensor)
        if noted is not None:
            size += noted.coordinates
            continue
        parts = parts_of(tensor)
        if parts and tensor.layout is not torch.sparse_coo:
            parts = [parts[1], *parts[1:]]  # an index each for row and column
        size += sum(part.numel() * part.element_size() for part in parts)
    return size


def gradient_of(tensor: Tensor) -> tuple[int, int]:
    """Which gradient a tensor has, and how often it has been written."""
    gradient = tensor.grad if tensor.is_leaf else None  # PyTorch warns who asks others
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def gradients_of(leaves: Iterable[Tensor]) -> list[tuple[int, int]]:
    """That of each leaf: which gradient it has, and how often it has been written."""
    gradients = [leaf.grad for leaf in leaves]
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether anything is called when a tensor gets a gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        noted = noted_sizes(tensor)
        if noted is not None:
            sizes[id(tensor)] = noted.storages
            continue
        storages = [part.untyped_storage() for part in parts_of(tensor)]
        sizes.update((storage._cdata, storage.nbytes()) for storage in storages)
    return sum(sizes.values())


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, (str, bytes, int, float, complex, type, nn.Module)) or leaf is None:
        return []
    if isinstance(leaf, Mapping):
        return [] if len(leaf) > LONGEST else list(filter(_is_short, leaf.values()))
    if dataclasses.is_dataclass(leaf):
        parts = (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
        return list(filter(_is_short, parts))
    own = getattr(leaf, "__dict__", None)
    return [] if callable(leaf) or not isinstance(own, dict) else list(filter(_is_short, own.values()))


def _is_short(part: Any) -> bool:
    return not isinstance(part, (list, tuple, dict)) or len(part) <= LONGEST
