# SPDX-License-Identifier: Apache-2.0
"""What a module has saved and others have too, its output, is changed past autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import outliving
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.recompute_check import RecomputeCheck

WIDTH = 16
Change = Callable[[Tensor], Any]


class Block(nn.Module):
    """Its last operation saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.own: list[Change] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.down(torch.relu(self.up(x))))
        for change in self.own:
            change(y)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 4)
        self.between: list[Change] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
            for change in self.between:
                change(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_data(y: Tensor) -> None:
    y.data.clamp_(0.45, 0.55)


def by_numpy(y: Tensor) -> None:
    values = y.detach().numpy()
    values[values > 0.5] = 0.5


def by_view(y: Tensor) -> None:
    y.data.view(-1)[::3].zero_()


def trained(wrapped: bool, prepare: Callable[[Net, Callable[[Change], Change]], None]) -> list[Any]:
    """Losses and gradients of four steps, and errors. What is `late` happens from the third one on."""
    torch.manual_seed(0)
    model, x, steps = Net(), torch.randn(32, WIDTH), list[int]()

    def late(change: Change) -> Change:
        return lambda y: change(y) if len(steps) > 2 else None

    prepare(model, late)
    if wrapped:
        memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=x)
        assert memscale.executor_of(model).plan.choices
    found: list[Any] = []
    for step in range(4):
        steps.append(step)
        loss = model(x).square().mean()
        try:
            loss.backward()
        except RecomputeError as error:
            found.append(error)
        else:
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
        model.zero_grad()
    return found


def same(plain: list[Any], wrapped: list[Any]) -> list[Any]:
    """Asserts that all steps but those with errors are the same; returns the errors."""
    errors = [got for got in wrapped if isinstance(got, Exception)]
    for right, got in zip(plain, wrapped, strict=True):
        assert isinstance(got, Exception) or all(map(torch.equal, right, got))
    return errors


CHANGES = {"data": by_data, "numpy": by_numpy, "view": by_view}


@pytest.mark.parametrize("change", ["data", "view"])
@pytest.mark.parametrize("where", ["between", "inside", "hook"])
def test_what_a_trace_sees_keeps_modules_from_recomputes(change: str, where: str) -> None:
    def prepare(model: Net, late: Any) -> None:
        if where == "between":
            model.between.append(CHANGES[change])
        for block in model.blocks if where != "between" else ():
            if where == "inside":
                block.own.append(CHANGES[change])
            else:
                block.register_forward_hook(lambda module, args, output: CHANGES[change](output))

    assert not same(trained(False, prepare), trained(True, prepare))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["between", "inside"])
def test_what_comes_later_is_found(change: str, where: str) -> None:
    def prepare(model: Net, late: Any) -> None:
        if where == "between":
            model.between.append(late(CHANGES[change]))
        for block in model.blocks if where == "inside" else ():
            block.own.append(late(CHANGES[change]))

    errors = same(trained(False, prepare), trained(True, prepare))
    assert errors and all(error.module.startswith("blocks.") and error.cause for error in errors)


@pytest.mark.parametrize("change", CHANGES)
def test_the_loop_changes_an_output_that_it_holds(change: str) -> None:
    failed: list[str] = []
    check = RecomputeCheck("always", lambda path, reason: failed.append(reason))
    block = Block()
    attachment = CheckpointAttachment(block, "block", check=check)
    attachment.attach()
    for _ in range(2):
        block(torch.randn(8, WIDTH)).sum().backward()
    output = block(torch.randn(8, WIDTH))
    CHANGES[change](output)
    with pytest.raises(RecomputeError, match="was changed between forward and backward"):
        output.sum().backward()
    attachment.undo()
    assert len(failed) == 1


class Replayed(nn.Module):
    """Changes an output of its own before its last save: a recompute does so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(self.up(x))
        y.data.clamp_(0.45, 0.55)
        return y, torch.tanh(self.down(y))


def test_what_a_recompute_does_as_well_is_no_difference() -> None:
    torch.manual_seed(0)
    block, x = Replayed(), torch.randn(8, WIDTH)

    def gradients() -> list[Tensor]:
        y, z = block(x)
        return list(torch.autograd.grad((y * z).sum(), list(block.parameters())))

    plain = gradients()
    attachment = CheckpointAttachment(block, "block", check=RecomputeCheck("always"))
    attachment.attach()
    got = [gradients() for _ in range(3)]
    attachment.undo()
    assert all(all(map(torch.equal, plain, found)) for found in got)


def test_memory_that_is_gone_or_given_back_is_not_looked_at() -> None:
    tensor = torch.ones(4)
    memory = outliving.Memory.of(tensor)
    assert memory is not None and memory.address == tensor.untyped_storage()._cdata
    memory.note(None)
    outliving.wait(memory)
    outliving.look()
    assert not memory.is_changed and isinstance(memory.held, int)
    tensor.untyped_storage().resize_(0)
    memory.look()
    del tensor
    assert memory.address is None and not memory.is_changed
    memory.look()
    assert not memory.is_changed
    assert outliving.Memory.of(torch.ones(2, dtype=torch.complex64).conj()) is None


def test_the_list_of_what_waits_stays_short() -> None:
    block, x = Block(), torch.randn(2, WIDTH)
    attachment = CheckpointAttachment(block, "block", check=RecomputeCheck("always"))
    attachment.attach()
    for _ in range(1010):
        outliving.wait(outliving.Memory(x))
    block(x).sum().backward()
    attachment.undo()
    assert len(outliving._waiting.memory) < 50
    outliving.look()
