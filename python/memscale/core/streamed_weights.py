# SPDX-License-Identifier: Apache-2.0
"""Streamed weights in a traced step (`weights/stream.py`): what they take, and the time of their copies.

    resident   no weight that is streamed; on a card the window, full all the time
    forward    the window, full from its begin to its end; all blocks come once
    backward   the largest two blocks of one of the model's own modules, and what larger ones take beyond that
               while one of them is in use or comes next; all blocks come once more
    the step   reads and writes what is trained

A bound: copies that hide behind the computing count all the same, and a second run, which comes between two
operations of backward, has the blocks that it uses in the room for a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from memscale import _core

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.optimizer_path import OptimizerPath, Streamed


def declare(
    recorder: GraphRecorder, path: OptimizerPath, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Enters streamed weights, which take nothing, and their window. Before the others are entered."""
    streamed = path.streamed
    if not streamed.names:
        return
    block_of = {name: number for number, block in enumerate(streamed.blocks) for name in block.names}
    blocks: dict[int, int] = {}
    for name, parameter in parameters:
        if name in streamed.names:
            recorder.on_host(parameter)
            buffer = recorder.resident(parameter, 0)
            recorder.graph.set_category(buffer, _core.CATEGORY_PARAMETER)
            if name in block_of:
                blocks[buffer] = block_of[name]
    if recorder.cuda is None:
        recorder.uses = Uses(recorder, streamed, blocks)
    else:  # one region, which stays
        _note(recorder, recorder.graph.add_resident(streamed.window_bytes, _core.CATEGORY_PARAMETER))


class Uses:
    """Blocks in a host's memory while a step is traced.

    Args:
        recorder: of the trace.
        streamed: what is streamed.
        blocks: buffer of a parameter → number of its block.
    """

    def __init__(self, recorder: GraphRecorder, streamed: Streamed, blocks: dict[int, int]) -> None:
        self._recorder = recorder
        self._streamed = streamed
        self._blocks = blocks
        self._owned: dict[int, int] = {}  # module → number of its block
        self._order: list[int] = []  # in which forward uses blocks
        self._present = -1
        self._in_backward = False
        self._room = -1
        self._beyond = -1  # buffer of what two blocks take that have no place in the room

    def begin(self, in_backward: bool) -> None:
        """A forward or a backward begins."""
        self._in_backward = in_backward
        self._room = self._made(self._streamed.inner_bytes if in_backward else self._streamed.window_bytes)
        if in_backward and self._order:
            self._come(self._order[-1])

    def end(self) -> None:
        """It is over."""
        self._end_beyond()
        self._recorder.graph.end_buffer(self._room)

    def called(self, module: int) -> None:
        """A module of the graph begins to run."""
        if not self._owned:
            paths = self._recorder.module_ids
            self._owned = {
                paths[path]: number
                for number, block in enumerate(self._streamed.blocks)
                for path in block.owners
                if path in paths
            }
        block = self._owned.get(module, -1)
        if block >= 0 and self._order[-1:] != [block]:
            self._order.append(block)

    def read(self, tensors: Iterable[Tensor]) -> None:
        """The operation that was entered last has read these."""
        if not self._in_backward:
            return
        for tensor in tensors:
            buffer = self._recorder.buffer_of(tensor)
            block = -1 if buffer is None else self._blocks.get(buffer, -1)
            if block not in (-1, self._present):
                self._come(block)

    def _come(self, block: int) -> None:
        """A block is in memory, and the one that comes next: that of before in forward's order."""
        self._present = block
        self._end_beyond()
        while self._order and self._order[-1] != block:
            self._order.pop()
        sizes = [block.nbytes for block in self._streamed.blocks]
        following = [sizes[one] for one in self._order[-2:-1]] if self._order else [max(sizes)]
        size = sizes[block] + sum(following) - self._streamed.inner_bytes
        if size > 0:
            self._beyond = self._made(size)

    def _end_beyond(self) -> None:
        if self._beyond >= 0:
            self._recorder.graph.end_buffer(self._beyond)
        self._beyond = -1

    def _made(self, size: int) -> int:
        buffer = self._recorder.graph.add_buffer(size, _core.CATEGORY_PARAMETER)
        _note(self._recorder, buffer)
        return buffer


@contextmanager
def in_use(recorder: GraphRecorder, path: OptimizerPath, in_backward: bool = False) -> Iterator[None]:
    """All blocks come, for a forward or a backward that runs inside."""
    _pass(recorder, "memscale::weights_in", path.streamed.block_bytes, path.link_moves[1])
    uses = None if recorder.paused or not path.streamed.blocks else recorder.uses
    if uses is not None:
        uses.begin(in_backward)
    yield
    if uses is not None:
        uses.end()


def _note(recorder: GraphRecorder, window: int) -> None:
    recorder.graph.note_buffer(window, -1, "blocks of streamed weights")


def are_stepped(recorder: GraphRecorder, path: OptimizerPath) -> None:
    """An optimizer's step reads and writes them in the file."""
    _pass(recorder, "memscale::weights_step", path.streamed.trained_bytes, sum(path.link_moves))


def _pass(recorder: GraphRecorder, name: str, size: int, moves: int) -> None:
    if size and not recorder.paused:
        recorder.graph.add_op(name, 0, size * moves // 1024, 0, 0, _core.WORK_MOVE)
