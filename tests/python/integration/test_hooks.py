# SPDX-License-Identifier: Apache-2.0
"""Hooks of the user's on a wrapped model fire as often as on a plain one."""

from __future__ import annotations

from test_autograd import BATCH, active, assert_equal, both, gradients, stack
from torch import Tensor

import memscale
from zoo.blocks import Stack
from zoo.training import SMALLEST, seed


def test_hooks_on_the_model_and_on_blocks_fire_once() -> None:
    model = stack()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *a: seen.append("model pre"))
    model.register_forward_hook(lambda *a: seen.append("model"))
    model.register_full_backward_hook(lambda *a: seen.append("model backward"))
    block = model.get_submodule(active(model)[0])
    block.register_forward_hook(lambda *a: seen.append("block"))
    block.register_full_backward_hook(lambda *a: seen.append("block backward"))
    x = BATCH[0].clone().requires_grad_()  # a backward hook of a module wants an input that needs a gradient
    model(x).mean().backward()  # such a batch is planned for here, which calls hooks on the way
    model.zero_grad()
    seen.clear()
    model(x).mean().backward()
    assert sorted(seen) == ["block", "block backward", "model", "model backward", "model pre"]


def test_a_hook_below_a_block_fires_once_if_it_was_there_at_planning() -> None:
    seen: list[str] = []
    seed()
    model = Stack().train()
    model.blocks[1].up.register_forward_hook(lambda *a: seen.append("up"))
    memscale.wrap(model, SMALLEST, BATCH)
    seen.clear()
    model(BATCH[0]).mean().backward()
    assert seen == ["up"]


def test_a_hook_that_changes_an_output_counts_in_both_runs() -> None:
    def use(model: Stack) -> list[Tensor]:
        model.blocks[0].up.register_forward_hook(lambda module, args, out: out * 2)
        model(BATCH[0]).pow(2).mean().backward()
        return gradients(model)

    assert_equal(both(use))


def test_tensor_hooks_fire_once() -> None:
    model, seen = stack(), []
    for parameter in model.parameters():
        parameter.register_hook(seen.append)
    model(BATCH[0]).mean().backward()
    assert len(seen) == len(list(model.parameters()))
