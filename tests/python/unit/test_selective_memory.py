# SPDX-License-Identifier: Apache-2.0
"""What a selective checkpoint holds, operation by operation, against the rules worked out by hand.

The forward is `cos(exp(sin(x·u)·v)·w)`. Every tensor in it has the same size, the unit of the tables:

    a = x·u    b = sin a    c = b·v    d = exp c    e = d·w    f = cos e
    saved      a by sin, b by the product, d by exp and by the product, e by cos; never c
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # the first mode imports it, and an import makes cycles that hold the frames around it
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.techniques.checkpoint.checkpointing import Region
from memscale.techniques.checkpoint.kept_outputs import Keeping, KeptOutputs, Taking
from technique_samples import Model, Transformer, attached, operations, seeded, selective
from zoo.training import peak_bytes

ROWS, WIDTH = 128, 64
UNIT = ROWS * WIDTH * 4


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.w = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        # One expression: no variable holds a tensor beyond its use.
        return (((x @ self.u).sin() @ self.v).exp() @ self.w).cos()


class Live(TorchDispatchMode):
    """Units of memory that are alive right after each operation that makes a large tensor."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.input = x.untyped_storage()._cdata
        self.bytes = 0
        self.refs: dict[int, weakref.ref[Any]] = {}
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() == UNIT:
            storage = result.untyped_storage()
            address = storage._cdata
            if address not in self.refs and address != self.input:
                self.bytes += UNIT
                self.refs[address] = weakref.ref(storage, lambda _, address=address: self._dead(address))
                self.seen.append((func._schema.name.removeprefix("aten::"), self.units))
        return result

    def _dead(self, address: int) -> None:
        del self.refs[address]
        self.bytes -= UNIT

    @property
    def units(self) -> int:
        return self.bytes // UNIT


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


FORWARD: dict[str, list[int]] = {
    #        a  b  c  d  e  f
    "":     [1, 2, 2, 2, 2, 2],
    "mm#0": [1, 2, 3, 3, 3, 3],  # a stays
    "mm#1": [1, 2, 2, 2, 3, 3],  # c stays, though nobody saves it
    "sin#0": [1, 2, 2, 3, 3, 3],  # b stays
    "mm#0 exp#0": [1, 2, 3, 3, 3, 4],  # a and d stay
}  # fmt: skip
"""Kept operations → units alive right after each operation of forward."""

AFTER = {"": 0, "mm#0": 1, "mm#1": 1, "sin#0": 1, "mm#0 exp#0": 2}
"""Units alive when the forward is over, its result apart."""

AGAIN: dict[str, list[tuple[str, int]]] = {
    # a, b, d and e are wanted; c ends when d is made. e is the last, and cos does not run.
    "": [("mm", 1), ("sin", 2), ("mm", 3), ("exp", 4), ("mm", 4)],
    # a is there, and neither made nor freed.
    "mm#0": [("sin", 2), ("mm", 3), ("exp", 4), ("mm", 4)],
    # c is there until the recompute is over: one more than without when e is made.
    "mm#1": [("mm", 2), ("sin", 3), ("exp", 4), ("mm", 5)],
    "sin#0": [("mm", 2), ("mm", 3), ("exp", 4), ("mm", 4)],
    # a and d are there; c is made, as nobody keeps it, and ends at once.
    "mm#0 exp#0": [("sin", 3), ("mm", 4), ("mm", 4)],
}
"""Operations of the recompute and units alive right after each; the result of forward is gone by then."""

BACKWARD = [
    # Of cos: sin and neg of e, the product with the gradient (4 saved ones, the temporaries, the result).
    ("sin", 5), ("neg", 6), ("mul", 7),
    # e and the gradient's factors are gone; of the product: the gradients of w (no unit) and of d.
    ("mm", 5),
    # Of exp: d's gradient times d.
    ("mul", 5),
    # d is gone; of the product, then of sin.
    ("mm", 4), ("cos", 3), ("mul", 4),
]  # fmt: skip
"""The same for each of them: what was kept and saved lives until its save is released."""


@pytest.mark.parametrize("kept", FORWARD)
def test_every_moment_of_a_step(kept: str) -> None:
    operations = frozenset((text.split("#")[0], int(text.split("#")[1])) for text in kept.split())
    model = seeded(Line)
    x = torch.randn(ROWS, WIDTH)
    live = Live(x)
    holder = nn.ModuleList([model])
    with Live(x):
        model(x).sum().backward()  # what PyTorch does once only
    model.zero_grad()
    with attached(selective(holder, "0", operations)), no_collector(), live:
        y = model(x)
        assert [units for _, units in live.seen] == FORWARD[kept]
        loss = y.sum()
        del y
        assert live.units == AFTER[kept]
        live.seen.clear()
        loss.backward()
        del loss
        again = len(AGAIN[kept])
        assert live.seen[:again] == AGAIN[kept]
        assert live.seen[again:] == BACKWARD
        assert live.units == 0


