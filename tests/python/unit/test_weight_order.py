# SPDX-License-Identifier: Apache-2.0
"""In which order blocks of streamed weights are read ahead, and when there is no order to go by."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from calls import beside
from memscale.weights.blocks import HostBlocks
from memscale.weights.saves import can_save
from memscale.weights.unit import Unit
from memscale.weights.units import units_of
from memscale.weights.window import Window
from weight_samples import Loop, Stack, built, loss_of, same, streamed, trained

pytestmark = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")


def test_nothing_is_read_ahead_in_an_order_from_before_a_unit_joined() -> None:
    """It told that the last layer's follower is the one of backward, whose block may be the larger one."""
    used: list[Unit] = []
    ahead: list[str] = []

    class Watching(HostBlocks):
        def start(self, unit: Unit) -> None:
            if unit is not used[-1]:
                ahead.append(unit.path)
            super().start(unit)

    def passes(model: nn.Module) -> list[bool]:
        """Of two passes, whether anything is read ahead."""
        seen = []
        for _ in range(2):
            ahead.clear()
            with beside({Window.fetch: lambda window, unit: used.append(unit)}):
                loss_of(model, 0).backward()
            seen.append(bool(ahead))
        return seen

    model = built(partial(Stack, depth=4))
    found = {unit.path: unit for unit in units_of(model, 1)[0]}
    with streamed(model, blocks=Watching) as stream:
        last = [path for path in stream.units if path.startswith("blocks")][-1]
        stream.remove(last)
        assert passes(model) == [False, True]
        stream.add(found[last])
        assert passes(model) == [False, True]
        model.zero_grad(set_to_none=True)
        assert same(trained(model, Loop(steps=2)), trained(built(partial(Stack, depth=4)), Loop(steps=2)))
