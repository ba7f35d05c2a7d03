# SPDX-License-Identifier: Apache-2.0
"""Which optimizers, groups and parameters can have our state, why others cannot, and the rule of a group.

What cannot is stepped by PyTorch, in the same step: one parameter in FP16, or one group with `amsgrad`, does
not keep the others from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from memscale.optim import cards
from memscale.weights.placement import device_of_use

MOMENTS: Final = ("code8", "fp32")
"""Forms of the moments: a byte each and one per 128 for their scale, or FP32."""

GRADIENTS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Types of gradients, as the core names them."""

_USUAL: Final = frozenset((torch.float32, torch.bfloat16))
_STRIDED: Final = torch.strided
_SWITCHES: Final = ("amsgrad", "capturable", "differentiable")


@dataclass(frozen=True)
class Kind:
    """A family of optimizers with the same state.

    Attributes:
        name: "adam", "sgd" or "lion".
        moments: names of the moments in PyTorch's state.
        settings: names of what decides a step, and must be numbers.
        counts: whether PyTorch's state has a counter of steps.
    """

    name: str
    moments: tuple[str, ...]
    settings: tuple[str, ...]
    counts: bool


_ADAM: Final = Kind("adam", ("exp_avg", "exp_avg_sq"), ("lr", "betas", "eps", "weight_decay"), True)
_SGD: Final = Kind("sgd", ("momentum_buffer",), ("lr", "momentum", "dampening", "weight_decay"), False)
_LION: Final = Kind("lion", ("exp_avg",), ("lr", "betas", "weight_decay"), False)

KINDS: Final = {kind.name: kind for kind in (_ADAM, _SGD, _LION)}
"""By name. There is one object of each, so they are compared by identity."""


def inner_of(optimizer: Any) -> Any:
    """The optimizer in a wrapper that has no groups of its own, such as accelerate's; anything else: itself.

    A wrapper passes on what is set on it: a copy of one would change the optimizer in it.
    """
    while isinstance(getattr(type(optimizer), "param_groups", None), property):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def kind_of(optimizer: torch.optim.Optimizer) -> Kind | str:
    """The kind of an optimizer, or why it has none. Subclasses of PyTorch's may step differently."""
    base = type(optimizer)
    if base in (torch.optim.AdamW, torch.optim.Adam):
        if base is torch.optim.AdamW and "decoupled_weight_decay" not in optimizer.defaults:
            return "its groups do not say how they decay weights: PyTorch before 2.7"
        return _ADAM
    if base is torch.optim.SGD:
        if not any(group["momentum"] for group in optimizer.param_groups):
            return "without momentum there is no state"
        return _SGD
    # Not PyTorch's; that of lion-pytorch has these settings and no others.
    if base.__name__ == "Lion" and set(optimizer.defaults) == set(_LION.settings):
        if getattr(optimizer, "decoupled_wd", False):
            return "its decoupled_weight_decay is not known here"
        return _LION
    return "only AdamW, Adam, SGD with momentum and Lion"


def group_refusal(kind: Kind, group: dict[str, Any]) -> str:
    """Why the parameters of a group stay with PyTorch; "" if they need not."""
    for name in _SWITCHES:
        if group.get(name):
            return f"{name} is on"
    for name in kind.settings:
        value = group[name]
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(item, Tensor) for item in parts):
            return f"{name} is a tensor"
    if kind is _SGD and not group["momentum"]:
        return "without momentum there is no state"
    return ""


def parameter_refusal(parameter: Tensor) -> str:
    """Why a parameter stays with PyTorch; "" if it need not. Looks at no data."""
    device = device_of_use(parameter)
    if device.type != "cpu":
        reason = cards.why_not(device)
        if reason:
            return reason
    if parameter.dtype is not torch.float32 and parameter.dtype is not torch.bfloat16:
        return f"parameters of {parameter.dtype}"
    if not _is_plain(parameter) or is_lazy(parameter) or parameter.is_neg():
        return "parameters that are not ordinary tensors"
    if not (parameter.is_contiguous() or _is_dense(parameter)):
        return "parameters with gaps or overlaps in memory"
    return ""


def gradient_refusal(parameter: Tensor, gradient: Tensor) -> str:
    """Why a parameter with this gradient stays with PyTorch; "" if it need not."""
    if gradient.layout is not torch.strided:
        return "sparse gradients"
    if gradient.dtype not in GRADIENTS or gradient.device != device_of_use(parameter):
        return f"gradients of {gradient.dtype} on {gradient.device.type}"
    if not (_is_plain(gradient) or _is_released(gradient)) or gradient.shape != parameter.shape:
        return "gradients that are not ordinary tensors"
    return ""


def is_usual(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether both are as nearly all are, and lie in the same order: told with the fewest questions.

    Then neither refusal applies. Otherwise one may or may not.
    """
    return (
        type(parameter) is Parameter
        and type(gradient) is Tensor
        and ((parameter.is_cpu and gradient.is_cpu) or _are_on_card(parameter, gradient))
        and parameter.dtype in _USUAL
        and gradient.dtype in _USUAL
        and gradient.layout is _STRIDED
        and parameter.layout is _STRIDED
        and gradient.shape == parameter.shape
        and gradient.is_contiguous()
        and parameter.is_contiguous()
        and not gradient.is_neg()
        and not parameter.is_neg()
    )


def _are_on_card(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether both are on the same card, which has our kernels."""
    return parameter.is_cuda and parameter.device == gradient.device and not cards.why_not(parameter.device)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory is its own: not one of a class that handles operations itself."""
    return tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _is_released(gradient: Tensor) -> bool:
    """Whether it is one of ours that may be offloaded."""
    return hasattr(gradient, "memscale_bytes")  # a `released.ReleasedGradient`, which is built on this


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order: then a tensor like it has its strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def rule_of(kind: Kind, group: dict[str, Any]) -> dict[str, Any]:
    """What the core is to do with a group, but for the types of arrays."""
    rule = {
        "kind": kind.name,
        "learning_rate": group["lr"],
        "weight_decay": group["weight_decay"],
        "maximize": bool(group.get("maximize")),
    }
    if kind is _SGD:
        for name in ("momentum", "dampening"):
            rule[name] = group[name]
        rule["nesterov"] = bool(group["nesterov"])
        return rule
    rule["beta1"], rule["beta2"] = group["betas"]
    if kind is _ADAM:
        rule["epsilon"] = group["eps"]
        if group.get("decoupled_weight_decay"):
            rule["kind"] = "adamw"
    return rule
