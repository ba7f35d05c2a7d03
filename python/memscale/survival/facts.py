# SPDX-License-Identifier: Apache-2.0
"""What the watch knows of a wrapped model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from memscale.plans.plan import Plan
    from memscale.trace.step import Trace


class Facts(NamedTuple):
    """What is in force for a model.

    Attributes:
        plan: the plan; None: none.
        trace: that it was made from.
        path: names of optimizer-side techniques.
        optimizers: that step the model.
        device: where it is.
        is_whole_step: a Lightning step is watched, and not a forward.
    """

    plan: Plan | None
    trace: Trace | None
    path: Collection[str]
    optimizers: Iterable[torch.optim.Optimizer]
    device: torch.device
    is_whole_step: bool = False
