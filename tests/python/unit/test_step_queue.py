# SPDX-License-Identifier: Apache-2.0
"""Steps of the core beside backward: the same bits whenever they run, within the window, errors told."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from backward_step_samples import stepped
from calls import beside
from engine_samples import peak_bytes
from memscale import Config
from memscale.optim import take_over
from memscale.optim.step_queue import StepQueue
from memscale.optim.steps import CoreStep
from offloaded_state_samples import equal
from optim_samples import OPTIMIZERS, OUR_ADAMW

pytestmark = OUR_ADAMW

DEPTH, WIDTH = 40, 96
NAME = "memscale-steps"


class Deep(nn.Module):
    """So many layers that several gradients fit the window; the first weight's does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(600, WIDTH)
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x)).square().mean()  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 2400).view(4, 600)


@pytest.fixture(params=["late", "early", "at random"])
def when(request: pytest.FixtureRequest) -> Iterator[str]:
    """When steps run: one each time that backward cannot go on without it; at once; somewhere between."""
    go, generator = threading.Semaphore(0), random.Random(5)

    def asks(condition: threading.Condition, *unused: Any) -> None:
        of_a_queue = "RLock" in repr(condition)  # that of a thread's start has a plain lock
        if of_a_queue and threading.current_thread().name != NAME:
            go.release()

    def late(step: CoreStep, core: Any = None) -> None:
        if core is not None:
            go.acquire()

    def early(result: None, queue: StepQueue, step: CoreStep) -> None:
        with suppress(Exception):  # the next call of the queue says so
            queue.drain()

    def at_random(step: CoreStep, core: Any = None) -> None:
        if core is not None:
            time.sleep(generator.choice((0, 0, 0.001, 0.004)))

    watch = {
        "late": beside({threading.Condition.wait: asks, CoreStep.run: late}),
        "early": beside(after={StepQueue.put: early}),
        "at random": beside({CoreStep.run: at_random}),
    }[request.param]
    with watch:
        yield str(request.param)


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    found = []
    for _ in range(steps):
        loss = model(X)
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(value.detach() for value in model.parameters())]


@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_every_bit_stays_whenever_steps_run(name: str, moments: str, when: str) -> None:
    runs, seen = [], list[int]()
    for in_backward in (False, True):
        model = Deep()
        optimizer = OPTIMIZERS[name](model.parameters())
        assert take_over(optimizer, moments) == ""
        if not in_backward:
            runs.append((run_steps(model, optimizer), optimizer.state_dict()))
            continue
        with stepped(model, optimizer) as made:
            assert made.steps is not None
            queue = made.steps.queue
            with beside(after={StepQueue.put: lambda result, queue, step: seen.append(queue.waiting_bytes)}):
                runs.append((run_steps(model, optimizer), optimizer.state_dict()))
        assert len(seen) == 4 * (2 * DEPTH + 1) and max(seen) <= queue.most_bytes
        assert when != "late" or max(seen) > queue.most_bytes - 4 * WIDTH * WIDTH
        assert when != "early" or max(seen) == 0
        assert not any(thread.name == NAME for thread in threading.enumerate())
    assert equal(*runs)


@pytest.mark.long
def test_the_predicted_peak_holds_whenever_steps_run(when: str) -> None:
    kept: list[Any] = []

    def run() -> None:
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = Config(step_in_backward=True, use_8bit_optimizer=True, enable_logging=False)
        memscale.wrap(model, config, X, optimizer=optimizer)
        run_steps(model, optimizer)
        kept.append(model)

    peak = peak_bytes(run)
    executor = memscale.executor_of(kept[0])
    assert executor.in_force.path[-1].steps.queue.most_bytes == executor.planned.trace.path.step_window_bytes
    predicted = executor.plan.predicted.device_used_peak_bytes
    assert 0.98 * predicted <= peak <= predicted
    memscale.detach(kept[0])


def test_a_step_that_fails_beside_backward(when: str) -> None:
    """Backward itself says so, and the optimizer's step which."""
    model = Deep()
    groups = [{"params": model.body[:20].parameters()}, {"params": model.body[20:].parameters()}]
    optimizer = torch.optim.AdamW([{"params": model.first.parameters()}, *groups])
    assert take_over(optimizer) == ""
    with stepped(model, optimizer):
        optimizer.param_groups[1]["lr"] = -1.0
        with pytest.raises(ValueError, match="learning_rate"):
            model(X).backward()
        with pytest.raises(RuntimeError, match=r"perhaps in part: 'body.19.bias'|'body.19.weight'"):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = 1e-3
        run_steps(model, optimizer)
    assert not any(thread.name == NAME for thread in threading.enumerate())


def test_weights_are_stepped_when_backward_ends(when: str) -> None:
    model, plain = Deep(), Deep()
    for each, in_backward in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(each.parameters())
        assert take_over(optimizer) == ""
        if in_backward:
            with stepped(each, optimizer):
                each(X).backward()
                assert equal([*plain.parameters()], [*model.parameters()])
        else:
            each(X).backward()
            optimizer.step()


def core_step(run: Callable[[], object] = lambda: None) -> Any:
    """A step that does something else."""
    made = CoreStep(parameters=[torch.ones(1)], gradients=[torch.ones(4)])
    made.run = lambda core=None: run()  # type: ignore[method-assign]
    return made


def test_a_child_of_fork_has_no_thread() -> None:
    queue, go = StepQueue(64), threading.Event()
    queue.put(core_step())
    queue.drain()
    assert queue.takes(torch.ones(4)) and not queue.takes(torch.ones(17))
    queue.put(core_step(partial(go.wait, 60)))
    child = os.fork()
    if child == 0:
        try:
            right = not queue.takes(torch.ones(4)) and queue.failed() is None
            queue.end()
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    queue.drain()
    queue.end()


def test_what_comes_after_a_failure() -> None:
    """Steps that wait are run; the next to be put is not, until the failure has been told."""
    queue, done, go = StepQueue(64), [], threading.Event()

    def fail() -> None:
        go.wait()
        raise ArithmeticError("of the first")

    first = core_step(fail)
    queue.put(first)
    queue.put(core_step(partial(done.append, 2)))
    go.set()
    with pytest.raises(ArithmeticError, match="of the first"):
        queue.drain()
    with pytest.raises(ArithmeticError, match="of the first"):
        queue.put(core_step(partial(done.append, 3)))
    assert queue.failed() is first.parameters[0] and queue.failed() is None
    queue.put(core_step(partial(done.append, 4)))
    queue.drain()
    queue.end()
    assert done == [2, 4]
