# SPDX-License-Identifier: Apache-2.0
"""Checkpointing as people write it by hand, over the blocks of a model, with `torch.utils.checkpoint`.

    every block     each is checkpointed
    every second    the first, third, …
    segments        √n runs of consecutive blocks, each run checkpointed as one; the last is not: as
                    `torch.utils.checkpoint.checkpoint_sequential` does it
    selective       each block is checkpointed, but the outputs of matrix products, convolutions and attention
                    are kept: the compute-intensive operations, as PyTorch's introduction to it lists them
    selective half  likewise, but of matrix products only every second one of linear layers: torchtitan's way

A block is a list of modules that run one after another: a transformer's layer is a list of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Block = Sequence[nn.Module]
Stacks = Sequence[Sequence[Block]]
"""The blocks of a model; an encoder and a decoder are two stacks."""

ContextFn = Callable[[], Any]

_aten = torch.ops.aten
LINEAR = {_aten.mm.default, _aten.addmm.default}
ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
COMPUTE_INTENSIVE = LINEAR | ATTENTION | {_aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default}


def one_region(modules: Sequence[nn.Module], context_fn: ContextFn | None = None) -> None:
    """Checkpoints modules that run one after another, each on the result of the one before, as one.

    The first runs all of them, and the others give back what it made.
    """
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    forwards = [module.forward for module in modules]
    made: list[Any] = []

    def run(value: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            result = forward(value, *args, **kwargs)
            value = result[0] if isinstance(result, tuple) else result
        return result

    def first(*args: Any, **kwargs: Any) -> Any:
        result = checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
        if len(forwards) > 1:
            made.append(result)
        return result

    def other(*args: Any, is_last: bool, **kwargs: Any) -> Any:
        return made.pop() if is_last else made[-1]

    for module in modules:
        module.forward = functools.partial(other, is_last=module is modules[-1])  # type: ignore[method-assign]
    modules[0].forward = first if len(modules) > 1 else _alone(forwards[0], options)  # type: ignore[method-assign]


def _alone(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def every_block(stacks: Stacks) -> None:
    """Each block."""
    _each(stacks, None)


def every_second(stacks: Stacks) -> None:
    """The first, third, fifth block …"""
    for blocks in stacks:
        for block in blocks[::2]:
            one_region(block)


def segments(stacks: Stacks) -> None:
    """√n segments per stack, all but the last checkpointed."""
    for blocks in stacks:
        count = max(round(math.sqrt(len(blocks))), 2)
        size = len(blocks) // count
        for start in range(0, size * (count - 1), size):
            one_region([module for block in blocks[start : start + size] for module in block])


def selective(stacks: Stacks) -> None:
    """Each block, with the outputs of compute-intensive operations kept."""

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _policy(operation in COMPUTE_INTENSIVE)

    _each(stacks, lambda: create_selective_checkpoint_contexts(keep))


def selective_half(stacks: Stacks) -> None:
    """Each block, with attention, convolutions and every second product of linear layers kept."""

    def contexts() -> Any:
        products = 0

        def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal products
            if operation not in LINEAR:
                return _policy(operation in ATTENTION or operation == _aten.convolution.default)
            products += 1
            return _policy(products % 2 == 1)

        return create_selective_checkpoint_contexts(keep)

    _each(stacks, contexts)


def _each(stacks: Stacks, contexts: ContextFn | None) -> None:
    for blocks in stacks:
        for block in blocks:
            one_region(block, contexts)


def _policy(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


TECHNIQUES: dict[str, Callable[[Stacks], None]] = {
    "every block": every_block,
    "every second": every_second,
    "segments": segments,
    "selective": selective,
    "selective half": selective_half,
}
