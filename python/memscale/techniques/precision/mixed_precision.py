# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the model's forward under autocast, and the training loop as it was.

    the loop writes      output = model(batch)
    what runs            with torch.autocast("cuda", dtype=torch.bfloat16): output = model(batch)

Loss, gradients and the dtypes of outputs are those of the second line. Weights, gradients and optimizer state
stay in FP32. Operators that autocast runs in BF16 save BF16 activations, half the bytes.

A card that computes in FP16 and not in BF16 gets FP16, and then this is done as well, as accelerate and
`torch.amp.GradScaler` do it (see loss_scale.py):

    outputs              in FP32
    loss.backward()      runs on S times the loss; what arrives in `.grad` is divided by S
    optimizer.step()     is skipped where a gradient is not finite

For that the optimizer has to be known. Without it, FP16 is refused.

As autocast by hand, one context spans one forward: a weight that is used twice is cast once, and the cast
goes when the forward ends, unless autograd saved it. A checkpoint inside runs the second time under a context
of its own (`checkpoint_state.State.restored`). Autograd's graph is that of the first run, so gradients of a
weight that is used twice add up in the same order and precision as without the checkpoint.

Hooks on the model itself run outside of the context, as they are outside of its forward.

Stands aside:
* under an autocast that the loop has opened, with whatever dtype;
* without gradients: evaluation computes what it did, in the dtypes that it did;
* under functorch's transforms, where the executor stands aside too;
* FP16 in a copy of the model, whose optimizer nobody has named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from memscale.optim.masters import dtype_of
from memscale.techniques.precision import loss_scale_backward
from memscale.techniques.precision.autocast import AutocastAttachment
from memscale.techniques.precision.loss_scale import scale_of
from memscale.torchkit import sharding

if TYPE_CHECKING:
    from memscale.hardware.detect import Hardware


def find(model: nn.Module, hardware: Hardware) -> list[AutocastAttachment]:
    """Autocast over the whole model, where it helps.

    Args:
        model: the model.
        hardware: what the step is to run on; the model need not lie there.
    """
    if why_not(model, hardware):
        return []
    kind, dtype = hardware.device_kind, dtype_for(hardware)
    assert dtype is not None
    scale = scale_of(model) if dtype is torch.float16 else None
    assert not isinstance(scale, str)
    return [AutocastAttachment(model, kind, dtype, scale=scale)]


def why_not(model: nn.Module, hardware: Hardware) -> str:
    """Why mixed precision cannot help, in words; "" if it can.

    Args:
        model: the model.
        hardware: what the step is to run on.
    """
    dtype = dtype_for(hardware)
    if dtype is None:
        return _hardware_reason(hardware)
    if dtype is torch.float16:
        return _fp16_weights_reason(model) or _scale_reason(model, hardware)
    return _bf16_weights_reason(model)


def dtype_for(hardware: Hardware) -> torch.dtype | None:
    """What to compute in: BF16, or FP16 on cards that have no BF16; None: FP32 is faster."""
    if hardware.device_kind == "cuda":
        if hardware.supports_bf16:
            return torch.bfloat16
        return torch.float16 if hardware.supports_fp16 else None
    return torch.bfloat16 if hardware.supports_bf16 and onednn_has_bf16() else None


def _hardware_reason(hardware: Hardware) -> str:
    if hardware.device_kind == "cuda":
        return f"{hardware.name} computes neither in BF16 nor in FP16: mixed precision would be slower"
    if not hardware.supports_bf16:
        return "the processor has no BF16 instructions: mixed precision would be slower than FP32"
    return "PyTorch's oneDNN does not compute in BF16 here: mixed precision would be slower than FP32"


def onednn_has_bf16() -> bool:
    """Whether PyTorch's matrix kernels on the CPU use BF16 instructions: they are oneDNN's."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without that question
        return False


def _bf16_weights_reason(model: nn.Module) -> str:
    dtypes = {dtype_of(parameter) for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.float16 in dtypes:
        return "the weights are FP16, and casting them to BF16 would lose digits of each"
    if torch.float32 in dtypes:
        return ""
    if torch.bfloat16 in dtypes:
        return "the weights are BF16 already, and so is what is computed with them"
    return "the model has no FP32 weights"


def _fp16_weights_reason(model: nn.Module) -> str:
    trained = {value.dtype for value in model.parameters() if value.requires_grad}
    if torch.float16 in trained or torch.bfloat16 in trained:
        return (
            "weights that are trained are in half precision, and their gradients cannot be unscaled in FP32"
        )
    return "" if torch.float32 in trained else "the model has no FP32 weights to train"


def _scale_reason(model: nn.Module, hardware: Hardware) -> str:
    """Why the loss cannot be scaled; "" if it can."""
    if sharding.has_units(model) or any(map(sharding.is_sharded, model.parameters())):
        return "FP16 needs steps skipped, on which processes that share weights would have to agree"
    if not loss_scale_backward.is_possible():
        return f"FP16 needs the loss scaled, which MemScale cannot do in PyTorch {torch.__version__}"
    scale = scale_of(model)
    return f"{hardware.name} computes in FP16 but not in BF16: {scale}" if isinstance(scale, str) else ""
