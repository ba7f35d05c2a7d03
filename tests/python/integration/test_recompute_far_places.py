# SPDX-License-Identifier: Apache-2.0
"""What a forward counts where no name of its own leads: in libraries, settings, storages, behind classes."""

from __future__ import annotations

import argparse
import builtins
import configparser
import contextvars
import decimal
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memscale

WIDTH = 16
NUMBER = 0
STORAGE = torch.UntypedStorage(8)
OPTIONS = argparse.Namespace(calls=0)
CONFIGURED = configparser.ConfigParser()
SOBOL = torch.quasirandom.SobolEngine(1)
BITS = np.random.MT19937(3)
VARIABLE: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("counts", default={})  # noqa: B039
DATA = torch.utils.data.TensorDataset(torch.zeros(2))
LIBRARIES: Any = torch, np, builtins, nn.Linear, torch.Tensor, nn.functional.softmax


class Kind(type):
    """A metaclass that counts."""

    calls = 0


class Block(nn.Module, metaclass=Kind):
    """Counts its calls somewhere, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.notes = {"calls": 0}  # type: ignore[attr-defined]
        self.numbers = torch.UntypedStorage(1)
        self.numbers.fill_(0)

    def count(self) -> int:
        """The number of calls."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * (1 + self.count() / 8))


class InMetaclass(Block):
    def count(self) -> int:
        kind: Any = type(type(self))
        kind.calls += 1
        return kind.calls  # type: ignore[no-any-return]


class InStorage(Block):
    def count(self) -> int:
        STORAGE[0] = STORAGE[0] + 1
        return int(STORAGE[0])


class InStorageOfBlock(Block):
    def count(self) -> int:
        self.numbers[0] = self.numbers[0] + 1
        return int(self.numbers[0])


class InTorch(Block):
    def count(self) -> int:
        torch.test_calls += 1
        return torch.test_calls  # type: ignore[no-any-return]


class InDictionaryOfTorch(Block):
    def count(self) -> int:
        nn.test_counts["calls"] += 1  # type: ignore[attr-defined]
        return nn.test_counts["calls"]  # type: ignore[attr-defined, no-any-return]


class InNumpy(Block):
    def count(self) -> int:
        np.test_calls += 1  # type: ignore[attr-defined]
        return np.test_calls  # type: ignore[attr-defined, no-any-return]


class InBuiltins(Block):
    def count(self) -> int:
        builtins.test_calls += 1  # type: ignore[attr-defined]
        return test_calls  # type: ignore[name-defined, no-any-return]  # noqa: F821


class InClassOfTorch(Block):
    def count(self) -> int:
        nn.Linear.test_calls += 1
        return nn.Linear.test_calls  # type: ignore[return-value]


class InTensorClass(Block):
    def count(self) -> int:
        torch.Tensor.test_calls += 1  # type: ignore[attr-defined]
        return torch.Tensor.test_calls  # type: ignore[attr-defined, no-any-return]


class InFunctionOfTorch(Block):
    def count(self) -> int:
        softmax: Any = nn.functional.softmax
        nn.functional.softmax.test_calls = softmax.test_calls + 1  # type: ignore[attr-defined]
        return softmax.test_calls  # type: ignore[no-any-return]


class InDecimals(Block):
    def count(self) -> int:
        decimal.getcontext().prec -= 1
        return int(decimal.Decimal(1) / decimal.Decimal(7) * 10**6) % 7 + decimal.getcontext().prec


class InEnvironment(Block):
    def count(self) -> int:
        os.environ["MEMSCALE_TEST"] = str(int(os.environ["MEMSCALE_TEST"]) + 1)
        return int(os.environ["MEMSCALE_TEST"])


class InOptions(Block):
    def count(self) -> int:
        OPTIONS.calls += 1
        return OPTIONS.calls  # type: ignore[no-any-return]


class InConfigured(Block):
    def count(self) -> int:
        CONFIGURED["block"]["calls"] = str(CONFIGURED.getint("block", "calls") + 1)
        return CONFIGURED.getint("block", "calls")


class InDataset(Block):
    def count(self) -> int:
        DATA.calls = getattr(DATA, "calls", 0) + 1  # type: ignore[attr-defined]
        return DATA.calls  # type: ignore[attr-defined, no-any-return]


class InSobol(Block):
    def count(self) -> int:
        return int(SOBOL.draw(1).item() * 8)


class InBits(Block):
    def count(self) -> int:
        return int(BITS.random_raw()) % 5  # type: ignore[arg-type]


class InContextVariable(Block):
    def count(self) -> int:
        counts = VARIABLE.get()
        counts["calls"] = counts.get("calls", 0) + 1
        return counts["calls"]


class InAttributeOfWeight(Block):
    def count(self) -> int:
        notes: Any = self.linear.weight.notes  # type: ignore[union-attr]
        notes["calls"] += 1
        return notes["calls"]  # type: ignore[no-any-return]


class ByNameOfGlobal(Block):
    def count(self) -> int:
        globals()["NUMBER"] += 1
        return NUMBER


class ByNameInModule(Block):
    def count(self) -> int:
        module = sys.modules["math"]
        setattr(module, "test_calls", module.test_calls + 1)  # noqa: B010
        return module.test_calls  # type: ignore[no-any-return]


def reset() -> None:
    global NUMBER
    NUMBER = Kind.calls = OPTIONS.calls = 0
    STORAGE.fill_(0)
    for library in (*LIBRARIES, math):
        library.test_calls = 0
    nn.test_counts = {"calls": 0}  # type: ignore[attr-defined]
    decimal.getcontext().prec = 80
    os.environ["MEMSCALE_TEST"] = "0"
    CONFIGURED["block"] = {"calls": "0"}
    vars(DATA).pop("calls", None)
    SOBOL.reset()
    BITS.state = np.random.MT19937(3).state
    VARIABLE.get().clear()


def state() -> list[Any]:
    libraries = [library.test_calls for library in (*LIBRARIES, math)]
    return [
        NUMBER, Kind.calls, OPTIONS.calls, STORAGE.tolist(), libraries, dict(nn.test_counts),  # type: ignore[attr-defined]
        decimal.getcontext().prec, os.environ["MEMSCALE_TEST"], dict(CONFIGURED["block"]),
        vars(DATA).get("calls"), SOBOL.num_generated, str(BITS.state), dict(VARIABLE.get()),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    precision = decimal.getcontext().prec
    reset()
    yield
    for library in (*LIBRARIES, math):
        del library.test_calls
    del nn.test_counts  # type: ignore[attr-defined]
    del os.environ["MEMSCALE_TEST"]
    decimal.getcontext().prec = precision


def trained(build: Callable[[], Block], is_wrapped: bool) -> list[Any]:
    reset()
    torch.manual_seed(0)
    blocks = [build() for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
    x = torch.randn(64, WIDTH)
    if is_wrapped:
        memscale.wrap(model, memory_budget=1, sample_input=x, force_optimize=True, enable_logging=False)
        assert state() == before
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        found.append(state())
        loss.backward()
        found += [loss.item(), state(), [block.numbers.tolist() for block in blocks]]
    notes: list[Any] = [block.linear.weight.notes for block in blocks]  # type: ignore[attr-defined]
    if is_wrapped:
        memscale.detach(model)
    gradients = [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
    return [found, notes, gradients]


before: list[Any] = []


@pytest.mark.parametrize("kind", Block.__subclasses__())
def test_a_count_in_a_far_place(kind: type[Block]) -> None:
    reset()
    before[:] = state()
    assert trained(kind, is_wrapped=True) == trained(kind, is_wrapped=False)
