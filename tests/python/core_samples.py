# SPDX-License-Identifier: Apache-2.0
"""Small memory graphs for tests of the C core's Python door, built without PyTorch."""

from __future__ import annotations

from memscale import _core

WIDTH_BYTES = 1000


def chain(blocks: int = 2, *, finish: bool = True) -> _core.Graph:
    """A training step of a chain of equal blocks, each of which saves one wide activation.

    Block i: ``mm`` makes a (8 W, saved), ``gelu`` makes the block's output (W), which its successor saves.
    Checkpointing a block frees its a between forward and backward.
    """
    width = WIDTH_BYTES
    g = _core.Graph()
    root = g.add_module("", "Net", flags=_core.MODULE_ROOT)
    ids = [g.add_module(f"blocks.{i}", "Block", root, structure=7) for i in range(blocks)]
    weights = [g.add_resident(width, _core.CATEGORY_PARAMETER) for _ in ids]
    x = g.add_resident(width, _core.CATEGORY_INPUT)

    root_call = g.begin_call(root)
    g.add_input(root_call, x)
    saves, hidden = [], x
    for module in ids:
        call = g.begin_call(module)
        g.add_input(call, hidden)
        g.add_op("aten::mm", flops=2_000_000, moved_bytes=10 * width)
        wide = g.add_buffer(8 * width, _core.CATEGORY_ACTIVATION)
        pair = [g.add_save(hidden), g.add_save(wide)]
        g.add_op("aten::gelu", flops=3000, moved_bytes=9 * width, scratch_bytes=64)
        if hidden != x:
            g.end_buffer(hidden)
        hidden = g.add_buffer(width, _core.CATEGORY_ACTIVATION)
        g.end_buffer(wide)
        g.end_call(call)
        saves.append(pair)
    g.end_call(root_call)
    g.add_op("aten::sum", 250, width)
    loss = g.add_buffer(4, _core.CATEGORY_TEMPORARY)
    g.end_buffer(hidden)

    g.set_phase(_core.PHASE_BACKWARD)
    g.add_op("aten::expand", 0, width)
    grad = g.add_buffer(width, _core.CATEGORY_TEMPORARY)
    gradients = []
    for save_in, save_wide in reversed(saves):
        g.unpack(save_wide)
        g.add_op("aten::gelu_backward", 4000, 17 * width)
        wide_grad = g.add_buffer(8 * width, _core.CATEGORY_TEMPORARY)
        g.release(save_wide)
        g.end_buffer(grad)
        g.unpack(save_in)
        g.add_op("aten::mm", 4_000_000, 12 * width)
        gradients.append(g.add_buffer(width, _core.CATEGORY_TEMPORARY))
        grad = g.add_buffer(width, _core.CATEGORY_TEMPORARY)
        g.release(save_in)
        g.end_buffer(wide_grad)
    g.end_buffer(grad)
    for gradient in gradients:
        g.set_category(gradient, _core.CATEGORY_GRADIENT)

    g.set_phase(_core.PHASE_OPTIMIZER)
    for weight, gradient in zip(weights, reversed(gradients), strict=True):
        g.add_op("aten::add_", 1000, 3 * width)
        g.add_write(weight)
        g.end_buffer(gradient)
    g.end_buffer(loss)
    if finish:
        g.finish()
    return g


def noted() -> _core.Graph:
    """A finished graph of one operation, with notes on it and on both of its buffers."""
    g = _core.Graph()
    g.add_module("", "Model", flags=_core.MODULE_ROOT)
    g.add_module("layer", "Linear", parent=0)
    weight = g.add_resident(4096, _core.CATEGORY_PARAMETER)
    call = g.begin_call(1)
    g.add_op("mm", 100, 200)
    g.note_op(-1, "model.py:7")
    out = g.add_buffer(1024, _core.CATEGORY_ACTIVATION)
    g.note_buffer(out, -1, "float32[256]")
    g.note_buffer(weight, 1, "float32[32, 32] layer.weight")
    g.end_call(call)
    g.finish()
    return g