@pytest.mark.parametrize("kept", ["mm#0", "mm#1", "sin#0", "exp#0"])
def test_a_forward_without_backward_leaves_nothing(kept: str) -> None:
    name, ordinal = kept.split("#")
    model = seeded(Line)
    x = torch.randn(ROWS, WIDTH)
    live = Live(x)
    holder = nn.ModuleList([model])
    with attached(selective(holder, "0", frozenset([(name, int(ordinal))]))), no_collector(), live:
        y = model(x)
        assert live.units == 2
        del y
        assert live.units == 0


FAILS: list[bool] = []
"""A global: a recompute finds what hangs on the module as its forward found it."""


def test_a_failed_second_run_lets_go_of_everything() -> None:
    """Even while somebody looks at the exception, whose frames hold a and b."""

    class Fails(Line):
        def forward(self, x: Tensor) -> Tensor:
            y = (x @ self.u).sin() @ self.v
            if FAILS:
                del y
                raise KeyboardInterrupt
            return (y.exp() @ self.w).cos()

    FAILS.clear()
    model = seeded(Fails)
    x = torch.randn(ROWS, WIDTH)
    live = Live(x)
    kept = frozenset([("mm", 1)])
    with attached(selective(nn.ModuleList([model]), "0", kept)), no_collector(), live:
        loss = model(x).sum()
        assert live.units == 1
        FAILS.append(True)
        with pytest.raises(KeyboardInterrupt) as caught:
            loss.backward()
        units = live.units
    FAILS.clear()
    assert units == 2 and caught.value.__traceback__ is not None


def test_what_is_kept_but_never_asked_for_is_not_held() -> None:
    """Everything that is saved is kept: there is no recompute, so nothing waits for one."""
    model = seeded(Line)
    kept = frozenset([("mm", 0), ("sin", 0), ("mm", 1), ("exp", 0), ("mm", 2)])
    x = torch.randn(ROWS, WIDTH)
    live = Live(x)
    with attached(selective(nn.ModuleList([model]), "0", kept)), no_collector(), live:
        loss = model(x).sum()
        assert live.units == 4  # a, b, d, e, as in the plain step, but not c
        live.seen.clear()
        loss.backward()
        assert live.seen == BACKWARD


def test_no_cycle_and_no_growth_over_many_steps() -> None:
    """With the collector off: whatever a step makes ends with it."""
    model = seeded(lambda: Model(Transformer))
    x = torch.randn(3, 5, 16)
    every = operations(model.blocks[0], lambda: model(x)).every

    def step() -> None:
        model(x).pow(2).mean().backward()
        model.zero_grad()

    def regions() -> int:
        return sum(type(o) in (Region, KeptOutputs, Keeping, Taking) for o in gc.get_objects())

    present = regions()

    def counts() -> dict[str, int]:
        ours = [o for o in gc.get_objects() if issubclass(type(o), Tensor) or "memscale" in str(type(o))]
        return Counter(type(o).__name__ for o in ours)

    with attached(*(selective(model, f"blocks.{i}", frozenset(every)) for i in range(2))), no_collector():
        for _ in range(3):
            step()
        before = counts()
        storages = live_storages()
        for _ in range(200):
            step()
        assert counts() == before
        assert live_storages() == storages
        assert regions() == present


def live_storages() -> int:
    """Storages of all tensors that Python sees."""
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    return len({o.untyped_storage()._cdata for o in tensors if o.layout is torch.strided})


def test_the_allocator_agrees() -> None:
    """Bytes that PyTorch's profiler counts: keeping a product costs its output and nothing else."""
    model = seeded(Line)
    x = torch.randn(ROWS, WIDTH)

    def held(kept: frozenset[tuple[str, int]]) -> int:
        result: list[Tensor] = []
        with attached(selective(nn.ModuleList([model]), "0", kept)):
            model(x).sum().backward()  # what is made once

            def forward() -> None:
                result.append(model(x).sum())

            return peak_bytes(forward)

    assert held(frozenset([("mm", 0)])) - held(frozenset()) == UNIT
