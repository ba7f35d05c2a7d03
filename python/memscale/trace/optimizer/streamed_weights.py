# SPDX-License-Identifier: Apache-2.0
"""Streamed weights in a traced step (`weights/stream.py`): what they take, and the time of their copies.

    resident   no weight that is streamed; on a card the window, full all the time
    forward    from a module's call to the next one's: its block, and that which comes next; all come once
    backward   from a use to the next one, likewise, and at least what recomputes with several blocks have at
               once; all come once more
    the step   reads and writes what is trained

A bound: copies that hide behind the computing count all the same. A recompute comes between two operations
of backward, before a tensor that was saved in it is used: from there on the blocks of before or those of its
module are there, whichever are larger, until a weight of that module is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from memscale import _core

if TYPE_CHECKING:
    from memscale.techniques.optimizer.path import OptimizerPath, Streamed
    from memscale.trace.recorder import GraphRecorder


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

    A buffer of the graph is what is there from one use to the next. Each use is an operation of its own, so
    that neither the one before nor the one that needs a block counts both.

    Args:
        recorder: of the trace.
        streamed: what is streamed.
        blocks: buffer of a parameter → number of its block.
    """

    def __init__(self, recorder: GraphRecorder, streamed: Streamed, blocks: dict[int, int]) -> None:
        self._recorder = recorder
        self._streamed = streamed
        self._blocks = blocks
        self._sizes = [block.nbytes for block in streamed.blocks]
        self._owned: dict[int, frozenset[int]] = {}  # module → numbers of its blocks
        self._saved: dict[int, int] = {}  # save → block of the module that it was packed in
        self._order: list[int] = []  # in which forward uses blocks, and from its end backward
        self._in_use: frozenset[int] = frozenset()  # in forward
        self._present = -1  # block that backward used last
        self._asked = -1  # block that a recompute would use since
        self._in_backward = False
        self._there = -1  # buffer
        self._still = -1  # buffer of what more may be there of before
        self._bytes = 0  # of both

    def begin(self, in_backward: bool) -> None:
        """A forward or a backward begins."""
        self._in_backward = in_backward
        self._in_use = frozenset()
        self._present = self._asked = -1  # what forward had went with its end
        self._bytes = self._streamed.inner_bytes if in_backward else 0
        self._there = self._made(self._bytes)

    def end(self) -> None:
        """It is over."""
        if not self._in_backward:
            self._next_is(frozenset(self._order[-2:-1]))  # what backward would ask for first
        self._end_still()
        self._recorder.graph.end_buffer(self._there)

    # ---- forward -----------------------------------------------------------------------------------

    def called(self, module: int) -> None:
        """A module of the graph begins to run."""
        if not self._owned:
            self._find_owners()
        own = self._owned.get(module)
        if own is None:
            return
        if self._in_backward:  # a recompute of the model's own
            self._come(min(own))
            return
        outer = (self._owned.get(item, frozenset()) for item in self._recorder.open_modules)
        blocks = own.union(*outer)
        if blocks == self._in_use:
            return
        self._next_is(blocks)
        self._use(0)  # until it is known what comes next
        self._in_use = blocks
        self._order.extend(block for block in sorted(own) if self._order[-1:] != [block])

    def saved(self, save: int) -> None:
        """A tensor has been saved, in forward."""
        for module in reversed(self._recorder.open_modules):
            if module in self._owned:
                self._saved[save] = min(self._owned[module])
                break

    def _find_owners(self) -> None:
        graph, paths = self._recorder.graph, self._recorder.module_ids
        for number, block in enumerate(self._streamed.blocks):
            for module in (paths[path] for path in block.owners if path in paths):
                self._owned[module] = self._owned.get(module, frozenset()) | {number}
        for path in self._streamed.too_large:
            if path in paths:
                graph.mark_module(paths[path], _core.MODULE_NO_ROOM)

    def _next_is(self, blocks: frozenset[int]) -> None:
        """It is known what comes after the blocks in use."""
        size = sum(self._sizes[block] for block in self._in_use | blocks) if self._in_use else 0
        self._recorder.graph.set_size(self._there, size)

    # ---- backward ----------------------------------------------------------------------------------

    def unpacked(self, save: int, buffer: int | None) -> None:
        """Backward is about to use a saved tensor: a weight, or what a recompute may have to make first."""
        if not self._in_backward:
            return
        if buffer in self._blocks:
            self._come(self._blocks[buffer])
        elif (block := self._saved.get(save, -1)) not in (-1, self._present, self._asked):
            before = self._bytes
            self._asked = block
            self._use(self._with_next(block))
            if before > self._bytes:
                self._still = self._made(before - self._bytes)
                self._bytes = before

    def read(self, tensors: Iterable[Tensor]) -> None:
        """The operation that was entered last has read these."""
        if not self._in_backward:
            return
        for tensor in tensors:
            buffer = self._recorder.buffer_of(tensor)
            if buffer in self._blocks:
                self._come(self._blocks[buffer])

    def _come(self, block: int) -> None:
        if block == self._present:
            return
        is_there = block == self._asked
        self._present, self._asked = block, -1
        while self._order and self._order[-1] != block:
            self._order.pop()
        if is_there:  # and a recompute, which comes here, has nothing of before
            self._end_still()
            self._bytes = self._with_next(block)
        else:
            self._use(self._with_next(block))

    def _with_next(self, block: int) -> int:
        """A block and the one that comes next, that of before in forward; at least what recomputes have."""
        following = max(self._sizes)
        if block in self._order:
            last = len(self._order) - 1 - self._order[::-1].index(block)
            following = sum(self._sizes[one] for one in self._order[max(0, last - 1) : last])
        return max(self._streamed.inner_bytes, self._sizes[block] + following)

    # ---- buffers -----------------------------------------------------------------------------------

    def _use(self, size: int) -> None:
        graph = self._recorder.graph
        self._end_still()
        graph.end_buffer(self._there)
        graph.add_op("memscale::weights_next", 0, 0, 0, 0, _core.WORK_MOVE)
        self._there, self._bytes = self._made(size), size

    def _end_still(self) -> None:
        if self._still >= 0:
            self._recorder.graph.end_buffer(self._still)
        self._still = -1

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
    trained = 0 if path.host_step_moves else path.streamed.trained_bytes  # the host does it at home
    _pass(recorder, "memscale::weights_step", trained, sum(path.link_moves))


def _pass(recorder: GraphRecorder, name: str, size: int, moves: int) -> None:
    if size and not recorder.paused:
        recorder.graph.add_op(name, 0, size * moves // 1024, 0, 0, _core.WORK_MOVE)
