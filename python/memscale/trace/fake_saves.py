# SPDX-License-Identifier: Apache-2.0
"""Placeholders in autograd's graph for tensors that a step on fakes saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from memscale.ops import fake_results
from memscale.torchkit.save_slots import Slot
from memscale.trace.recorder import GraphRecorder, metadata_of


class _RealPlaceholder:
    """What stands in the autograd graph for a saved tensor that is real: its values.

    They lie in memory of their own. The tensor itself would keep its buffer alive for as long as it is saved,
    and the trace would not see that nothing else does.

    Args:
        slot: the save.
        tensor: what is saved.
        stays: the tensor outlives the step, so it may be kept itself.
    """

    __slots__ = ("slot", "stays", "tensor")

    def __init__(self, slot: Slot, tensor: Tensor, stays: bool) -> None:
        self.slot = slot
        self.stays = stays
        self.tensor = tensor.detach() if stays else _real_copy(tensor)

    def __del__(self) -> None:
        self.slot.drop()


class _FakePlaceholder:
    """What stands in the autograd graph for a saved fake tensor."""

    __slots__ = ("metadata", "mode", "slot")

    def __init__(self, slot: Slot, tensor: FakeTensor) -> None:
        self.slot = slot
        self.metadata = metadata_of(tensor)
        self.mode = tensor.fake_mode

    def __del__(self) -> None:
        self.slot.drop()


def _real_copy(tensor: Tensor) -> Tensor:
    """The same values, dtype, shape and strides on other memory. Not recorded."""
    with torch._C._DisableTorchDispatch(), unset_fake_temporarily():
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = tensor.untyped_storage().clone()  # strides may repeat elements, which `copy_` refuses
        return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


class FakeSaves:
    """Pack and unpack for the static trace."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder

    def pack(self, tensor: Tensor) -> object:
        """What autograd gets in place of a tensor that it saves."""
        if _is_parameter(tensor) or tensor.layout is not torch.strided:
            return tensor
        slot = self.recorder.save(tensor)
        return (
            _FakePlaceholder(slot, tensor)
            if isinstance(tensor, FakeTensor)
            else _RealPlaceholder(slot, tensor, slot.buffer in self.recorder.foreign)
        )

    def unpack(self, packed: Any) -> Tensor:
        """What backward gets for it."""
        recorder = self.recorder
        if isinstance(packed, Tensor):
            recorder.unpack_kept(packed)
            return packed
        slot = packed.slot
        recorder.unpack(slot)
        if isinstance(packed, _RealPlaceholder):
            return self._real(packed)
        *form, size = packed.metadata
        made = fake_results.on_memory_of_its_own(packed.mode, form, size)
        recorder.unpacked_as(slot, made.untyped_storage())
        return made

    def _real(self, packed: _RealPlaceholder) -> Tensor:
        if packed.stays:
            return packed.tensor
        values = _real_copy(packed.tensor)
        self.recorder.unpacked_as(packed.slot, values.untyped_storage())
        return values
