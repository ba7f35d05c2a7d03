# SPDX-License-Identifier: Apache-2.0
"""Proof that a recompute made what its forward made: fingerprints of saved tensors, compared.

    forward      each tensor that is saved and dropped leaves 64 bits of its value behind
    recompute    what comes in its place has the same 64 bits, or backward ends in `RecomputeError`

What a recompute reads and nobody can see (a global, a thread-local, a file), a kernel that another setting
chose, a flipped bit: all of them show in the values, and only there. Backward reads nothing of a recompute
but these saved tensors, so equal fingerprints mean equal gradients. They are compared as the recompute makes
them, before any node of backward is given one.

The core computes them (`memscale/fingerprint.h`). Those of tensors on a card stay there, and are compared
there; what differed is known when backward is over, before any step (`card_check.py`). Proven on the stand-in
only: no card has run it.

Reading every saved tensor twice would take some percent of a step. A difference goes on, though: it shows in
whatever is computed of it. So what no other save is computed of is looked at as a whole, and of all others a
sample, 1/16 of what is large. The first call of a module looks at everything, and finds out which is which:

    x ─► norm ─► [a] ─► linear ─► [b] ─► gelu ─► [c] ─► linear ─► + ─►      [a], [b] sampled, [c] whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memscale import _core
from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import card_check
from memscale.torchkit.compiled import never_compiled

Fingerprint = int | _core.KeptFingerprint | None
"""On the host a number, on a card what stays there. None: of a kind that is not compared."""

_ORDINARY = (Tensor, nn.Parameter)

_fingerprint = _core.fingerprint


class SavedFlow:
    """Finds the saves of a call that no other save is computed of, by autograd's graph.

    Args:
        inputs: of the call. What lies before them is not its own.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        leaves = (leaf for leaf in inputs if isinstance(leaf, Tensor))
        self._reached: set[Any] = {leaf.grad_fn for leaf in leaves} | {None}
        self._made_by: list[Any] = []

    def add(self, tensor: Tensor) -> None:
        """The next save."""
        self._made_by.append(tensor.grad_fn)

    def ends(self) -> frozenset[int]:
        """Their numbers. What autograd does not know, such as a mask, is none of them."""
        reached = self._reached
        for node in self._made_by:
            pending = [] if node in reached else [before for before, _ in node.next_functions]
            while pending:
                before = pending.pop()
                if before not in reached:
                    reached.add(before)
                    pending += [further for further, _ in before.next_functions]
        return frozenset(index for index, node in enumerate(self._made_by) if node not in reached)


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
        self._ends: frozenset[int] | None = None
        self._count = 0

    def of_call(self) -> bool:
        """Whether a forward that begins now is to leave fingerprints."""
        if self.mode == "first" and self._has_begun:
            return False
        self._has_begun = True
        return self.mode != "off"

    def is_sampled(self, index: int) -> bool:
        """Whether a sample of a save will do, as far as is known of the module's calls."""
        return self._ends is not None and index not in self._ends

    @property
    def knows_flow(self) -> bool:
        """Whether a call has shown which saves are computed from which."""
        return self._ends is not None

    def learn(self, flow: SavedFlow | None, count: int) -> None:
        """A call is over.

        Args:
            flow: of its saves; None: nobody has looked.
            count: of its saves. Another one than before: the next call is examined again.
        """
        if flow is not None:
            self._ends, self._count = flow.ends(), count
        elif count != self._count:
            self._ends = None

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

OTHER_ON_CARD = (
    f"{OTHER_WAY}, or does not repeat itself (a random generator of its own, an operator that is not "
    "deterministic: torch.use_deterministic_algorithms finds those)"
)


_SEEDS = (torch.int64, torch.uint64)


def is_scratch_on_card(tensor: Tensor) -> bool:
    """Whether a save, of a process with a card, may have bytes that nobody writes.

    Attention without dropout saves a seed and an offset, one or two integers, as the allocator gave them
    (also in host memory). Reserves of cuDNN, for batch normalisation or recurrent layers, are lines of bytes.
    What all of these are about shows in other saves.
    """
    if tensor.dtype in _SEEDS:
        return tensor.numel() <= 2
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_cuda


def fingerprint(tensor: Tensor, sampled: bool) -> Fingerprint:
    """64 bits of a saved tensor's value; not of its shape and dtype, which are compared by themselves.

    Args:
        tensor: of any kind.
        sampled: a sample of it will do.
    """
    if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided:
        return _of_parts(tensor, sampled)
    if not tensor.is_cpu:
        return card_check.keep(tensor, sampled) if tensor.is_cuda else None
    try:
        return _fingerprint(tensor, sampled)
    except ValueError:  # no memory of its own: inside a functorch transform, say
        return None


def _of_parts(tensor: Tensor, sampled: bool) -> Fingerprint:
    """Of a subclass, such as one that is sharded: of the tensors that hold it, where it tells them.

    On a card its parts are not compared.
    """
    if type(tensor) in _ORDINARY or not hasattr(tensor, "__tensor_flatten__"):
        return None
    names: Any = tensor.__tensor_flatten__()[0]
    parts = [fingerprint(getattr(tensor, name), sampled) for name in names]
    return hash(tuple(parts)) if all(isinstance(part, int) for part in parts) else None


never_compiled(SavedFlow, RecomputeCheck, is_scratch_on_card, fingerprint, _of_parts)
