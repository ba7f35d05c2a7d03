# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of streamed weights: autograd keeps the weight's place, not its present memory.

A hook looks at saved tensors while a module that has streamed weights runs. What lies on the memory of a
weight (the weight, its transpose, a part of it) is saved as its place, and backward gets it from the block
that is there then. Everything else goes to the hooks that are in force around the module, a checkpoint's for
instance, or is saved as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memscale.weights.placement import known_streams, streams
from memscale.weights.unit import Unit, Weight


class _Stream(Protocol):
    """The stream of the weights that are saved."""

    places: dict[int, tuple[Unit, Weight | None]]

    def saved(self, saved: SavedWeight) -> Tensor: ...


_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "a tensor of shape {} is at version {}; expected version {} instead"
)


class SavedWeight:
    """A weight, or a view of one, in an autograd graph.

    Attributes:
        offset: of its first element from the weight's, in bytes.
    """

    __slots__ = ("dtype", "offset", "shape", "stride", "unit", "version", "weight")

    def __init__(self, unit: Unit, weight: Weight, tensor: Tensor, begin: int) -> None:
        self.unit = unit
        self.weight = weight
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset()) * tensor.element_size() - begin
        self.version = weight.parameter._version

    def check(self) -> None:
        """Raises as autograd does if the weight has been written to since."""
        version = self.weight.parameter._version
        if version != self.version:
            raise RuntimeError(_CHANGED.format(list(self.shape), version, self.version))


class _Other:
    """A save that stays as it is. Under hooks nobody else compares versions."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()  # an output would hold the graph that holds it
        self.version = tensor._version

    def tensor(self) -> Tensor:
        """The saved tensor, unless it was changed in place."""
        if self.alias._version != self.version:
            shape = list(self.alias.shape)
            raise RuntimeError(_CHANGED.format(shape, self.alias._version, self.version))
        return self.alias


def can_save() -> bool:
    """Whether this PyTorch tells which hooks are in force."""
    names = ("_top_saved_tensors_default_hooks", "_saved_tensors_hooks_is_enabled")
    return all(hasattr(torch._C._autograd, name) for name in names)


def hooks(stream: _Stream) -> Any:
    """A context in which weights are saved as places; None where nothing is saved, or may be looked at.

    None, too, inside of such a context.
    """
    autograd: Any = torch._C._autograd
    if not torch.is_grad_enabled() or not autograd._saved_tensors_hooks_is_enabled():
        return None
    around = autograd._top_saved_tensors_default_hooks(False)
    if around is not None and getattr(around[0], "memscale_stream", None) is stream:
        return None

    def pack(tensor: Tensor) -> object:
        found = _place_of(stream, tensor)
        if found is not None:
            return found
        if around is not None:
            return around[0](tensor)
        return _Other(tensor) if type(tensor) in (Tensor, nn.Parameter) else tensor

    vars(pack)["memscale_stream"] = stream
    vars(pack)["memscale_around"] = around  # for `techniques/checkpoint/saving_hooks.py`

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, SavedWeight):
            return stream.saved(saved)
        if isinstance(saved, _Other):
            return saved.tensor()
        found: Tensor = saved if around is None else around[1](saved)
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@contextmanager
def weights_as_places() -> Iterator[None]:
    """A context in which weights are saved as places outside of the modules that have them, too.

    A backward that a forward runs itself, with `create_graph`, saves them when their modules have returned.
    """
    with ExitStack() as stack:
        for stream in known_streams() if streams else ():
            looking = hooks(stream)  # type: ignore[arg-type]
            if looking is not None:
                stack.enter_context(looking)
        yield


def _place_of(stream: _Stream, tensor: Tensor) -> SavedWeight | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():  # more than a place; the block stays as long as the view
        return None
    found = stream.places.get(tensor.untyped_storage()._cdata)
    if found is None:
        return None
    unit, weight = found
    if weight is not None:
        return SavedWeight(unit, weight, tensor, 0)
    weight = unit.weight_at(int(tensor.storage_offset()) * tensor.element_size())
    return SavedWeight(unit, weight, tensor, weight.place.offset)
