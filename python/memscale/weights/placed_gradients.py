# SPDX-License-Identifier: Apache-2.0
"""Sets and moves gradients of weights whose data are not on the device that uses them."""

from __future__ import annotations

from torch import Tensor

from memscale.weights.placement import device_of_use


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """`parameter.grad = gradient`, also where the parameter's data are not where it is used.

    PyTorch refuses a gradient on another device than the data. So the parameter gets data there for that
    moment: the gradient's own, which nothing reads.
    """
    if gradient is None or gradient.device.type == parameter.device.type:
        parameter.grad = gradient
        return
    released = getattr(gradient, "memscale_bytes", None)  # of an `optim.released.ReleasedGradient`
    form = gradient if released is None else released.plain
    before = Tensor.data.__get__(parameter)  # type: ignore[attr-defined]  # not a read of the loop's
    parameter.data = form.detach()
    try:
        parameter.grad = gradient
    finally:
        parameter.data = before


def on_its_device(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, moved to the device that uses the parameter.

    Where a parameter's data are on the host and PyTorch copies a gradient instead of keeping it, the copy is
    on the host, too.
    """
    gradient = parameter.grad
    if gradient is None or gradient.device.type != "cpu":
        return gradient
    device = device_of_use(parameter)
    if device.type == "cpu":
        return gradient
    gradient = gradient.to(device)
    set_gradient(parameter, gradient)
    return gradient
