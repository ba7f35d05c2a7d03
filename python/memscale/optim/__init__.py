# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of our own, 1 to 3 bytes per parameter, in the optimizers that there are.

    kinds     which optimizers, groups and parameters, and the rule that a group means
    arrays    the state of one parameter: bytes, and how they become PyTorch's tensors and come from them
    cards     which cards have the core's kernels, and the core on a card's stream
    steps     one step of a group
    patched   the caller's optimizer with that state: patched, given back
    saved     `state_dict` in PyTorch's form, and back
    masters   weights that are BF16 while they are trained
    offload/  state that is offloaded between steps, and steps of a card's parameters on the host
    release/  gradients that leave the device when they are complete

An optimizer is patched in place: it stays the same object, and its class becomes a subclass of its own.
Schedulers, hooks, gradient scalers and wrappers that hold it hold it on. Steps run in the C core
(`memscale/optim.h` says what they compute), on the arrays in place.

Example:
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    >>> take_over(optimizer)
    ''
    >>> optimizer.step()
    >>> give_back(optimizer)
"""

from __future__ import annotations

from memscale.optim.kinds import MOMENTS
from memscale.optim.patched import convert_state, give_back, take_over
from memscale.optim.patched_base import is_patched, moments_of

__all__ = ["MOMENTS", "convert_state", "give_back", "is_patched", "moments_of", "take_over"]
