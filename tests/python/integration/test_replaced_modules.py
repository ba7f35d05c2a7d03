# SPDX-License-Identifier: Apache-2.0
"""Models that change under a plan: modules that are put in the place of others, weights that are lent."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale
from zoo.training import SMALLEST, peak_bytes, seed


class Block(nn.Module):
    """Saves several tensors of its input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(F.silu(x)))


class Switching(nn.Module):
    """Replaces its blocks in its first forward, as BigBird does for short texts. The weights are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.switched = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.switched:
            for number, block in enumerate(self.blocks):
                self.blocks[number] = Block()
                self.blocks[number].linear = block.linear
            self.switched = True
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _run(model: nn.Module, steps: int, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_modules_that_the_first_forward_replaces_are_planned_for() -> None:
    x = torch.randn(512, 128)
    seed(0)
    plain = Switching()
    expected = _run(plain, 4, x)
    plain_peak = peak_bytes(lambda: _run(plain, 1, x))
    seed(0)
    model = Switching()
    memscale.wrap(model, SMALLEST, sample_input=x)
    assert all(map(torch.equal, _run(model, 4, x), expected))
    active = memscale.executor_of(model).plan.active
    treated = [model.get_submodule(choice.module) for choice in active]
    assert treated and all("forward" in module.__dict__ for module in treated if isinstance(module, Block))
    assert peak_bytes(lambda: _run(model, 1, x)) < 0.8 * plain_peak
    memscale.detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_that_always_makes_modules_is_planned_a_few_times_only(plans: list[object]) -> None:
    class Restless(Switching):
        def forward(self, x: Tensor) -> Tensor:
            self.switched = False
            return super().forward(x)

    model, x = Restless(), torch.randn(64, 128)
    memscale.wrap(model, SMALLEST, sample_input=x)
    _run(model, 12, x)
    assert 2 < len(plans) < 8


def test_weights_that_a_graph_has_made_are_nothing_to_plan_with() -> None:
    """Meta-learning: two forwards a step, the second with weights changed by the first's gradients."""

    def run(wrapped: bool) -> list[Tensor]:
        seed(0)
        model = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if wrapped:
            config = memscale.Config(mode="aggressive", memory_budget="1.2MB", enable_logging=False)
            memscale.apply_all_optimizations(model, optimizer, config)
        losses = []
        for _ in range(3):
            x, y = torch.randn(64, 32), torch.randn(64, 8)
            with torch.autocast("cpu", torch.bfloat16, enabled=not wrapped):
                own = dict(model.named_parameters())
                first = F.mse_loss(torch.func.functional_call(model, own, (x,)).float(), y)
                grads = torch.autograd.grad(first, list(own.values()), create_graph=True)
                fast = {
                    name: value - 0.01 * grad for (name, value), grad in zip(own.items(), grads, strict=True)
                }
                loss = F.mse_loss(torch.func.functional_call(model, fast, (x,)).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert torch.allclose(torch.stack(run(True)), torch.stack(run(False)), rtol=1e-2)


def test_a_model_with_a_scripted_part_is_planned() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(128, 128), nn.ReLU()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(self.blocks(x)).square().mean()

    x = torch.randn(512, 128)
    seed(0)
    expected = _run(Mixed(), 3, x)
    seed(0)
    model = Mixed()
    memscale.wrap(model, SMALLEST, sample_input=x)
    assert all(map(torch.equal, _run(model, 3, x), expected))
    assert memscale.executor_of(model).plan.active


def test_a_module_that_is_replaced_is_given_back() -> None:
    x = torch.randn(64, 128)
    model = nn.Sequential(Block(), Block(), nn.Linear(128, 128))
    memscale.wrap(model, memscale.Config(enable_logging=False), sample_input=x)
    head = weakref.ref(model[2])
    model[2] = nn.Linear(128, 2)
    gc.collect()
    assert head() is None


def _halved(forward: Any) -> Any:
    return lambda module, x: forward(module, x * 0.5)


@pytest.mark.parametrize("where", ["class of blocks", "class of the root", "another class"])
def test_a_forward_that_is_patched_on_the_class_after_wrap(where: str) -> None:
    """As libraries patch in faster kernels. A stand-in in front of the class's forward follows it."""

    class Own(Block):
        pass

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x - super().forward(x)

    original = {kind: kind.forward for kind in (Block, nn.Sequential)}

    def train(wrapped: bool) -> list[Tensor]:
        seed(0)
        model, x = Net(*(Own() for _ in range(4))), torch.randn(64, 128)
        if wrapped:
            memscale.wrap(model, SMALLEST, sample_input=(x,))
            assert memscale.executor_of(model).plan.active
        seen: list[Tensor] = []
        for step in range(3):
            if where == "class of blocks":
                Own.forward = _halved(original[Block]) if step != 1 else original[Block]
            elif where == "class of the root":
                Net.forward = _halved(original[nn.Sequential]) if step != 1 else original[nn.Sequential]
            else:
                for block in model:
                    block.__class__ = Other if step != 1 else Own
            loss = model(x).square().mean()
            Own.forward, Net.forward = original[Block], original[nn.Sequential]
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return seen

    assert all(map(torch.equal, train(False), train(True)))
