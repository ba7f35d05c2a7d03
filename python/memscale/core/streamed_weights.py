# SPDX-License-Identifier: Apache-2.0
"""Streamed weights in a traced step (`weights/stream.py`): what they take, and the time of their copies.

    resident   the window, full all the time; no weight that is streamed
    forward    all blocks come once
    backward   and once more: what of them is in memory still is counted again
    the step   reads and writes what is trained

A bound: copies that hide behind the computing count all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from memscale import _core

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.optimizer_path import OptimizerPath


def declare(
    recorder: GraphRecorder, path: OptimizerPath, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Enters streamed weights, which take nothing, and their window. Before the others are entered."""
    streamed = path.streamed
    if not streamed.names:
        return
    for name, parameter in parameters:
        if name in streamed.names:
            recorder.on_host(parameter)
            recorder.graph.set_category(recorder.resident(parameter, 0), _core.CATEGORY_PARAMETER)
    window = recorder.graph.add_resident(streamed.window_bytes, _core.CATEGORY_PARAMETER)
    recorder.graph.note_buffer(window, -1, "blocks of streamed weights")


def come(recorder: GraphRecorder, path: OptimizerPath) -> None:
    """All blocks come, for a forward or a backward."""
    _pass(recorder, "memscale::weights_in", path.streamed.block_bytes, path.link_moves[1])


def are_stepped(recorder: GraphRecorder, path: OptimizerPath) -> None:
    """An optimizer's step reads and writes them in the file."""
    _pass(recorder, "memscale::weights_step", path.streamed.trained_bytes, sum(path.link_moves))


def _pass(recorder: GraphRecorder, name: str, size: int, moves: int) -> None:
    if size and not recorder.paused:
        recorder.graph.add_op(name, 0, size * moves // 1024, 0, 0, _core.WORK_MOVE)
