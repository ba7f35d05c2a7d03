# SPDX-License-Identifier: Apache-2.0
"""Proof that a recompute made what its forward made: fingerprints of saved tensors, compared.

    forward      each tensor that is saved and dropped leaves 64 bits of its value behind
    recompute    what comes in its place has the same 64 bits, or backward ends in `RecomputeError`

What a recompute reads and nobody can see (a global, a thread-local, a file), a kernel that another setting
chose, a flipped bit: all of them show in the values, and only there. Backward reads nothing of a recompute
but these saved tensors, so equal fingerprints mean equal gradients. They are compared as the recompute makes
them, before any node of backward is given one.

The core computes them (`memscale/fingerprint.h`). Tensors that lie on a card are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memscale import _core
from memscale.errors import RecomputeError
from memscale.techniques.compiled import never_compiled

Fingerprint = int | None
"""None: of a kind that is not compared."""

_ORDINARY = (Tensor, nn.Parameter)

_fingerprint = _core.fingerprint


class RecomputeCheck:
    """Whether the recomputes of one module are compared with its forwards, and what becomes of a difference.

    Args:
        mode: "always"; "first", for those of the module's first forward; "off".
        failed: is given the module's path and the reason when a recompute differs, on backward's thread.
    """

    def __init__(self, mode: str, failed: Callable[[str, str], None] | None = None) -> None:
        self.mode = mode
        self._failed = failed
        self._has_begun = False

    def of_call(self) -> bool:
        """Whether a forward that begins now is to leave fingerprints."""
        if self.mode == "first" and self._has_begun:
            return False
        self._has_begun = True
        return self.mode != "off"

    def fail(self, error: RecomputeError) -> RecomputeError:
        """Notes that a recompute has gone another way than its forward, and returns the error to raise."""
        if self._failed is not None and error.module is not None:
            self._failed(error.module, error.what)
        return error


UNCHECKED = RecomputeCheck("off")
"""For forwards that nobody has a configuration for."""


SAME_AGAIN = (
    "its forward reads something that has changed since (a global, a class attribute, a thread-local, a file)"
)

OTHER_AGAIN = (
    "its forward does not repeat itself (a random generator of its own, a clock, an operator that is not "
    "deterministic)"
)

OTHER_WAY = "its forward depends on something that has changed since"


def fingerprint(tensor: Tensor) -> Fingerprint:
    """64 bits of a saved tensor's value; not of its shape and dtype, which are compared by themselves."""
    if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided or not tensor.is_cpu:
        return _of_parts(tensor)
    return _fingerprint(tensor)


def _of_parts(tensor: Tensor) -> Fingerprint:
    """Of a subclass, such as one that is sharded: of the tensors that hold it, where it tells them."""
    if type(tensor) in _ORDINARY or not hasattr(tensor, "__tensor_flatten__"):
        return None
    names: Any = tensor.__tensor_flatten__()[0]
    parts = [fingerprint(getattr(tensor, name)) for name in names]
    return None if None in parts else hash(tuple(parts))


never_compiled(RecomputeCheck, fingerprint, _of_parts)
