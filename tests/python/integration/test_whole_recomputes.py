# SPDX-License-Identifier: Apache-2.0
"""What a forward holds for a time and gives back itself, without `finally`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.techniques.checkpoint.whole_recomputes import runs_to_the_end

LOCK = threading.Lock()
PLACES: queue.Queue[int] = queue.Queue()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Locks(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not LOCK.acquire(timeout=5):
            raise TimeoutError
        y = self.run(x)
        LOCK.release()
        return y


class LocksInHelper(Block):
    def enter(self) -> None:
        if not LOCK.acquire(timeout=5):
            raise TimeoutError

    def forward(self, x: Tensor) -> Tensor:
        self.enter()
        y = self.run(x)
        LOCK.release()
        return y


class Turn:
    """Is asked for on an object, under other names."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def begin(self) -> None:
        if not self.lock.acquire(timeout=5):
            raise TimeoutError

    def end(self) -> None:
        self.lock.release()


class LocksInObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def forward(self, x: Tensor) -> Tensor:
        self.turn.begin()
        y = self.run(x)
        self.turn.end()
        return y


class Takes(Block):
    def forward(self, x: Tensor) -> Tensor:
        place = PLACES.get(timeout=5)
        y = self.run(x)
        PLACES.put(place)
        return y


class Inside(Block):
    """The block with the lock is part of the one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Locks()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.run(x))


@pytest.mark.parametrize("kind", [Locks, LocksInHelper, LocksInObject, Takes, Inside])
def test_nothing_stays_held(kind: Callable[[], nn.Module]) -> None:
    PLACES.queue.clear()
    PLACES.put(0)

    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(kind() for _ in range(3)))
        if wrapped:
            config = memscale.Config(memory_budget=1, enable_logging=False)
            memscale.wrap(model, config, sample_input=torch.ones(64, 16))
            assert memscale.executor_of(model).plan.active
        seen = []
        for _ in range(2):
            model(torch.randn(64, 16)).square().mean().backward()
            assert not LOCK.locked()
            assert PLACES.qsize() == 1
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return seen

    assert all(map(torch.equal, train(False), train(True)))


def test_by_the_code_of_modules_and_of_what_hangs_on_them() -> None:
    assert runs_to_the_end([Locks()])
    assert runs_to_the_end([Block(), LocksInHelper()])
    assert runs_to_the_end([LocksInObject()])
    assert runs_to_the_end([Takes()])
    assert not runs_to_the_end([Block(), nn.Linear(2, 2), nn.MultiheadAttention(4, 2)])
    block = Block()

    def forward(x: Tensor) -> Tensor:
        with LOCK:
            return x

    block.forward = forward  # type: ignore[method-assign]
    assert not runs_to_the_end([block])

    def locking(x: Tensor) -> Tensor:
        LOCK.acquire()
        LOCK.release()
        return x

    block.forward = locking  # type: ignore[method-assign]
    assert runs_to_the_end([block])
