# SPDX-License-Identifier: Apache-2.0
"""CUDA's autocast for tensors that are on the CPU.

`torch.autocast("cuda")` on a machine without CUDA switches itself off, and CPU autocast has other lists: it
leaves `exp`, `softmax` or `layer_norm` in half precision, for example, which CUDA runs in FP32. Inside the
block here, autocast for any device means CUDA's:

    torch.autocast("cuda", dtype) ──► CPU autocast with that dtype
                                          │ operators in both lists: PyTorch's own casts, with their cache
                                          │ in CUDA's only: cast here, by the policy of the lists below
                                          └ in the CPU's only: not cast

The lists are those of aten/src/ATen/autocast_mode.h; the dispatcher of the PyTorch at hand says what is in
them, so that what a version added is known. Only the policy of each name is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memscale.cuda.overrides import Overrides, operator, plain

_LOWER = frozenset(
    [
        "_convolution",
        "_convolution.deprecated",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
)
"""In the lower precision. Everything that is in no other list here runs in FP32."""

_SET_DTYPE = frozenset(
    [
        "prod",
        "prod.dim_int",
        "softmax.int",
        "log_softmax.int",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "linalg_matrix_norm.str_ord",
        "sum",
        "sum.dim_IntList",
    ]
)
"""Not cast, but asked for an FP32 result unless the caller asks for something."""

_APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same, through an overload with a dtype."""

_PROMOTE = frozenset(
    [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    ]
)
"""In the widest type among the operands."""

_BANNED = frozenset({"binary_cross_entropy"})
"""CUDA's autocast refuses these. A step that would be refused needs no prediction: they stay as they are."""


def _eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


class _WeightCasts:
    """Casts of weights are kept until the outermost context ends, as autocast does."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in another type."""
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        lower = torch.get_autocast_dtype("cpu")
        weight = tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32
        if not weight or tensor._is_view() or dtype is not lower or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = (tensor, tensor.to(dtype))
        return known[1]

    def clear(self) -> None:
        """The outermost context has ended."""
        self._known.clear()


Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _policies(casts: _WeightCasts) -> dict[str, Policy]:
    def lower(op: Any, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = tree_map_only(Tensor, lambda tensor: casts.cast(tensor, dtype), (args, kwargs))
        return op(*args, **kwargs)

    def full(op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda tensor: casts.cast(tensor, torch.float32), (args, kwargs))
        return op(*args, **kwargs)

    def set_dtype(op: Any, args: Any, kwargs: Any) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        given = kwargs.get("dtype")
        if given is None and "dtype" in names and names.index("dtype") < len(args):
            given = args[names.index("dtype")]
            args = args[: names.index("dtype")]
        if given is None and _eligible(args[0]):
            given = torch.float32
        return op(*args, **{**kwargs, "dtype": given})

    def append_dtype(op: Any, args: Any, kwargs: Any) -> Any:
        wider = operator(_APPEND_DTYPE[op._schema.name.removeprefix("aten::") + "." + op._overloadname])
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        if op._overloadname == "Scalar" and len(args) == 1:
            args = (*args, 2)
        if op._overloadname == "ScalarOpt_dim" and len(args) == 3:
            args = (*args, False)
        return wider(*args, **kwargs, dtype=dtype)

    def promote(op: Any, args: Any, kwargs: Any) -> Any:
        found: list[Tensor] = []
        tree_map_only(Tensor, found.append, (args, kwargs))
        wide = any(_eligible(tensor) and tensor.dtype is torch.float32 for tensor in found)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        args, kwargs = tree_map_only(Tensor, lambda tensor: casts.cast(tensor, dtype), (args, kwargs))
        return op(*args, **kwargs)

    return {"lower": lower, "full": full, "set": set_dtype, "append": append_dtype, "promote": promote}


def _policy_of(name: str) -> str:
    if name in _LOWER:
        return "lower"
    if name in _SET_DTYPE:
        return "set"
    if name in _APPEND_DTYPE:
        return "append"
    return "promote" if name in _PROMOTE else "full"


def _overrides(casts: _WeightCasts) -> Overrides:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    on_cpu = {name.removeprefix("aten::") for name in registered("AutocastCPU") if name.startswith("aten::")}
    on_cuda = {
        name.removeprefix("aten::") for name in registered("AutocastCUDA") if name.startswith("aten::")
    }
    policies, overrides = _policies(casts), Overrides("AutocastCPU")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    as_on_cuda = (on_cpu & on_cuda) - _PROMOTE
    for name in sorted((on_cpu | on_cuda) - as_on_cuda - _BANNED):
        op = operator(name)
        if op is None:
            continue

        policy = policies[_policy_of(name)]

        def uncast(*args: Any, _op: Any = op, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return _op(*args, **kwargs)

        def by_policy(*args: Any, _op: Any = op, _run: Policy = policy, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return _run(_op, args, kwargs)

        # A composite operator that is in no list has parts that may be in one.
        otherwise = plain(op) if _is_composite(op) else uncast
        overrides.add(name, by_policy if name in on_cuda else otherwise, otherwise)
    return overrides


def _is_composite(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


class CudaAutocast:
    """Autocast as on CUDA, inside `active`.

    A context that was made for "cuda" before, on a build without CUDA, has switched itself off when it was
    made, and looks like one that is meant to be off.
    """

    def __init__(self) -> None:
        self._casts = _WeightCasts()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the block with CUDA's autocast; one that is on around it, for either device, stays on."""
        with ExitStack() as stack:
            stack.enter_context(_overrides(self._casts))
            stack.enter_context(self._redirected())
            stack.enter_context(self._ambient())
            yield

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        make, leave = torch.autocast.__init__, torch.autocast.__exit__
        asked = torch.is_autocast_enabled
        casts = self._casts

        def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
            make(self, device_type, dtype, *args, **kwargs)

        def exit_(self: Any, *args: Any) -> Any:
            result = leave(self, *args)
            if not asked("cpu"):
                casts.clear()
            return result

        def enabled(device_type: str = "cpu") -> bool:
            return asked("cpu" if device_type == "cuda" else device_type)

        torch.autocast.__init__, torch.autocast.__exit__ = init, exit_  # type: ignore[method-assign]
        torch.is_autocast_enabled = enabled
        try:
            yield
        finally:
            torch.autocast.__init__, torch.autocast.__exit__ = make, leave  # type: ignore[method-assign]
            torch.is_autocast_enabled = asked

    @contextmanager
    def _ambient(self) -> Iterator[None]:
        states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        (_, on_cpu, _), (_, on_cuda, dtype) = states
        if on_cuda and not on_cpu:
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_dtype("cpu", dtype)
        try:
            yield
        finally:
            self._casts.clear()
            for kind, enabled, dtype in states:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)

    def forward_is_over(self) -> None:
        """Backward and optimizer run outside of an autocast that was on around the step."""
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
        self._casts.clear()
