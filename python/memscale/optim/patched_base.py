# SPDX-License-Identifier: Apache-2.0
"""The mark of a patched optimizer, one that has our state, and how to test for it."""

from __future__ import annotations

import functools
import weakref
from typing import Any, ClassVar

import torch

from memscale.optim.arrays import Empty, in_memory
from memscale.optim.kinds import Kind, inner_of


class PatchedOptimizer(torch.optim.Optimizer):
    """What an optimizer has more while it is patched."""

    _memscale_base: ClassVar[type[torch.optim.Optimizer]]
    _memscale_kind: ClassVar[Kind]
    _memscale_moments: ClassVar[str]

    def _memscale_empty(self) -> Empty:
        """Makes tensors for a state dict: on the CPU, for a card, too, which may have no room for them."""
        return in_memory


def is_patched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or the one in a wrapper, has our state."""
    return isinstance(inner_of(optimizer), PatchedOptimizer)


def moments_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The form of an optimizer's moments, "code8" or "fp32"; None where it is not ours."""
    inner = inner_of(optimizer)
    return inner._memscale_moments if isinstance(inner, PatchedOptimizer) else None


def base_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class of an optimizer when it is not patched."""
    kind = type(inner_of(optimizer))
    kind = getattr(kind, "_memscale_offload_base", kind)  # as in `optim/offload/attach`
    return kind._memscale_base if issubclass(kind, PatchedOptimizer) else kind


# ---- schedulers of an optimizer without `_init_group` ------------------------------------------------


def can_rewrap(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler's wrapper around the step, if there is one, can be led to another class's step."""
    if "_init_group" in vars(optimizer):
        return False
    wrapper = vars(optimizer).get("step")
    return wrapper is None or hasattr(optimizer, "_init_group") or hasattr(wrapper, "_wrapped_by_lr_sched")


def rewrap(optimizer: torch.optim.Optimizer) -> None:
    """Leads a scheduler's wrapper, which holds the step that it found, to that of the class as it is now."""
    wrapper = vars(optimizer).get("step")
    if hasattr(optimizer, "_init_group") or not hasattr(wrapper, "_wrapped_by_lr_sched"):
        return
    before = getattr(wrapper, "_memscale_before", None)
    step = around_step(optimizer, wrapper) if before is None else before
    optimizer.step = step  # type: ignore[method-assign]


def around_step(optimizer: torch.optim.Optimizer, before: Any) -> Any:
    """A step in place of a scheduler's wrapper: it runs the step of the class as it is then."""
    held = weakref.ref(optimizer)

    @functools.wraps(before)
    def step(*args: Any, **kwargs: Any) -> Any:
        mine: Any = held()
        mine._opt_called = True  # what the scheduler's own does
        return type(mine).step(mine, *args, **kwargs)

    step._memscale_before = before  # type: ignore[attr-defined]
    return step
