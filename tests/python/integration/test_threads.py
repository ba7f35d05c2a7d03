# SPDX-License-Identifier: Apache-2.0
"""Several threads run one wrapped model: none of them on what planning or another one has put there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from memscale import Config
from memscale.techniques import row_run, row_search

WIDTH, TIMEOUT, A_MOMENT = 32, 60, 0.3
QUIET = Config(memory_budget=1, enable_logging=False)
CALLED: dict[str, Callable[[Tensor], None]] = {}
"""What a test does within a forward. No attribute: a plan would see it change."""


class Halting(nn.Module):
    """An activation within which a test may hold a thread."""

    def forward(self, x: Tensor) -> Tensor:
        if "within" in CALLED:
            CALLED["within"](x)
        return x.tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.within = Halting()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.within(self.up(self.norm(x))))  # type: ignore[no-any-return]


def built(depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(depth)])


def batch(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: Tensor, values: list[Tensor] | None = None) -> list[Tensor]:
    loss = model(x).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters()) if values is None else values))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


class Runs:
    """Threads, whose results and errors are asked for at the end."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.results: list[Any] = []

    def start(self, what: Callable[[], Any]) -> threading.Thread:
        number = len(self.results)
        self.results.append(None)

        def run() -> None:
            try:
                self.results[number] = what()
            except BaseException as error:
                self.results[number] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return self.threads[-1]

    def ended(self) -> list[Any]:
        for thread in self.threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
        return self.results


@pytest.fixture(autouse=True)
def called() -> Any:
    CALLED.clear()
    yield CALLED
    CALLED.clear()


def test_a_forward_waits_for_another_threads_planning(called: dict[str, Any]) -> None:
    """While one plans, the model has tensors without data."""
    model, plain = built(), built()
    memscale.wrap(model, Config(memory_budget=1, enable_logging=False))
    plans, go_on = threading.Event(), threading.Event()

    def hold(x: Tensor) -> None:
        if isinstance(x, FakeTensor) and not go_on.is_set():
            plans.set()
            assert go_on.wait(TIMEOUT)

    called["within"] = hold
    runs = Runs()
    runs.start(lambda: gradients(model, batch()))
    assert plans.wait(TIMEOUT)
    second = runs.start(lambda: gradients(model, batch(seed=2)))
    second.join(A_MOMENT)
    assert second.is_alive()
    go_on.set()
    found = runs.ended()
    called.clear()
    assert same(found[0], gradients(plain, batch())) and same(found[1], gradients(plain, batch(seed=2)))


@pytest.mark.parametrize("where", ["in its forward", "before its backward"])
def test_nothing_is_planned_beside_another_threads_step(
    where: str, called: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A larger batch would have its own plan, and the techniques of the other step would go."""
    model, plain = built(), built()
    memscale.wrap(model, Config(memory_budget=1), batch())
    before = model.__dict__["_memscale_executor"].plan
    inside, go_on = threading.Event(), threading.Event()

    def hold(x: Tensor) -> None:
        if threading.current_thread() is runs.threads[0] and not inside.is_set():
            inside.set()
            assert go_on.wait(TIMEOUT)

    def first() -> list[Tensor]:
        loss = model(batch()).square().mean()
        if where == "before its backward":
            hold(loss)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    if where == "in its forward":
        called["within"] = hold
    runs = Runs()
    runs.start(first)
    assert inside.wait(TIMEOUT)
    with caplog.at_level(logging.WARNING, "memscale"):
        for _ in range(2):
            found = gradients(model, batch(16))
    go_on.set()
    (beside,) = runs.ended()
    called.clear()
    assert same(found, gradients(plain, batch(16))) and same(beside, gradients(plain, batch()))
    assert model.__dict__["_memscale_executor"].plan is before
    assert (
        caplog.text.count("while another thread is in the middle of one: the model keeps its present plan")
        == 1
    )
    gradients(model, batch(16))  # alone again
    assert model.__dict__["_memscale_executor"].plan is not before


def test_steps_of_two_threads_are_no_accumulation() -> None:
    """An output that one thread holds is none of the other one's step."""
    model = built()
    memscale.wrap(model, QUIET, batch())
    held = model(batch())
    before = model.__dict__["_memscale_executor"].plan
    runs = Runs()
    runs.start(lambda: gradients(model, batch()))
    runs.ended()
    assert model.__dict__["_memscale_executor"].plan is before
    held.sum().backward()


def meeting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Has two threads meet before each call of a method, if nothing keeps them apart."""
    barrier, original = threading.Barrier(2), getattr(owner, name)

    def met(*args: Any, **kwargs: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            barrier.wait(A_MOMENT)
        barrier.reset()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, met)


def test_second_runs_at_once_leave_the_buffers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has copies of the statistics for a while. The model's own are to be back in the end."""
    model = built(3)
    memscale.wrap(model, QUIET, batch(512))
    choices = model.__dict__["_memscale_executor"].plan.choices
    assert any("checkpoint" in choice.techniques and not choice.kept for choice in choices)
    own = dict(model.named_buffers())
    outputs = [model(batch(512)).square().mean(), model(batch(512, seed=2)).square().mean()]
    meeting(monkeypatch, Halting, "forward")
    runs = Runs()
    for output in outputs:
        runs.start(output.backward)
    runs.ended()
    assert all(value is own[name] for name, value in model.named_buffers())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x)).relu())  # type: ignore[no-any-return]


class Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.mlp = nn.Linear(16, 16), Wide()

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def test_tiles_of_two_threads_leave_the_parameters_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles run on stand-ins for the parameters, which no other thread may take for them."""
    torch.manual_seed(0)
    model = Tiled()
    inputs = [torch.randn(2, 450, 16), torch.randn(2, 450, 16)]
    own = dict(model.named_parameters())
    found = row_search.find(model)
    assert found
    for tiles in found:
        tiles.attach()
    try:
        expected = [gradients(model, x) for x in inputs]
        meeting(monkeypatch, row_run._Call, "_run_first")
        meeting(monkeypatch, row_run._Call, "_backward_of")
        runs = Runs()
        for x in inputs:
            # The parameters are listed before: tiles of another thread have stand-ins in their place.
            runs.start(lambda x=x: gradients(model, x, list(own.values())))  # type: ignore[misc]
        results = runs.ended()
    finally:
        for tiles in reversed(found):
            tiles.undo()
    assert all(same(*pair) for pair in zip(results, expected, strict=True))
    assert all(value is own[name] for name, value in model.named_parameters())
