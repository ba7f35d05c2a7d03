# SPDX-License-Identifier: Apache-2.0
"""Looks up streamed weights by address: which tensors they are, and which device uses them.

An offloaded weight of a card is a tensor of the host. Code that steps it, or allocates something for it,
looks up the card here. This module imports neither optimizers nor traces, so both can import it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class _Weight(Protocol):
    @property
    def backing(self) -> Tensor: ...


class _Unit(Protocol):
    def weight_at(self, offset: int) -> _Weight: ...


class _Blocks(Protocol):
    @property
    def device(self) -> torch.device: ...


class Placing(Protocol):
    """The part of `weights.stream.Stream` that says where each weight lies, by address."""

    @property
    def places(self) -> Mapping[int, tuple[_Unit, _Weight | None]]: ...  # noqa: D102

    @property
    def blocks(self) -> _Blocks: ...  # noqa: D102


streams: weakref.WeakKeyDictionary[nn.Module, Placing] = weakref.WeakKeyDictionary()
"""Model → what streams its weights."""


def known_streams() -> list[Placing]:
    """All streams, as a list: another thread may change `streams` while it is walked."""
    models = (ref() for ref in streams.keyrefs())
    return [stream for model in models if model is not None and (stream := streams.get(model)) is not None]


def lasting_address(tensor: Tensor) -> int:
    """The address of a tensor's storage; for a streamed weight, that of its backing store, which lasts."""
    address: int = tensor.untyped_storage()._cdata
    if not streams:
        return address
    for stream in known_streams():
        if address in stream.places:
            unit, weight = stream.places[address]
            if weight is None:
                weight = unit.weight_at(int(tensor.storage_offset()) * tensor.element_size())
            address = weight.backing.untyped_storage()._cdata
            break
    return address


def is_streamed(tensor: Tensor) -> bool:
    """Whether a tensor is a streamed weight, by where it lies."""
    if not streams or is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    address = tensor.untyped_storage()._cdata
    return any(address in stream.places for stream in known_streams())


def device_of_use(tensor: Tensor) -> torch.device:
    """The device that uses a tensor: the card, for an offloaded weight whose data lie on the host."""
    if tensor.device.type == "cpu" and streams and not is_lazy(tensor):
        address = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
        for stream in known_streams():
            if address in stream.places:
                return stream.blocks.device
    return tensor.device
