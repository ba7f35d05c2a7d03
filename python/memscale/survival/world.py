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
from torch.utils.hooks import RemovableHandle

from memscale.errors import RecomputeError
from memscale.state.module_notes import stamp_of
from memscale.state.tensor_versions import Versions
from memscale.torchkit import python_generators
from memscale.torchkit.leaves import gradients_of

if TYPE_CHECKING:
    from torch import Tensor

    from memscale.techniques.checkpoint.checkpoint_state import State


def why_no_repeat(state: State) -> str:
    """What a forward has done that a second one would do twice; "": nothing.

    Args:
        state: read before the forward, whose `after` was not called.
    """
    if state.next_hook != RemovableHandle.next_id:
        return "its forward registers hooks"
    if gradients_of(state.leaves) != state.gradients:
        return "its forward changes gradients"
    held = {id(item[2]) for item in state.copies}
    changing = {(id(module._buffers), name) for module, name, _ in state.buffers}
    for registry, name, tensor, stamp, _ in state.tensors:
        known = (id(registry), name) in changing or id(tensor) in held
        if not known and stamp_of(tensor) != stamp:
            return f"its forward writes to {name!r}, which has no copy"
    for tensor, stamp in state.foreign:
        if id(tensor) not in held and stamp_of(tensor) != stamp:
            return "its forward writes to a tensor from outside"
    buffers = [module._buffers.get(name) for module, name, _ in state.buffers]
    memory = {buffer.untyped_storage()._cdata for buffer in buffers if buffer is not None}
    written = [tensor for tensor in state.written.present() if id(tensor) not in held]
    if any(tensor.untyped_storage()._cdata not in memory for tensor in written):
        return "its forward writes to a tensor that is no registered buffer"
    return ""


def rewind(state: State) -> None:
    """Makes the world what it was when `state` was read.

    Args:
        state: read before the forward, whose `after` was not called, and without a `why_no_repeat`.
    """
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
    for registry, names in state.registered.registries:
        if tuple(registry.keys()) != names:
            values = {name: registry.get(name) for name in names}
            registry.clear()
            registry.update(values)
    for registry, name in state.registered.vacant:
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
