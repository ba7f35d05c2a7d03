# SPDX-License-Identifier: Apache-2.0
"""The order of a dictionary's keys is part of what a forward reads and writes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.state.key_order import items_of, put_back_in_order, put_in_order, refill

WIDTH = 16


class Recent(OrderedDict[Any, Any]):
    """What was read last comes last."""

    def __getitem__(self, key: Any) -> Any:
        self.move_to_end(key)
        return super().__getitem__(key)


class Again(dict[Any, Any]):
    """What was read last comes last, in a dictionary."""

    def __getitem__(self, key: Any) -> Any:
        value = self.pop(key)
        self[key] = value
        return value


class Block(nn.Module):
    """Scales by what it has noted for a length."""

    of_class: ClassVar[OrderedDict[int, float]] = OrderedDict()

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.own = table

    @property
    def table(self) -> Any:
        return self.of_class if self.own is None else self.own

    def forward(self, x: Tensor) -> Tensor:
        table, key = self.table, len(x)
        if key not in table:
            table[key] = 1.0 + len(table)
        value = table[key]
        if type(table) is OrderedDict:
            table.move_to_end(key)
        elif type(table) is dict:
            table[key] = table.pop(key)
        return x + self.down(torch.tanh(self.up(x))) * value


class Terms(Block):
    """Reads what it has in order."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        for key, value in self.table.items():
            x = x * value + key
        return self.down(x)


class Attributes(Terms):
    """Reads what hangs on it in order."""

    @property
    def table(self) -> Any:
        return {int(name[1:]): value for name, value in vars(self).items() if name[1:].isdigit()}


def trained(wrapped: bool, kind: type[Block], make: Any, turn: Any = None) -> tuple[list[Tensor], list[Any]]:
    """Gradients, and what the table's keys are after each step."""
    Block.of_class.clear()
    torch.manual_seed(0)
    table = make()
    model = nn.Sequential(*(kind(table) for _ in range(4)), nn.Linear(WIDTH, 4))
    x = torch.randn(64, WIDTH)
    for block in model[:4] if kind is Attributes else ():
        for number in range(4):
            setattr(block, f"n{number}", 0.5 + number)
    if wrapped:
        memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=x)
        assert memscale.executor_of(model).plan.choices
    found: list[Any] = []
    for _ in range(3):
        sum(model(x[:rows]).square().mean() for rows in (64, 32, 64, 16)).backward()  # type: ignore[union-attr]
        present = Block.of_class if table is None else table
        found.append(list(OrderedDict.keys(present) if isinstance(present, OrderedDict) else present))
        if turn is not None:
            loss = model(x).square().mean()
            for block in model[:4] if kind is Attributes else model[:1]:
                turn(block)
            loss.backward()
        elif len(present) > 2:
            del present[found[-1][0]]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], found


@pytest.mark.parametrize("make", [OrderedDict, dict, Recent, Again, lambda: None])
def test_recomputes_leave_the_order_as_it_was(make: Any) -> None:
    plain, wrapped = trained(False, Block, make), trained(True, Block, make)
    assert plain[1] == wrapped[1]
    assert all(map(torch.equal, plain[0], wrapped[0]))


def first_to_end(block: Any) -> None:
    first, value = items_of(block.table)[0]
    del block.table[first]
    block.table[first] = value


def attribute_to_end(block: Any) -> None:
    value = block.n1
    del block.n1
    block.n1 = value


@pytest.mark.parametrize(
    ("kind", "make", "turn"),
    [
        (Terms, lambda: {key: 0.1 * key + 0.3 for key in range(7)}, first_to_end),
        (Terms, lambda: OrderedDict((key, 0.1 * key + 0.3) for key in range(7)), first_to_end),
        (Attributes, dict, attribute_to_end),
    ],
)
def test_a_recompute_reads_in_the_order_of_its_forward(kind: Any, make: Any, turn: Any) -> None:
    plain, wrapped = trained(False, kind, make, turn), trained(True, kind, make, turn)
    assert plain[1] == wrapped[1]
    assert all(map(torch.equal, plain[0], wrapped[0]))


@pytest.mark.parametrize("kind", [dict, OrderedDict, Recent, Again])
def test_keys_are_put_in_order_and_no_code_of_the_class_runs(kind: Any) -> None:
    place = kind((key, key) for key in "abcd")
    put_back_in_order(place, "acbd")
    assert [key for key, _ in items_of(place)] == list("acbd")
    put_in_order(place, "ab")
    assert [key for key, _ in items_of(place)] == list("cdab")
    refill(place, {"x": 1, "a": 2})
    assert items_of(place) == [("x", 1), ("a", 2)]


@pytest.mark.parametrize("make", [Recent, Again])
def test_planning_leaves_the_order_and_contents_as_they_were(make: Any) -> None:
    table = make({8: 1.0, 4: 2.0, 2: 3.0})
    model = nn.Sequential(*(Block(table) for _ in range(3)), nn.Linear(WIDTH, 4))
    before = items_of(table)
    memscale.predict(model, sample_input=torch.randn(8, WIDTH))
    memscale.predict(model, sample_input=torch.randn(9, WIDTH))
    assert items_of(table) == before
