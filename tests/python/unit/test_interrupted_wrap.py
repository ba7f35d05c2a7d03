# SPDX-License-Identifier: Apache-2.0
"""Wherever `wrap`, a plan in the middle of training or `detach` is broken off, nothing is left half done.

A profile function raises in the n-th call of a function of MemScale's: a real SIGINT, which may be put off,
or an exception. Without `MEMSCALE_TESTS=all` a few of the calls are tried.
"""

from __future__ import annotations

import functools
import gc
import logging
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import memscale
from amounts import ALL
from memscale.torchkit import step_hooks

HOME = str(Path(memscale.__file__).parent)
CONFIG = memscale.Config(memory_budget=1, enable_logging=False, strict_budget=False)
X = torch.linspace(-1, 1, 128 * 8).view(128, 8)

_UNDOING = {"undo", "stop", "remove", "detach", "restore", "restored", "_let_go", "end", "leave"}
"""What puts things back. It may be interrupted, but does not fail by itself."""

_LOST = {"__del__", "<genexpr>", "_on_death"}
"""Where Python itself drops what is raised: finalizers, callbacks of weak references, closed generators."""


class Failure(Exception):
    """What the profile function raises."""


class Injector:
    """Counts calls of MemScale's functions, and breaks off the n-th."""

    def __init__(self, at: int = -1, interrupts: bool = False) -> None:
        self.at, self.interrupts = at, interrupts
        self.calls: list[CodeType] = []
        self.reached = False

    def __call__(self, frame: FrameType, event: str, unused: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(HOME):
            return
        if is_inside(frame, _LOST):
            return
        if len(self.calls) == self.at and (self.interrupts or not is_inside(frame, _UNDOING)):
            sys.setprofile(None)
            self.reached = True
            if not self.interrupts:
                raise Failure
            signal.raise_signal(signal.SIGINT)
        self.calls.append(frame.f_code)

    def run(self, action: Callable[[], object]) -> type[BaseException] | None:
        """What came out of an action."""
        sys.setprofile(self)
        try:
            action()
        except (Failure, KeyboardInterrupt) as error:
            return type(error)
        finally:
            sys.setprofile(None)
        return None


def is_inside(frame: FrameType | None, names: set[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.dropout(torch.tanh(self.up(self.norm(x))), 0.1, self.training))


class Case:
    """A model in training, with what is to be the same afterwards."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.train()
        gc.collect()
        self.before = self.state()

    def train(self) -> list[Tensor]:
        seen = []
        for step in range(2):
            torch.manual_seed(step)
            loss = self.model(X).square().mean()
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def wrap(self, sample: bool = True) -> None:
        memscale.wrap(self.model, CONFIG, sample_input=(X,) if sample else None, optimizer=self.optimizer)

    def detach(self) -> None:
        memscale.detach(self.model)

    def state(self) -> dict[Any, Any]:
        """All that MemScale could have left something in."""
        found: dict[Any, Any] = {}
        for path, module in self.model.named_modules():
            values = vars(module)
            found[path] = type(module), sorted(values), module.training, values.get("forward")
            for name, value in values.items():
                if isinstance(value, dict):
                    found[path, name] = [(key, id(item)) for key, item in value.items()]
        for name, value in self.model.named_parameters():
            flags = value.requires_grad, value.grad is None, value._version
            found["parameter", name] = *flags, sorted(vars(value))
        own = vars(self.optimizer)
        sizes = {name: len(value) for name, value in own.items() if isinstance(value, dict)}
        found["optimizer"] = type(self.optimizer), sorted(own), sizes, len(self.optimizer.state)
        loggers = [logging.getLogger(name) for name in ("memscale", "torch._subclasses.fake_tensor")]
        found["logs"] = [(list(logger.handlers), logger.level) for logger in loggers]
        found["methods"] = nn.Module._get_backward_hooks, nn.Module.__call__, nn.Module._call_impl
        found["hooks"] = list(torch_modules._global_forward_hooks.items())
        found["process"] = (
            signal.getsignal(signal.SIGINT),
            sorted(thread.name for thread in threading.enumerate()),
            gc.isenabled(),
            torch.is_grad_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            torch.is_autocast_enabled("cpu"),
            CONFIG,
        )
        return found

    def check(self) -> None:
        """Nothing is left, the model trains as one that was never touched, and can be wrapped."""
        after = self.state()
        assert not {key: (old, after.get(key)) for key, old in self.before.items() if old != after.get(key)}
        assert self.before.keys() == after.keys()
        mine = [hook for hook in step_hooks._before if not hook.is_over and hook._owner() is not None]
        assert not any(getattr(hook._owner(), "_model", lambda: None)() is self.model for hook in mine)
        assert all(map(torch.equal, self.train(), plain()[0]))
        self.wrap()
        assert all(map(torch.equal, self.train(), plain()[1]))
        self.detach()


@functools.cache
def plain() -> list[list[Tensor]]:
    """What training goes on with where MemScale was never there."""
    case = Case()
    return [case.train() for _ in range(2)]


def points(action: Callable[[], Callable[[], object]], count: int) -> list[int]:
    """The first and the last call of each function, or a few of them: the same, whatever ran before."""
    injector, first, last = Injector(), dict[CodeType, int](), dict[CodeType, int]()
    injector.run(action())
    for number, code in enumerate(injector.calls):
        first.setdefault(code, number)
        last[code] = number
    if ALL:
        return sorted({*first.values(), *last.values()})
    ranked = sorted((_rank(code), number) for ends in (first, last) for code, number in ends.items())
    return [number for _, number in ranked[:count]]


def _rank(code: CodeType) -> int:
    """Of a function, by its name: other functions that come or go do not change it."""
    return zlib.crc32(f"{Path(code.co_filename).name} {code.co_name}".encode())


KINDS = pytest.mark.parametrize("interrupts", [False, True], ids=["failure", "interrupt"])


@KINDS
def test_wrap_that_is_broken_off(interrupts: bool) -> None:
    for at in points(lambda: Case().wrap, 4):
        case, injector = Case(), Injector(at, interrupts)
        raised = injector.run(case.wrap)
        if interrupts and injector.reached:
            assert raised is KeyboardInterrupt
        if raised is None or memscale.executor_of(case.model) is not None:
            case.detach()  # it has caught the failure, or was through when it was interrupted
        case.check()


@KINDS
def test_wrap_of_a_wrapped_model_that_is_broken_off(interrupts: bool) -> None:
    def wrapped() -> Case:
        case = Case()
        case.wrap()
        return case

    for at in points(lambda: wrapped().wrap, 2):
        case, injector = wrapped(), Injector(at, interrupts)
        raised = injector.run(case.wrap)
        assert not (interrupts and injector.reached) or raised is KeyboardInterrupt
        assert memscale.executor_of(case.model) is not None  # the earlier plan, or the later one
        assert all(map(torch.equal, case.train(), plain()[0]))
        case.detach()
        assert all(map(torch.equal, case.train(), plain()[1]))


@KINDS
def test_a_plan_in_training_that_is_broken_off(interrupts: bool) -> None:
    def waiting() -> Case:
        case = Case()
        case.wrap(sample=False)
        return case

    for at in points(lambda: functools.partial(waiting().model, X), 3):
        case, injector = waiting(), Injector(at, interrupts)
        raised = injector.run(functools.partial(case.model, X))
        assert not (interrupts and injector.reached) or raised is KeyboardInterrupt
        assert all(map(torch.equal, case.train(), plain()[0]))
        case.detach()
        assert all(map(torch.equal, case.train(), plain()[1]))


def test_detach_that_is_interrupted() -> None:
    def wrapped() -> Case:
        case = Case()
        case.wrap()
        return case

    for at in points(lambda: wrapped().detach, 3):
        case, injector = wrapped(), Injector(at, interrupts=True)
        assert injector.run(case.detach) is KeyboardInterrupt
        case.detach()
        case.check()
