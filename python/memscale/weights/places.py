# SPDX-License-Identifier: Apache-2.0
"""Which tensors are streamed weights, and where these are used: by address, for whoever meets one.

A weight of a card that is at home is a tensor of the host. Who steps it, or makes something for it, asks
here for the card. Nothing is imported that knows of optimizers or traces, so all of them can ask.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from memscale.weights.stream import Stream
    from memscale.weights.unit import Unit, Weight

streams: weakref.WeakKeyDictionary[nn.Module, Stream] = weakref.WeakKeyDictionary()
"""Model → what streams its weights."""


def _known() -> list[Stream]:
    """What streams weights now. Another thread may add some meanwhile, so that `streams` cannot be walked."""
    models = (ref() for ref in streams.keyrefs())
    return [stream for model in models if model is not None and (stream := streams.get(model)) is not None]


def lasting_address(tensor: Tensor) -> int:
    """The address of a tensor's storage; of a streamed weight, which comes and goes, of that at home."""
    address: int = tensor.untyped_storage()._cdata
    if not streams:
        return address
    for stream in _known():
        if address in stream.places:
            unit, weight = stream.places[address]
            if weight is None:
                weight = unit.weight_at(int(tensor.storage_offset()) * tensor.element_size())
            address = weight.home.untyped_storage()._cdata
            break
    return address


def device_of_use(tensor: Tensor) -> torch.device:
    """Where a tensor is while it is used: a weight that lies at home on the host may be used on a card."""
    if tensor.device.type == "cpu" and streams and not is_lazy(tensor):
        address = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
        for stream in _known():
            if address in stream.places:
                return stream.blocks.device
    return tensor.device


def apart(parameter: Tensor) -> tuple[Stream, Unit, Weight] | None:
    """What streams a weight that is at home, where that is not the device that it is used on; else None."""
    if not streams or parameter.device.type != "cpu" or device_of_use(parameter).type == "cpu":
        return None
    address = parameter.untyped_storage()._cdata
    for stream in _known():
        unit, weight = stream.places.get(address, (None, None))
        if unit is not None and weight is not None and weight.parameter is parameter:
            return stream, unit, weight
    return None
