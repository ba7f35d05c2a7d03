# SPDX-License-Identifier: Apache-2.0
"""Why a step of a model cannot be repeated exactly when memory runs out; found before it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from memscale.state.attribute_tables import has_foreign_hooks
from memscale.techniques.precision.loss_scale import active
from memscale.torchkit import backward_calls
from memscale.torchkit.leaves import has_gradient_hooks
from memscale.torchkit.sharding import has_other_processes

if TYPE_CHECKING:
    from memscale.trace.step import Trace

_HARMLESS_PATH: Final = frozenset({"state_offload"})
"""Optimizer-side techniques that do nothing between forward and the optimizer's step."""


def why_not(
    model: nn.Module,
    trace: Trace,
    path: Collection[str],
    foreign: Sequence[Tensor],
    is_whole_step: bool = False,
) -> str:
    """The reason in words; "": it can be repeated.

    Args:
        model: wrapped.
        trace: of its step.
        path: names of the optimizer-side techniques in force.
        foreign: tensors from outside model and batch that its forward reads.
        is_whole_step: what would be repeated is a step of Lightning's.
    """
    if is_whole_step:
        return "a Lightning step logs, and would log twice"
    if backward_calls.run_backward is None:
        return "this PyTorch runs backward in another way"
    if has_other_processes():
        return "other processes train with this one, and would have to agree"
    if any(tensor.requires_grad for tensor in foreign):
        return "its forward reads a tensor from outside that needs a gradient"
    if trace.writes_outside:
        return f"its forward writes to {trace.writes_outside}, which is no registered buffer"
    releasing = sorted(set(path) - _HARMLESS_PATH)
    if releasing:
        return f"{', '.join(releasing)} takes gradients while backward runs"
    if active():
        return "FP16 with a loss scale is in force"
    return _why_not_modules(model)


def _why_not_modules(model: nn.Module) -> str:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or 'the model'!r} is scripted"
        if module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable"):
            return f"{path or 'the model'!r} is compiled"
        if not path:
            continue  # what hooks the model itself has fire around what is repeated
        if has_foreign_hooks(module) or module._backward_hooks or module._backward_pre_hooks:
            return f"{path!r} has a hook, which would fire twice"
    for path, weight in model.named_parameters():
        if has_gradient_hooks(weight):
            return f"{path!r} has a hook on its gradient, which would fire twice"
    return ""
