# SPDX-License-Identifier: Apache-2.0
"""Holds optimizer state between steps in an offload engine, and passes it through in a step.

    piece i + 1 is fetched      while piece i is computed in its buffer      and piece i − 1 is written

So three pieces are on the device during a step, and none when it is over, but for those that stay resident. A
piece is in its tier or in a tensor at every moment: its place is given up when its bytes are in a buffer,
and the buffer is given up when they are in their place again. What cannot be written stays in its buffer.

On a card nothing of this waits where the tier is pinned memory: copies run on streams of the engine's
own, which wait for the step's where a buffer is filled, and the step's stream waits for them where one is
used or given up. So a buffer goes back to PyTorch's allocator in the order of the stream that it was made
on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Final, NamedTuple

import torch
from torch import Tensor

from memscale import _core
from memscale.errors import MemScaleError
from memscale.offload.engine import Offload
from memscale.optim.offload.host_parts import HostRoom
from memscale.optim.offload.pieces import PIECE_ELEMENTS, Layout, Offloaded, Own, Where, same_place
from memscale.weights.placement import device_of_use

_LOGGER = logging.getLogger("memscale")

STEP: Final = "a step"
SAVE: Final = "state_dict() or a copy"
MOVE: Final = "a move of its state"
"""What has an optimizer's state to itself, as errors say it."""


class Job(NamedTuple):
    """What is to be done with one piece.

    Attributes:
        away: whose.
        number: of the piece.
        work: gets the piece's bytes, or None where it has none yet; returns those that are to be kept, None
            for none.
        begin: called when the piece is asked for; None: nothing.
    """

    offloaded: Offloaded
    number: int
    work: Callable[[Tensor | None], Tensor | None]
    begin: Callable[[], None] | None = None


class StateStore:
    """The engine of one optimizer.

    Args:
        offload: opens it.
        piece_elements: as `PIECE_ELEMENTS`.
        resident: ids of the optimizer's parameters whose pieces stay in memory.
        on_host: our own state of a card's parameters lies in memory of the host, whose cores step it.
    """

    def __init__(
        self,
        offload: Offload,
        piece_elements: int = PIECE_ELEMENTS,
        resident: frozenset[int] = frozenset(),
        on_host: bool = False,
    ) -> None:
        self.offload = offload
        self.piece_elements = piece_elements
        self.resident = resident
        self.on_host = on_host and self.device.type != "cpu"
        self._lock = threading.RLock()
        self._running = threading.RLock()  # after that one; a step beside backward takes this one alone
        self._room: HostRoom | None = None
        self._at = ""  # what the thread does that has the lock
        self._here = threading.local()
        self._said: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Whose parameters' state lies here."""
        return self.offload.settings.device

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """The optimizer's state is this thread's for a block; others wait. May be nested for the same thing.

        A step does not wait for jobs that run beside backward: they are of other parameters.

        Args:
            what: is done: `STEP`, `SAVE` or `MOVE`.

        Raises:
            RuntimeError: this thread is in the middle of another: a signal's handler has come into it, and
                what it would find is half done.
        """
        with self._lock:
            before = self._at
            if before not in ("", what):
                raise RuntimeError(
                    f"{what} was asked for in the middle of {before} of the same optimizer, in the same "
                    "thread: a signal's handler should set a flag, for the loop to do this between steps. "
                    "Nothing is lost, unless this error is not caught and ends what it has come into"
                )
            self._at = what
            try:
                with nullcontext() if what == STEP else self._running:
                    yield
            finally:
                self._at = before

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """A step of the optimizer: what `begin_step` takes in the block is given back, whatever happens."""
        before = getattr(self._here, "step", None)
        with ExitStack() as step:
            self._here.step = step
            try:
                yield
            finally:
                self._here.step = before

    def begin_step(self) -> None:
        """The first group's turn has come, or the next one's: the state is held to the end of the last.

        Not from the beginning of the step: its closure and hooks may save, or wait for a thread that does.
        Outside of `whole_step` this does nothing.
        """
        step = getattr(self._here, "step", None)
        if step is not None:
            step.enter_context(self.held(STEP))

    def end_step(self) -> None:
        """The last group has been stepped."""
        step = getattr(self._here, "step", None)
        if step is not None:
            step.close()

    def place_for(self, parameter: Tensor, layout: Layout) -> Offloaded:
        """Where the state of a parameter is to be; it is not there yet."""
        where, device = self.where_for(parameter, layout), device_of_use(parameter)
        return Offloaded(layout, parameter.numel(), self.piece_elements, where, device)

    def where_for(self, parameter: Tensor, layout: Layout) -> Where:
        """Where the pieces of a parameter are to be between steps."""
        if id(parameter) in self.resident:
            return Where.HERE
        return Where.HOST if self.on_host and isinstance(layout, Own) else Where.ELSEWHERE

    def host_room(self) -> HostRoom:
        """What parts pass through that the host steps."""
        if self._room is None:
            self._room = HostRoom(self.device, self.piece_elements, self.warn)
        return self._room

    def await_host_steps(self) -> None:
        """The card's present stream goes on behind all that steps on the host have sent up so far."""
        if self._room is not None:
            self._room.end()

    def run(self, jobs: Sequence[Job]) -> None:
        """Does jobs in their order. Others wait, but for such as need neither the engine nor the host.

        Raises:
            OSError: a piece could not be read. Those before it are stepped and offloaded.
        """
        with nullcontext() if all(map(_is_here, jobs)) else self._running:
            Run(self, jobs).run()

    def put(self, piece: Tensor) -> _core.Block | None:
        """Starts to write a piece; None where there is no room."""
        block = self.offload.engine.put(piece)
        if block is None:
            self.say("no room in its tiers")
        return block

    def say(self, why: str) -> None:
        """Logs, once, that a piece stays in memory."""
        self.warn(f"some of it stays in memory ({why})", "stays")

    def warn(self, what: str, kind: str = "") -> None:
        """Logs what is not as it was to be, once for each kind of it."""
        if kind not in self._said:
            self._said.add(kind)
            _LOGGER.warning("optimizer state: %s", what)


