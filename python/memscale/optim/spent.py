# SPDX-License-Identifier: Apache-2.0
"""The placeholder in `p.grad` for a gradient that a step in backward has used: reading it raises.

The caller has promised that nobody needs a gradient between backward and the optimizer's step. Who does all
the same must not find None, which reads as "had no gradient", nor numbers. So there is a tensor without
memory, of the gradient's shape, dtype and device; every operation on it, and everything that asks for its
values, raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor


class SpentGradient(Tensor):
    """A gradient that has been used and freed.

    Args:
        parameter: whose.
        name: of the parameter, for the refusal.
    """

    memscale_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> SpentGradient:
        """Makes one."""
        dtype, device = parameter.dtype, parameter.device
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=dtype, device=device
        )
        made.memscale_name = name
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        """Everything has been done: a tensor's own takes no arguments."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses every operation."""
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, SpentGradient):
                value.memscale_refuse()
        raise AssertionError(f"{func} has no spent gradient")

    def memscale_refuse(self, *unused: Any, **named: Any) -> NoReturn:
        """Raises.

        Raises:
            RuntimeError: always; it says what was promised.
        """
        raise RuntimeError(
            f"the gradient of {self.memscale_name!r} is spent: with Config(step_in_backward=True) its "
            "weight is stepped and the gradient freed as soon as it is complete, so this weight has changed "
            "already. Clipping, scaling, accumulating over several backwards (a reentrant checkpoint of a "
            "shared module among them) and reading p.grad before optimizer.step() need step_in_backward=False"
        )

    # What does not pass the dispatcher.
    data_ptr = untyped_storage = numpy = tolist = item = memscale_refuse
    __array__ = __dlpack__ = __reduce_ex__ = __deepcopy__ = memscale_refuse

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"SpentGradient({self.memscale_name!r}, {tuple(self.shape)}, {self.dtype})"

    def is_of(self, parameter: Tensor) -> bool:
        """Whether it has the form of a parameter as that is now, and can be its gradient again."""
        return (
            self.shape == parameter.shape
            and self.dtype is parameter.dtype
            and self.device == parameter.device
            and self.stride() == parameter.stride()
        )
