# SPDX-License-Identifier: Apache-2.0
"""Small trainings that are stepped in backward, and the same without, for tests of every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradient_samples import loss_of, net
from memscale.config.config import Config
from memscale.hardware.detect import detect
from memscale.techniques.base import Surroundings
from memscale.techniques.optimizer.step_in_backward import StepInBackward, find, why_not

Make = Callable[[Any], torch.optim.Optimizer]
PROMISE = Config(step_in_backward=True)


def around(optimizer: torch.optim.Optimizer | None, config: Config = PROMISE) -> Surroundings:
    """Where the technique is to look."""
    return Surroundings(detect(torch.device("cpu")), config.effective(), optimizer)


@contextmanager
def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[StepInBackward]:
    """Has a model stepped in backward inside the block; forwards are told as the executor tells them."""
    assert why_not(model, around(optimizer)) == ""
    (made,) = find(model, around(optimizer))
    made.attach()
    before = model.register_forward_pre_hook(lambda *_: made.about_to_run())
    after = model.register_forward_hook(lambda module, args, output: made.has_run(output))
    try:
        yield made
    finally:
        before.remove()
        after.remove()
        made.undo()


def by_group(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups in another order than the model's; a frozen parameter is in none."""
    values = [value for value in model.parameters() if value.requires_grad]
    return [{"params": values[3:], "lr": 1e-2}, {"params": values[:3]}]


def trained(make: Make, in_backward: bool, steps: int = 4, prepare: Callable[..., Any] | None = None) -> Any:
    """Losses, weights and the optimizer's state after some steps, with a scheduler."""
    model = net()
    optimizer = make(by_group(model))
    if prepare is not None:
        prepare(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []

    def run() -> None:
        for number in range(steps):
            loss = loss_of(model, number)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    if in_backward:
        with stepped(model, optimizer):
            run()
    else:
        run()
    return losses, [value.detach() for value in model.parameters()], optimizer.state_dict()


def gradients(model: nn.Module) -> list[Tensor | None]:
    """As they are now."""
    return [value.grad for value in model.parameters()]
