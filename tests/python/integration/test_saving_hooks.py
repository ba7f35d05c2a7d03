# SPDX-License-Identifier: Apache-2.0
"""Hooks on saved tensors around a model or a part of it are given what they are given in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memscale
from memscale.offload.engine import Offload, OffloadSettings
from memscale.techniques.checkpoint import saving_hooks
from memscale.techniques.checkpoint.chains import ChainAttachment, ChainRun
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.offloading import OffloadAttachment
from memscale.techniques.tiles import row_search

WIDTH = 16
Seen = list[tuple[int, ...]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Has hooks of its own around its blocks in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 4)
        self.inside: Callable[[], Any] = contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.inside():
            for block in self.blocks:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def rounded(seen: Seen) -> Any:
    """Activations are kept in BF16."""

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor if isinstance(tensor, nn.Parameter) else tensor.bfloat16()

    return saved_tensors_hooks(pack, lambda tensor: tensor.float())


def on_host(seen: Seen) -> Any:
    return save_on_cpu()


def refused(seen: Seen) -> Any:
    return disable_saved_tensors_hooks("no hooks, please")


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    saving_hooks._Told.once = False
    yield
    saving_hooks._Told.once = False


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("plan is not in force" in record.message for record in caplog.records)


def trained(wrapped: str, around: Callable[[Seen], Any], where: str = "model") -> tuple[list[Tensor], Seen]:
    """Losses and gradients of three steps, hooks in the latter two; and what hooks have seen.

    Args:
        wrapped: "" or when it is planned: "before", "lazily", "under hooks".
        around: hooks.
        where: they are.
    """
    torch.manual_seed(0)
    model, x, seen, found = Net(), torch.randn(32, WIDTH), Seen(), list[Tensor]()
    steps: list[int] = []

    def inside() -> Any:
        return around(seen) if len(steps) > 1 and where == "inside" else contextlib.nullcontext()

    model.inside = inside
    config = memscale.Config(memory_budget=1, enable_logging=False)
    if wrapped == "before":
        memscale.wrap(model, config, sample_input=x)
    elif wrapped == "lazily":
        memscale.wrap(model, config)
    elif wrapped == "under hooks":
        with around(Seen()):
            memscale.wrap(model, config, sample_input=x)
    for step in range(3):
        steps.append(step)
        with around(seen) if step and where == "model" else contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        if wrapped:
            assert memscale.executor_of(model).plan.active
    return found, seen


@pytest.mark.parametrize("where", ["model", "inside"])
@pytest.mark.parametrize("around", [rounded, on_host, refused])
@pytest.mark.parametrize("wrapped", ["before", "lazily"])
def test_they_see_what_they_see_in_plain(
    wrapped: str, around: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, got = trained("", around, where), trained(wrapped, around, where)
    assert all(map(torch.equal, plain[0], got[0])) and plain[1] == got[1]
    assert told(caplog) == 1


@pytest.mark.parametrize("around", [rounded, on_host, refused])
def test_planning_under_them_is_nothing_for_them(around: Any) -> None:
    torch.manual_seed(0)
    model, x, seen = Net(), torch.randn(32, WIDTH), Seen()
    with around(seen):
        memscale.predict(model, sample_input=x)
        memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), sample_input=x)
        present = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        assert memscale.executor_of(model).plan.active and not seen
        assert (present is None) is (around is refused)
    plain, got = trained("", around), trained("under hooks", around)
    assert all(map(torch.equal, plain[0], got[0])) and plain[1] == got[1]


def test_a_real_step_of_planning_is_nothing_for_them() -> None:
    model, x, seen = Net(), torch.randn(32, WIDTH), Seen()
    config = memscale.Config(memory_budget=1, use_static_profiling=False, enable_logging=False)
    with rounded(seen):
        memscale.wrap(model, config, sample_input=x)
    assert not seen and memscale.executor_of(model).plan.active


def attachments(name: str, model: nn.Sequential, offload: Any) -> list[Any]:
    if name == "checkpoint":
        return [CheckpointAttachment(model[0], "0"), CheckpointAttachment(model[1], "1")]
    if name == "chain":
        return [ChainAttachment(model, "", [ChainRun("0", "1")])]
    if name == "offload":
        return [OffloadAttachment(model[0], "0", offload)]
    return [*row_search.find(model)]


@pytest.mark.parametrize("around", [rounded, on_host, refused])
@pytest.mark.parametrize("name", ["checkpoint", "chain", "offload", "rows"])
def test_every_technique_that_saves_otherwise_stands_aside(name: str, around: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    x = torch.randn(900, WIDTH)

    def step() -> tuple[list[Tensor], Seen]:
        seen = Seen()
        with around(seen):
            loss = model(x).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters()))), seen

    plain, found = (
        step(),
        attachments(name, model, Offload(OffloadSettings(torch.device("cpu"), least_bytes=1))),
    )
    assert found
    for attachment in found:
        attachment.attach()
    got = step()
    for attachment in reversed(found):
        attachment.undo()
    assert all(map(torch.equal, plain[0], got[0])) and plain[1] == got[1]


def test_a_checkpoint_inside_of_another_or_of_an_offload_is_one() -> None:
    """Our own hooks are not foreign."""
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    outer = CheckpointAttachment(model, "")
    inner = CheckpointAttachment(model[0], "0")
    inner.attach()
    outer.attach()
    loss = model(torch.randn(4, WIDTH)).sum()
    loss.backward()
    outer.undo()
    inner.undo()
    assert not saving_hooks._Told.once


def test_pytorchs_own_checkpoint_around_a_module(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, WIDTH, requires_grad=True)

    def gradient() -> Tensor:
        output = checkpoint(block, x, use_reentrant=False)
        return torch.autograd.grad(output.square().sum(), x)[0]

    plain = gradient()
    attachment = CheckpointAttachment(block, "")
    attachment.attach()
    got = gradient()
    attachment.undo()
    assert torch.equal(plain, got) and not told(caplog)


def test_without_pytorchs_private_names_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_hooks, "_HAS_HOOK_STACK", False)
    with rounded([]), saving_hooks.without_saving_hooks():
        assert not saving_hooks.under_foreign_hooks()