def _is_here(job: Job) -> bool:
    return job.offloaded.where is Where.HERE and not isinstance(job.offloaded.pieces[job.number], _core.Block)


class Run:
    """Does jobs: one piece in use, the next on its way in, the last one on its way out."""

    def __init__(self, store: StateStore, jobs: Sequence[Job]) -> None:
        self.store = store
        self.jobs = jobs
        self.free: Tensor | None = None  # that was written last
        self.ahead: deque[Tensor | None] = deque()  # buffers of the jobs that come next
        self.leaving: deque[tuple[Job, _core.Block, Tensor]] = deque()

    def run(self) -> None:
        """Does them in turn."""
        self.store.offload.engine.step()
        try:
            for index, job in enumerate(self.jobs):
                if index == 0:
                    self._fetch(job)
                if index + 1 < len(self.jobs):
                    self._fetch(self.jobs[index + 1])
                else:
                    self.free = None  # nothing comes into it
                self.do(job)
            self._settle(0)
        except BaseException:
            self._leave_in_order()
            raise

    def _fetch(self, job: Job) -> None:
        piece, place = job.offloaded.pieces[job.number], job.offloaded.place
        size = piece.nbytes if isinstance(piece, _core.Block) else 0
        buffer = self.buffer(size, place)  # frees the last one, before `begin` takes memory
        if job.begin is not None:
            job.begin()
        if isinstance(piece, _core.Block):
            piece.get(buffer)
            piece = buffer
        elif piece is not None:  # it is where it was before a move that was broken off, or that this is
            piece = piece.to(place)
        self.ahead.append(piece)

    def do(self, job: Job) -> None:
        """Does one, whose piece has been asked for."""
        offloaded, index = job.offloaded, job.number
        before = offloaded.pieces[index]
        if isinstance(before, _core.Block):
            before.arrive()
        else:
            self.free = None  # nothing comes into it
        kept = job.work(self.ahead.popleft())
        offloaded.pieces[index] = kept
        if isinstance(before, _core.Block):
            before.drop()  # its place is the next block's: a step takes no more room than lay there before
        block = None if kept is None or offloaded.where is not Where.ELSEWHERE else self.store.put(kept)
        if kept is not None and block is not None:
            offloaded.pieces[index] = block
            self.leaving.append((job, block, kept))
        self._settle(1)

    def _settle(self, most: int) -> None:
        """Waits until no more than so many pieces are on their way out."""
        while len(self.leaving) > most:
            job, block, buffer = self.leaving[0]
            try:
                block.settle()
            except (OSError, MemScaleError) as error:
                job.offloaded.pieces[job.number] = buffer
                self.store.say(str(error))
            else:
                self.free = buffer
            self.leaving.popleft()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """One of this size. What is here is the pieces in use, and no more."""
        free, self.free = self.free, None
        if free is not None and free.numel() == size and same_place(free.device, device):
            return free
        del free  # before the next one is made
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _leave_in_order(self) -> None:
        """After an error: what was asked for has come, and what was being written is written."""
        for job in self.jobs:
            piece = job.offloaded.pieces[job.number]
            if isinstance(piece, _core.Block):
                _await(piece)
        self._settle(0)


def _await(block: _core.Block) -> None:
    """Waits for what was asked for, if anything was."""
    with contextlib.suppress(OSError, RuntimeError, MemScaleError):
        block.arrive()


def fetched(offloaded: Offloaded) -> Iterator[tuple[int, int, Tensor]]:
    """All pieces of a parameter in turn: first and last element, and the bytes, good until the next one.

    Raises:
        OSError: one could not be read.
    """
    buffer: Tensor | None = None
    for (first, last), piece in zip(offloaded.bounds, offloaded.pieces, strict=True):
        assert piece is not None
        if isinstance(piece, _core.Block):
            if buffer is None or buffer.numel() < piece.nbytes:
                buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=offloaded.device)
            part = buffer[: piece.nbytes]
            try:
                piece.get(part)
                piece.arrive()
            except BaseException:
                _await(piece)  # or it could not be asked for again
                raise
            yield first, last, part
        else:
            yield first, last, piece
