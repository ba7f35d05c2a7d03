# SPDX-License-Identifier: Apache-2.0
"""Several threads run one wrapped model: none of them on what planning or another one has put there."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from calls import beside
from memscale import Config
from memscale.techniques.checkpoint.checkpoint_state import State
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment, Region
from memscale.techniques.tiles import row_run, row_search, row_tiles
from memscale.techniques.tiles.head_call import HeadCall
from memscale.torchkit.exchange_lock import lock_of, share_lock

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
    before = memscale.executor_of(model).plan
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
    assert memscale.executor_of(model).plan is before
    assert caplog.text.count("another thread is in the middle of one") == 1
    assert caplog.text.count("the model keeps its present plan") == 1
    gradients(model, batch(16))  # alone again
    assert memscale.executor_of(model).plan is not before


def test_steps_of_two_threads_are_no_accumulation() -> None:
    """An output that one thread holds is none of the other one's step."""
    model = built()
    memscale.wrap(model, QUIET, batch())
    held = model(batch())
    before = memscale.executor_of(model).plan
    runs = Runs()
    runs.start(lambda: gradients(model, batch()))
    runs.ended()
    assert memscale.executor_of(model).plan is before
    held.sum().backward()


def meeting(*calls: Callable[..., Any]) -> AbstractContextManager[None]:
    """Has two threads meet before each call of a method, if nothing keeps them apart."""
    barrier = threading.Barrier(2)

    def met(*unused: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            barrier.wait(A_MOMENT)
        barrier.reset()

    return beside(dict.fromkeys(calls, met))


def test_second_runs_at_once_leave_the_buffers_in_place() -> None:
    """Each has copies of the statistics for a while. The model's own are to be back in the end."""
    model = built(3)
    memscale.wrap(model, QUIET, batch(512))
    choices = memscale.executor_of(model).plan.choices
    assert any("checkpoint" in choice.techniques and not choice.kept for choice in choices)
    own = dict(model.named_buffers())
    outputs = [model(batch(512)).square().mean(), model(batch(512, seed=2)).square().mean()]
    with meeting(Halting.forward):
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


def test_tiles_of_two_threads_leave_the_parameters_in_place() -> None:
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
        with meeting(row_run.Call.run_first, row_run.Call.backward_of):
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


class Parts(nn.Module):
    """A block in which a part treats each row alone, and the rest does, too, but is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.own(self.norm(x)).tanh()
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Held:
    """Holds the first of some runs within the first tile that it runs or, in backward, runs again."""

    def __init__(
        self, runs: Runs, arriving: Callable[..., Any], method: Callable[..., Any] = row_run.Call.run_first
    ) -> None:
        """`arriving`: what the recompute comes to."""
        self.runs = runs
        self.inside, self.go_on, self.arrived = threading.Event(), threading.Event(), threading.Event()
        self.watch = beside({method: self._held, arriving: self._arrives})

    def __enter__(self) -> Held:
        self.watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.watch.__exit__(*error)

    def _held(self, *unused: Any) -> None:
        if self.runs.threads[:1] == [threading.current_thread()] and not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(TIMEOUT)

    def _arrives(self, *unused: Any) -> None:
        if self.runs.threads[1:] == [threading.current_thread()]:
            self.arrived.set()

    def beside(self, what: Callable[[], Any]) -> list[Any]:
        """Starts the recompute, which is to wait for the first, and then lets that go on."""
        assert self.inside.wait(TIMEOUT)
        thread = self.runs.start(what)
        assert self.arrived.wait(TIMEOUT)
        thread.join(A_MOMENT)
        assert thread.is_alive()
        self.go_on.set()
        return self.runs.ended()


def own_parameters(model: nn.Module, own: Mapping[str, Tensor]) -> bool:
    return all(value is own[name] for name, value in model.named_parameters())


def attached(model: Tiled) -> list[Any]:
    """Tiles, and a checkpoint of all around them."""
    parts: list[Any] = [*row_search.find(model), CheckpointAttachment(model, "")]
    assert len(parts) > 1
    for part in parts:
        part.attach()
    return parts


def test_a_planned_second_run_beside_tiles_leaves_the_parameters_in_place() -> None:
    """Tiles under a chain. The backward comes to tiles without a checkpoint around them first of all."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Parts(), Parts(), Parts()), torch.randn(4, 1024, WIDTH)
    own = dict(model.named_parameters())
    expected = gradients(copy.deepcopy(model), x)
    memscale.wrap(model, Config(memory_budget=1, enable_tiling=True, enable_logging=False), x)
    choices = memscale.executor_of(model).plan.choices
    assert any("checkpoint" in choice.techniques for choice in choices)
    loss = model(x).square().mean()
    runs = Runs()
    with Held(runs, row_run.held_by) as held:
        runs.start(lambda: gradients(model, x + 1, list(own.values())))
        held.beside(loss.backward)
    assert own_parameters(model, own)
    for value, right in zip(own.values(), expected, strict=True):
        assert value.grad is not None
        torch.testing.assert_close(value.grad, right)


@pytest.mark.parametrize("method", [row_run.Call.run_first, row_run.Call.backward_of])
def test_a_second_run_beside_tiles_leaves_the_parameters_in_place(
    method: Callable[..., Any],
) -> None:
    """It finds a tile's stand-ins: they are no state to come back to when it ends."""
    torch.manual_seed(0)
    model, x = Tiled(), torch.randn(2, 450, 16)
    own = dict(model.named_parameters())
    expected = gradients(copy.deepcopy(model), x)
    parts = attached(model)
    runs = Runs()
    try:
        loss = model(x).square().mean()
        with Held(runs, Region.run_again, method) as held:
            runs.start(lambda: gradients(model, x + 1, list(own.values())))
            held.beside(loss.backward)
    finally:
        for part in reversed(parts):
            part.undo()
    assert own_parameters(model, own)
    for value, right in zip(own.values(), expected, strict=True):
        assert value.grad is not None
        torch.testing.assert_close(value.grad, right)


def test_a_first_run_beside_tiles_writes_down_no_stand_in() -> None:
    """Its recompute would put it back, and tiles of a third thread would take it for the parameter."""
    torch.manual_seed(0)
    model, x = Tiled(), torch.randn(2, 450, 16)
    own = dict(model.named_parameters())
    expected = gradients(copy.deepcopy(model), x)
    parts, states = attached(model), list[State]()
    runs = Runs()
    noted = {State.before: lambda state, *unused: states.append(state)}
    try:
        with Held(runs, Region.__init__) as held, beside(after=noted):
            runs.start(lambda: gradients(model, x + 1, list(own.values())))
            _, found = held.beside(lambda: gradients(model, x, list(own.values())))
    finally:
        for part in reversed(parts):
            part.undo()
    known = {id(value) for value in own.values()}
    assert states and all(id(entry[2]) in known for state in states for entry in state.tensors)
    assert own_parameters(model, own)
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)


