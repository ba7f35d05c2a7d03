# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles of queries: the full matrix of scores is never allocated.

For attention that no fused kernel computes: softmax(q @ kᵀ) @ v, written out. While the forward of a module
that could do that runs, a product of queries and keys is put off (deferred_scores.py), and so are the steps
between it and the values; their product runs in tiles (attention_run.py). Which module does it shows when it
runs: one for which nothing ran in tiles is not `used`. What looks at scores (attentions that are returned are
not looked at by that), and dropout on them, computes them as plain PyTorch does.

Rounds differently from plain PyTorch, as products of other shapes do.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale.techniques.checkpoint.call_kinds import runs_plain
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut
from memscale.techniques.tiles import attention_products
from memscale.techniques.tiles.attention_source import Report, saving_hooks
from memscale.techniques.tiles.deferred_scores import DeferredScores, defer
from memscale.torchkit.forward_slot import ForwardSlot, StandIn, beneath_stand_ins, is_replaced

NAME = "attention_tile"


class _Watch(TorchFunctionMode):
    """Puts off products of queries and keys while a module's forward runs.

    Where watched modules lie in each other the innermost one is asked first.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report
        self.hooks = saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or puts it off."""
        kwargs = kwargs or {}
        if func in attention_products.FUNCTIONS and not self._is_off(args):
            scores = defer(func, args, kwargs, self.report)
            if scores is not None:
                return scores
        return func(*args, **kwargs)

    def _is_off(self, args: Any) -> bool:
        """Whether a product is to be made as it is."""
        if runs_plain() or any(isinstance(value, DeferredScores) for value in args):
            return True
        # A checkpoint inside the forward runs its part again in backward, where nobody watches.
        return bool(saving_hooks() != self.hooks)


class WatchedForward(StandIn):
    """Stands in for the forward of a module that could be an attention.

    Attributes:
        report: what became of its attentions.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__(module, original)
        self.report = Report()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, products of queries and keys put off; or as it is where that cannot be."""
        if torch.compiler.is_compiling():
            return self.run_original(*args, **kwargs)
        if self.passive or runs_plain() or torch._C._get_tracing_state():
            return self.original(*args, **kwargs)
        with _Watch(self.report):
            return self.original(*args, **kwargs)


class AttentionTiles:
    """Tiles of queries in one module, as planner and executor attach it.

    Args:
        module: that could be an attention.
        path: its qualified name.
    """

    name = NAME

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.beneath: StandIn | None = None
        self._slot: ForwardSlot | None = None
        self._report = Report()

    @property
    def used(self) -> bool:
        """Whether an attention has run in tiles since it was attached last."""
        return self._report.used

    @property
    def reason(self) -> str:
        """Why one did not; "" if there was none, or all did."""
        return self._report.reason

    def attach(self) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced.
        """
        slot = ForwardSlot(self.module, self.path, self.beneath)
        forward = WatchedForward(self.module, slot.present)
        slot.put(forward)
        self._slot, self._report = slot, forward.report

    def undo(self) -> None:
        """Restores `module.forward`."""
        slot, self._slot = self._slot, None
        assert slot is not None
        slot.remove()


# ---- where it may attach -----------------------------------------------------------------------------

_DEEPEST = 3
"""Functions in functions that are read: a forward, the attention it calls, and a helper of that."""


def find(model: nn.Module, left_out: LeftOut = NOTHING_LEFT_OUT) -> list[AttentionTiles]:
    """Modules whose code has products of matrices and a softmax: only these could be attentions.

    Args:
        model: bare.
        left_out: modules to leave alone.
    """
    known: dict[Any, bool] = {}
    found = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or left_out.bars(path):
            continue
        key = type(module), tuple(type(child) for child in module.children())
        if key not in known or is_replaced(module):
            known[key] = _could_attend(module)
        if known[key]:
            found.append(AttentionTiles(module, path))
    return found


def _could_attend(module: nn.Module) -> bool:
    own = beneath_stand_ins(module.forward)
    forward = inspect.unwrap(getattr(own, "__func__", own))
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False
    names: set[str] = set()
    with suppress(Exception):  # code of any kind
        for function in _reached(module, forward, _DEEPEST, set()):
            names.update(_names(function.__code__))
    return not names.isdisjoint(_SOFTMAX) and not names.isdisjoint(_PRODUCTS)


_SOFTMAX = frozenset(("softmax", "Softmax"))

_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum", "@"))


def _reached(module: nn.Module, function: FunctionType, depth: int, seen: set[Any]) -> Iterator[FunctionType]:
    """A function and those that it names: of its own file's globals, of its module, of leaves of that."""
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    yield function
    if depth == 0:
        return
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in (*cells, *(_named(module, function, name) for name in _names(function.__code__))):
        if isinstance(value, nn.Module):
            value = type(value).forward if not any(value.children()) else None
        value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(value, FunctionType):
            yield from _reached(module, value, depth - 1, seen)


def _named(module: nn.Module, function: FunctionType, name: str) -> Any:
    return module._modules.get(name) or function.__globals__.get(name) or getattr(type(module), name, None)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """What a function's code names; "@" for products of matrices written so."""
    names = set(code.co_names)
    if any(
        item.opname == "BINARY_MATRIX_MULTIPLY" or item.argrepr in ("@", "@=")
        for item in dis.get_instructions(code)
    ):
        names.add("@")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return frozenset(names)
