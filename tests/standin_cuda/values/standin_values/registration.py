# SPDX-License-Identifier: Apache-2.0
"""Puts values under every operator of the CUDA build that has a kernel."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from standin_values import attention, formulas, memory, tables
from standin_values.operators import Operator, inside, only_allocating

_FORMULAS = {**attention.FORMULAS, **formulas.FORMULAS}
_library: torch.library.Library | None = None


def _overload(name: str) -> Any:
    """torch.ops.aten.add.Tensor of "aten::add.Tensor"."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class Copy:
    """copy_: between host and device the original's calls of the runtime are real; else it is a kernel."""

    def __init__(self) -> None:
        self.kernel = torch.library.get_kernel("aten::copy_", "CUDA")

    def __call__(self, keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if inside.depth:
            return self.kernel.call_boxed(keys, to, source, non_blocking)
        if not (to.is_cuda and source.is_cuda):
            with only_allocating(False):
                return self.kernel.call_boxed(keys, to, source, non_blocking)
        memory.begin(b"aten.copy_", (source,), (to,))
        aliases = memory.Aliases()
        aliases.of(to).copy_(aliases.of(source))
        return to


def _treatment(name: str) -> Any:
    """What stands in for the operator; None: nothing does."""
    base = name.removeprefix("aten::").partition(".")[0]
    if base in tables.NO_KERNEL or base.startswith(tables.ALIEN):
        return None
    overload = _overload(name)
    returns = [str(value.type) for value in overload._schema.returns]
    numbers = bool(returns) and not any("Tensor" in kind for kind in returns)
    alone = numbers or base in tables.SIZE_FROM_VALUES or base.startswith(tables.OTHER_LIBRARY)
    formula = _FORMULAS.get(name.removeprefix("aten::"))
    return Operator(overload, formula, not alone, base.startswith(tables.IN_SINGLE))


def install() -> None:
    """Registers; a second call does nothing."""
    global _library
    if _library is not None or torch.version.cuda is None:
        return
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    _library = torch.library.Library("aten", "IMPL")
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    treated = {name: _treatment(name) for name in sorted(names) if name.startswith("aten::")}
    treated["aten::copy_"] = Copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, treatment in treated.items():
            if treatment is not None:
                _library.impl(name.removeprefix("aten::"), treatment, "CUDA", with_keyset=True)