def test_what_stands_aside_beside_tiles_has_its_gradients() -> None:
    """An input that tiles do not take runs as it is, which needs the parameters themselves."""
    torch.manual_seed(0)
    model, x, other = Tiled(), torch.randn(2, 450, 16), torch.randn(16)
    own = dict(model.named_parameters())
    expected = gradients(model, other)
    found = row_search.find(model)
    for tiles in found:
        tiles.attach()
    runs = Runs()
    try:
        with Held(runs, row_tiles.TiledForward.why_not) as held:
            runs.start(lambda: gradients(model, x, list(own.values())))
            _, right = held.beside(lambda: gradients(model, other, list(own.values())))
        assert found[0].reason
    finally:
        for tiles in reversed(found):
            tiles.undo()
    assert same(right, expected)


def test_a_head_called_beside_tiles_of_a_loss_keeps_its_parameters() -> None:
    """They run on stand-ins where a parameter has hooks."""
    head, rows = nn.Linear(4, 5), torch.ones(2, 4)
    head.weight.register_hook(lambda gradient: None)
    inside, go_on = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(TIMEOUT)
        return nn.functional.linear(x, head.weight, head.bias)

    def call() -> HeadCall:
        return HeadCall(head, slow, None, 5, torch.float32, True, lambda: None)

    runs, first = Runs(), call()
    runs.start(lambda: first.run(rows, first.stand_ins()))
    assert inside.wait(TIMEOUT) and type(head.weight) is Tensor
    second = runs.start(call)
    second.join(A_MOMENT)
    assert second.is_alive()
    go_on.set()
    made = runs.ended()[1]
    assert same(made.params, list(head.parameters())) and all(value.is_leaf for value in made.params)


def test_one_lock_for_a_model_and_its_parts() -> None:
    """Also for what comes later; what two models share brings them together."""
    parts, other = [Tiled(), Tiled()], nn.Sequential(Tiled())
    model = nn.Sequential(*parts)
    share_lock(list(model.modules()))
    lock = lock_of(list(model.modules()))
    assert lock_of([parts[1].mlp.up]) is lock
    extra = nn.Linear(2, 2)
    parts[0].mlp.add_module("extra", extra)
    assert lock_of(list(parts[0].modules())) is lock and lock_of([extra]) is lock
    assert lock_of(list(other.modules())) is not lock
    assert lock_of([*nn.Sequential(Tiled(), parts[1]).modules()]) is lock


def test_two_locks_are_taken_in_one_order_and_given_back() -> None:
    first, second = Tiled(), Tiled()
    locks = [lock_of(list(part.modules())) for part in (first, second)]
    both: list[nn.Module] = [*second.modules(), *first.modules()]

    def is_free() -> list[bool]:
        return [lock.acquire(blocking=False) and lock.release() is None for lock in locks]  # type: ignore[attr-defined]

    with lock_of(both), lock_of([first]), lock_of([second]):
        runs = Runs()
        runs.start(is_free)
        assert runs.ended() == [[False, False]]
    runs.start(is_free)
    assert runs.ended()[1] == [True, True]


def test_a_lock_holds_no_model_and_is_in_no_copy() -> None:
    model = nn.Sequential(Tiled())
    lock = lock_of(list(model.modules()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert lock_of(list(twin.modules())) is not lock
    ref = weakref.ref(model)
    del model, twin
    gc.collect()
    assert ref() is None
