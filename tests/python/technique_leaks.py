# SPDX-License-Identifier: Apache-2.0
"""Training steps with techniques attached, and what is still there after them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch
from torch import nn

from matrix.architectures import Architecture, architecture
from matrix.cells import optimizer_for
from matrix.modes import Mode, mode, model_for, one_step
from matrix.techniques import Columns, Refused, facts_of, forced
from zoo.training import memory_changes

FEW, MANY = 12, 36
"""Steps after which what is alive is counted; the soak suite has a thousand.

Between them every third step comes as often as the others, and every fourth: both end in the same one.
"""

OBJECTS = 8
"""Growth in Python objects that is no leak: free lists, PyTorch's own caches. One per step would be 24, and
one per step of one kind in three, such as those that fail, 8."""

_WINDOWS = 3

_MODELS = ("sequential-blocks", "gpt2", "bert", "llama")
_CYCLE = (mode("dropout"), mode("exception"), mode("second backward"))


def training(row: Architecture, how: Mode) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """A model, its optimizer, and what runs a step: in turn a plain one, one that fails, two backwards."""
    model = model_for(row, how)
    optimizer = optimizer_for(model)

    def step(number: int) -> None:
        one_step(model, row, _CYCLE[number % len(_CYCLE)], number % 5)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def net_bytes(run: Callable[[], object], alive: dict[int, int] | None = None) -> int:
    """Bytes of tensor memory that `run` takes and does not give back; it may end what is in `alive`."""

    def and_collected() -> None:
        run()
        gc.collect()

    return sum(memory_changes(and_collected, alive))


def objects() -> int:
    """Python objects that the collector knows."""
    gc.collect()
    return len(gc.get_objects())


@functools.cache
def row_for(columns: Columns) -> Architecture:
    """A small model that has a place for a technique."""
    for name in _MODELS:
        row = architecture(name)
        model = model_for(row, mode("dropout"))
        try:
            with forced(model, row, columns, optimizer_for(model)):
                return row
        except Refused:
            continue
    raise AssertionError("no model has a place for it")


def growth(columns: Columns) -> tuple[int, int]:
    """Tensor bytes and Python objects by which the steps from `FEW` to `MANY` grow, techniques attached."""
    row = row_for(columns)
    model, optimizer, step = training(row, mode("dropout"))
    with forced(model, row, columns, optimizer):
        return grown_in(step, MANY)


def growth_in_cycles(columns: Columns) -> tuple[int, int]:
    """The same where each step attaches the techniques and detaches them."""
    row = row_for(columns)
    model, optimizer, step = training(row, mode("dropout"))
    facts_of(row)

    def cycle(number: int) -> None:
        with forced(model, row, columns, optimizer):
            step(number)

    return grown_in(cycle)


def grown_in(step: Callable[[int], None], many: int = MANY, few: int = FEW) -> tuple[int, int]:
    """Tensor bytes and Python objects by which the steps from `few` to `many` grow.

    A cache that fills, such as one of an abstract class behind `isinstance`, grows in one window of steps, a
    leak in each: the least of three counts.
    """
    gc.collect()
    gc.freeze()  # collections look at what steps make, and not at the model and what was imported for it
    alive: dict[int, int] = {}  # a step may end what the step before it began

    def run(begin: int, end: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(begin, end):
                step(number)

        return work

    net_bytes(run(0, few), alive)
    grown, windows = 0, list[int]()
    while len(windows) < _WINDOWS and (not windows or windows[-1] >= OBJECTS):
        before = objects()
        grown += net_bytes(run(few, many), alive)
        windows.append(objects() - before)
    return grown, min(windows)
