# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are sharded over processes (FSDP2's `fully_shard`), as a trace is to see them.

    in training   a unit's hooks gather its parameters before its forward and before its backward, and free
                  them after
    in the trace  every parameter is there, whole, and no hook runs: a hook would communicate, and would have
                  the fakes for what was gathered

So the plan counts whole parameters, gradients and optimizer state where each process holds a share. What FSDP
gathers and reduces at one moment takes less than that, unless there are few units and few processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""Where PyTorch has `fully_shard`: before 2.6 in the second alone."""

_DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")
"""Where PyTorch has DTensor: in 2.4 in the second alone."""

NOTE = "sharded by fully_shard: planned for whole parameters, gradients and optimizer state"


def _loaded(name: str, homes: tuple[str, ...]) -> Any:
    """A class from the first of its homes that has it; None while nobody has imported one of them."""
    found = (getattr(sys.modules.get(home), name, None) for home in homes)
    return next((kind for kind in found if kind is not None), None)


def has_other_processes() -> bool:
    """Whether processes train together with this one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    kind = _loaded("FSDPModule", _FSDP2)
    return kind is not None and isinstance(module, kind)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one process's share of a larger one."""
    kind = _loaded("DTensor", _DTENSOR)
    return kind is not None and isinstance(tensor, kind)


def has_units(model: nn.Module) -> bool:
    """Whether anything in a model was sharded by `fully_shard`."""
    return any(map(is_unit, model.modules()))


def refusal(model: nn.Module) -> str:
    """Why the model cannot be traced at all; "" if it can."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    first = getattr(fsdp, "FullyShardedDataParallel", None)
    if first is not None and any(isinstance(module, first) for module in model.modules()):
        return (
            "FullyShardedDataParallel keeps parameters in flat buffers that only its own hooks can undo. Use "
            "fully_shard, or wrap the model before it is sharded and give wrap a sample_input"
        )
    return ""


def local(tensor: Tensor) -> Tensor:
    """This process's share of a tensor; a tensor that is not sharded is its own."""
    if not is_sharded(tensor):
        return tensor
    share: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return share


def why_no_backward(model: nn.Module, inside: bool) -> str:
    """Why a step cannot be run for its gradients alone, and leave no trace; "" if it can.

    Sharded parameters get their gradients from the units' own backward, which puts them into `.grad` and adds
    what earlier backwards have left unreduced.

    Args:
        model: any module.
        inside: its forward is running.
    """
    if not has_units(model):
        return ""
    if inside:
        return (
            "the model is in a forward of fully_shard's, which a second one would disturb; call "
            "memscale.verify on every process between two steps"
        )
    if any(getattr(value, "_post_accumulate_grad_hooks", None) for value in model.parameters()):
        return "fully_shard would run the hooks that wait for gradients (register_post_accumulate_grad_hook)"
    if not all(map(_is_clean, filter(is_unit, model.modules()))):
        return "gradients are being accumulated without reduction (set_requires_gradient_sync)"
    return ""


def _is_clean(unit: Any) -> bool:
    """Whether a unit reduces its gradients, and has none that are not reduced."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one per unit, in earlier versions
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    return all(group.reduce_grads and group.all_reduce_grads for group in groups) and not any(
        parameter.unsharded_accumulated_grad is not None
        for group in groups
        for parameter in group.fsdp_params
    )


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Runs the block without the hooks of `fully_shard`."""
    undo: list[tuple[Any, list[tuple[int, Any]]]] = []
    try:
        for module in filter(is_unit, model.modules()):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if any(map(_is_own, hooks.values())):
                    undo.append((hooks, list(hooks.items())))
                    for key in [key for key, hook in hooks.items() if _is_own(hook)]:
                        del hooks[key]
        yield
    finally:
        for hooks, items in undo:  # in the order that they were in
            hooks.clear()
            hooks.update(items)


def _is_own(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_FSDP2)
