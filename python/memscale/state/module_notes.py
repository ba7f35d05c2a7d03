# SPDX-License-Identifier: Apache-2.0
"""Modules as a call found them: what is registered on them, and what their tensors were.

Every checkpointed call makes one, and its recompute asks twice whether all is as it was. As a rule it is, and
then two calls of the core tell: the same objects lie at the same places. What differs is looked at name by
name, by those who put it back (`attribute_tables`, `checkpoint_state`); for them `held` has what there was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale._core import Entries
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.plain_copies import Ours
from memscale.weights import placement
from memscale.weights.placement import lasting_address

Stamp = tuple[int, int]
"""Version and storage of a tensor: in-place changes move the one, `.data = ...` the other.

Not the address: FSDP gives a parameter's memory back after forward and fills it anew before backward.
"""

OWN_TENSORS: Final = frozenset({Tensor, nn.Parameter})
"""Types of tensors whose attributes are the program's; other types use theirs to work."""

_NONE: Final = frozenset({type(None)})
_NO_NAMES: Final[frozenset[str]] = frozenset()


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; -1 for one from inference mode, which has no counter."""
    return -1 if tensor.is_inference() else tensor._version


def stamp_of(tensor: Tensor) -> Stamp:
    """What moves when a tensor is written to, other than past autograd."""
    has_storage = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return version_of(tensor), lasting_address(tensor) if has_storage else 0


def stamps_of(tensors: Sequence[Tensor]) -> list[Stamp]:
    """That of each."""
    if not placement.streams and OWN_TENSORS.issuperset(map(type, tensors)):
        try:
            return [(tensor._version, tensor.untyped_storage()._cdata) for tensor in tensors]
        except RuntimeError:  # one has no counter, or no storage
            pass
    return list(map(stamp_of, tensors))


class ModuleNotes:
    """What some modules had when this was made.

    Args:
        modules: each once, with all below them.

    Attributes:
        modules: these.
        kinds: their types.
        flags: whether each was in training mode.
        tensors: their parameters and buffers.
        stamps: of these.
        graded: which of these required gradients.
    """

    __slots__ = ("_entries", "_registries", "flags", "graded", "kinds", "modules", "stamps", "tensors")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.kinds = list(map(type, modules))
        self.flags = [module.training for module in modules]
        self._registries: list[dict[str, Any]] = []
        for module in modules:
            self._registries += module._parameters, module._buffers
        places: list[Any] = [module.__dict__ for module in modules]
        places += self._registries
        for module in modules:
            places += module._modules, module._forward_hooks, module._forward_pre_hooks
        # Training flags and registries are among the attributes: another registry is another entry there.
        self._entries = Entries(places, Ours)
        count = len(modules)
        self.tensors: list[Any] = self._entries.values(count, 3 * count, _NO_NAMES, _NONE)
        self.stamps = stamps_of(self.tensors)
        self.graded = [tensor.requires_grad for tensor in self.tensors]

    def are_same(self) -> bool:
        """Whether all is as it was, but for what tensors hold. False: something may differ.

        No value is compared, and what is looked at is held here: so nothing that has changed can look as
        before. Stand-ins of techniques, which come and go, are left out.
        """
        return (
            self._entries.same()  # registries and training flags, too: they are attributes
            and self.kinds == list(map(type, self.modules))
            and self.graded == [tensor.requires_grad for tensor in self.tensors]
        )

    def attributes(self, without: frozenset[str], opaque: frozenset[Any]) -> list[Any]:
        """Values that the modules had as attributes.

        Args:
            without: names that are left out.
            opaque: types that are left out.
        """
        return self._entries.values(0, len(self.modules), without, opaque)

    def attributes_of(self, number: int) -> dict[str, Any]:
        """All that one module had, but for stand-ins."""
        return self._entries.held(number)

    def registries(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Registries of parameters and of buffers, and what they had."""
        first = len(self.modules)
        return [(place, self._entries.held(first + number)) for number, place in enumerate(self._registries)]

    def places_of(self, number: int) -> list[dict[Any, Any]]:
        """Children and forward hooks, of both kinds, that one module had."""
        first = 3 * (len(self.modules) + number)
        return [self._entries.held(first + place) for place in range(3)]


def attributes_of_tensors(tensors: Iterable[Any]) -> list[dict[Any, Any]]:
    """What hangs on tensors, as far as it is the program's."""
    return [tensor.__dict__ for tensor in tensors if type(tensor) in OWN_TENSORS]


never_compiled(version_of, stamp_of, stamps_of, ModuleNotes, attributes_of_tensors)
