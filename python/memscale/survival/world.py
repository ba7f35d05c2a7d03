# SPDX-License-Identifier: Apache-2.0
"""Puts the world back for good after a forward that failed half-way, so that it can begin anew.

`State.restored` puts a forward's world back for the time of a recompute. Here nothing comes again afterwards:
generators stand where they stood, buffers and small tensors that the forward had written hold what they held,
with the versions that graphs of earlier forwards expect, and attributes are what they were.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from memscale.errors import RecomputeError
from memscale.state.tensor_versions import Versions
from memscale.torchkit import python_generators

if TYPE_CHECKING:
    from torch import Tensor

    from memscale.techniques.checkpoint.checkpoint_state import State


class NotAsItWasError(Exception):
    """The failed forward has changed what cannot be put back."""


def rewind(state: State) -> None:
    """Makes the world what it was when `state` was read.

    Args:
        state: read before the forward, whose `after` was not called.

    Raises:
        NotAsItWasError: a weight, or a tensor from outside, was written. Nothing has been put back.
    """
    held = {id(before) for *_, before in state.buffers} | {id(item[2]) for item in state.copies}
    changing = {(id(module._buffers), name) for module, name, _ in state.buffers}
    for registry, name, tensor, (version, _), _ in state.tensors:
        known = (id(registry), name) in changing or id(tensor) in held
        if not known and not tensor.is_inference() and tensor._version != version:
            raise NotAsItWasError(f"the forward writes to {name!r}, which has no copy")
    _put_back_tensors(state)
    with ExitStack() as stack:
        state.attributes.restore(stack, state.attributes.differing(), _not_copied)
        state.settings.restore(stack)
        stack.pop_all()  # for good
    for module, training in state.flags:
        if module.training != training:
            module.training = training
    if state.cpu_rng is not None:
        python_generators.set_cpu(state.cpu_rng)
    for device, before in state.cuda_rng.items():
        torch.cuda.set_rng_state(before, device)
    if state.generators is not None:
        state.generators.put_back()


def _put_back_tensors(state: State) -> None:
    """What registries hold, and what is in the tensors that the forward writes to."""
    for registry, names in state.registries:
        if tuple(registry.keys()) != names:
            values = {name: registry.get(name) for name in names}
            registry.clear()
            registry.update(values)
    for registry, name in state.vacant:
        registry[name] = None
    before_of = {(id(module._buffers), name): before for module, name, before in state.buffers}
    for registry, name, tensor, (version, _), requires_grad in state.tensors:
        if registry[name] is not tensor:
            registry[name] = tensor
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        before = before_of.get((id(registry), name))
        if before is not None:
            _refill(tensor, version, before)
    for _, _, tensor, (version, _), before in state.copies:
        _refill(tensor, version, before)


def _refill(tensor: Tensor, version: int, before: Tensor) -> None:
    """A tensor's contents from before, and the version that it had then; statistics move without one."""
    if tensor.is_inference():
        return
    versions = Versions()
    versions.note(tensor, version)
    with torch.no_grad():
        tensor.copy_(before)
    versions.restore()


def _not_copied(name: str) -> Exception:
    return RecomputeError(f"the forward takes from a {name}, which cannot be copied")
