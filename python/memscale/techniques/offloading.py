# SPDX-License-Identifier: Apache-2.0
"""Offload of one module: what its forward saves leaves the device, and comes back before backward needs it.

    forward    runs once, under the engine's hooks: each storage that autograd saves is copied out beside the
               computation and let go when the copy is complete
    backward   each saved tensor is on the device again when its node runs; the order was recorded in the step
               before

Nothing runs twice and nothing is rounded, so this is exact for any module, also one that may not be
checkpointed. Parameters, small tensors and what the engine has no room for stay.

Inside there is no checkpoint, and this is inside none: of nested hooks only the innermost are called, so one
of the two would silently do nothing. Of a module that calls itself the outermost call is the one that a plan
knows, with all that is saved in it; those inside belong to it. Inside `torch.compile` it stands aside: the
compiler ends its graph at hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale.offload.engine import Offload
from memscale.techniques.checkpoint import outliving
from memscale.techniques.checkpoint.call_kinds import came_later, stands_aside
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.torchkit.forward_slot import ForwardSlot, StandIn
from memscale.weights.saves import weights_as_places

_here = threading.local()  # `.inside`: a forward of this thread runs under hooks


class OffloadedForward(StandIn):
    """Stands in for `module.forward` while the technique is attached."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        offload: Offload,
        saves: tuple[int, ...] | None,
        ahead_bytes: int,
        path: str,
        check: RecomputeCheck,
    ) -> None:
        super().__init__(module, original)
        self.offload = offload
        self.saves = saves
        self.ahead_bytes = ahead_bytes
        self.path = path
        self.check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward under the engine's hooks, or as it is where nothing is saved."""
        if torch.compiler.is_compiling():
            return self.run_original(*args, **kwargs)
        if self.passive or stands_aside() or came_later(self) or getattr(_here, "inside", False):
            return self.original(*args, **kwargs)
        try:
            _here.inside = True
            left = outliving.Left(self.module, self.path, self.check) if self.check.of_call() else None
            with (
                self.offload.hooks(self.saves, self.ahead_bytes, None if left is None else left.add),
                weights_as_places(),
            ):
                result = self.original(*args, **kwargs)
            if left is not None:
                left.settle()
            return result
        finally:
            _here.inside = False


class OffloadAttachment:
    """Offload of one module, as the executor attaches it.

    Args:
        module: whose saved tensors leave.
        path: its qualified name.
        offload: the plan's engine.
        saves: which of the module's saved tensors leave, as in `Choice.moved`; None: all that are worth it.
        beneath: as in `StepAttachment`: the executor's watch where the module is the model itself.
        ahead_bytes: as in `Choice.ahead_bytes`.
        check: whether it is noticed that a tensor has changed after it left.
    """

    name = "offload"

    def __init__(
        self,
        module: nn.Module,
        path: str,
        offload: Offload,
        saves: tuple[int, ...] | None = None,
        beneath: StandIn | None = None,
        ahead_bytes: int = 0,
        check: RecomputeCheck = UNCHECKED,
    ) -> None:
        self.path = path
        self.check = check
        self.offload = offload
        self.saves = saves
        self.ahead_bytes = ahead_bytes
        self.slot = ForwardSlot(module, path, beneath)  # weakly: the model may be the module, and owns this

    def attach(self) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced.
        """
        module, present = self.slot.module, self.slot.present
        about = self.offload, self.saves, self.ahead_bytes, self.path, self.check
        self.slot.put(OffloadedForward(module, present, *about))

    def undo(self) -> None:
        """Restores `module.forward`. What is offloaded stays reachable for the graphs that need it."""
        self.slot.remove()
