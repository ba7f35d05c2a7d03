# SPDX-License-Identifier: Apache-2.0
"""A forward waits for its backward while another plan takes the place of its own: it runs again as it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.techniques.checkpoint.chains import ChainAttachment, ChainRun
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from zoo.blocks import WIDTH
from zoo.models import generator
from zoo.training import seed

Attach = Callable[[nn.Sequential], Any]


def model() -> nn.Sequential:
    seed()
    half = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()]
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(nn.Sequential(*half), other, nn.Dropout(0.2))


def rows(number: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=generator(number))


def whole(model: nn.Sequential) -> Any:
    return CheckpointAttachment(model[0], "0")


def part(model: nn.Sequential) -> Any:
    return CheckpointAttachment(model[0][0], "0.0")


def run(model: nn.Sequential) -> Any:
    return ChainAttachment(model, "", [ChainRun("0", "1")])


def inner_run(model: nn.Sequential) -> Any:
    return ChainAttachment(model[0], "0", [ChainRun("0", "1")])


def two_forwards(
    model: nn.Sequential, first: Attach | None = None, second: Attach | None = None
) -> list[Tensor]:
    """A step with two forwards; the attachment of the first is replaced before the second."""
    torch.manual_seed(1)
    attached = None if first is None else first(model)
    if attached is not None:
        attached.attach()
    loss = model(rows(1)).square().mean()
    if attached is not None:
        attached.undo()
    attached = None if second is None else second(model)
    if attached is not None:
        attached.attach()
    (loss + model(rows(2)).square().mean()).backward()
    if attached is not None:
        attached.undo()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [*gradients, *model.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("second", [None, whole, part, run, inner_run])
@pytest.mark.parametrize("first", [whole, part, run, inner_run])
def test_the_second_run_is_that_of_the_first_plan(first: Attach, second: Attach | None) -> None:
    plain = two_forwards(model())
    planned = two_forwards(model(), first, second)
    assert all(map(torch.equal, plain, planned))


def test_a_wrapped_model_inside_another_is_checkpointed_in_both_runs() -> None:
    """A stand-in that was there in the first run counts in the second, too."""
    plain = two_forwards(model())
    subject = model()
    inner = part(subject)
    inner.attach()
    planned = two_forwards(subject, whole, None)
    inner.undo()
    assert all(map(torch.equal, plain, planned))


@pytest.mark.parametrize("budget", [1, 120_000])
def test_two_images_of_a_pair(budget: int) -> None:
    """The second forward of the first step is re-planned, while the first one waits."""
    config = memscale.Config(memory_budget=budget, enable_logging=False)
    plain, planned = model(), memscale.wrap(model(), config)
    for subject in (plain, planned):
        optimizer = torch.optim.AdamW(subject.parameters())
        for _ in range(2):
            two_forwards(subject)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))
