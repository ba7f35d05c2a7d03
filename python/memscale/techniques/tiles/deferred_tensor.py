# SPDX-License-Identifier: Apache-2.0
"""The common part of deferred logits and scores: tensors that are computed when their values are read.

    a Python function      ─► __torch_function__ ─► its handler, or on the computed tensor
    an operator beneath it ─► __torch_dispatch__ ─► on the computed tensor, without a graph

What they know beyond that, and how they are computed, is in deferred_logits.py and deferred_scores.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_map_only

Handler = Callable[[Any, Any, Any], Any]
"""Takes a function, its arguments and those by keyword; returns its result, or NotImplemented."""

D = TypeVar("D", bound="DeferredTensor")


class DeferredTensor(Tensor):
    """A tensor with shape, dtype and device that has no values until somebody looks at them."""

    handlers: ClassVar[dict[Any, Handler]]
    """What can be done without values."""

    owner: ClassVar[tuple[str, str]]
    """What it is and which technique put it off, in words."""

    @classmethod
    def on_computed(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on computed tensors."""
        raise NotImplementedError

    def value_beneath(self) -> Tensor:
        """The computed tensor, for an operator beneath autograd. Gradients come through this one's node."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function: in tiles, put off, or on the computed tensor."""
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return cls.on_computed(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What comes past `__torch_function__`, beneath autograd: gradients come back through the node."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            what, tile = cls.owner
            raise RuntimeError(
                f"{func} would change {what} in place that MemScale's {tile} has put off; "
                "set enable_tiling=False"
            )

        def computed(tensor: DeferredTensor) -> Tensor:
            with enable_reentrant_dispatch():  # it takes autograd, which is over here
                return tensor.value_beneath().detach()

        return func(*tree_map_only(cls, computed, args), **tree_map_only(cls, computed, kwargs))


_IN_PLACE: Final = re.compile(
    r"\w*[a-z0-9]_"
    r"|__(i(add|sub|mul|truediv|div|floordiv|mod|pow|and|or|xor|lshift|rshift)|setitem)__"
)


def name_of(func: Any) -> str:
    """Name of a function that was called."""
    return getattr(func, "__name__", str(func))


def is_in_place(func: Any, kwargs: Any) -> bool:
    """Whether a call writes to one of its arguments and returns it."""
    named = _IN_PLACE.fullmatch(name_of(func)) is not None
    return named or "out" in kwargs or kwargs.get("inplace") is True


def run_computed(kind: type[D], compute: Callable[[D], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on what deferred tensors stand for. What it changes in place stays the deferred one."""
    originals: dict[int, D] = {}

    def computed(tensor: D) -> Tensor:
        real = compute(tensor)
        originals[id(real)] = tensor
        return real

    in_place = is_in_place(func, kwargs)
    result = func(*tree_map_only(kind, computed, args), **tree_map_only(kind, computed, kwargs))
    return originals.get(id(result), result) if in_place else result


def getters(*names: str) -> list[Any]:
    """Functions that attributes of tensors are read with."""
    return [getattr(Tensor, name).__get__ for name in names]


QUESTIONS: Final[Iterable[Any]] = (
    *getters("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *getters("is_mkldnn", "is_quantized", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes"),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.element_size),
    *(Tensor.is_contiguous, Tensor.storage_offset, Tensor.get_device, Tensor.__len__, Tensor.is_inference),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
    *getters("_version", "_base"),
)
"""What needs no values to be answered."""
