# SPDX-License-Identifier: Apache-2.0
"""The ways in which the matrix trains, and one optimizer step of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import calls
from matrix.architectures import Architecture
from zoo.training import Loop, built, call

STEPS = 5
Around = Callable[[nn.Module, Any], Any]
"""Runs a model on a batch."""


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: of the column.
        dropout: probability of every dropout; None: as the model has it.
        autocast: forward and loss under BF16 autocast.
        accumulate: micro-batches per step.
        fails: the first attempts at some steps end in an exception, in forward, in backward's recompute of
            a forward and in backward; the steps are then repeated.
        twice: backward runs twice through the retained graph.
    """

    name: str
    dropout: float | None = None
    autocast: bool = False
    accumulate: int = 1
    fails: bool = False
    twice: bool = False


MODES = (
    Mode("plain", dropout=0.0),
    Mode("dropout", dropout=0.2),
    Mode("autocast", autocast=True),
    Mode("accumulation", accumulate=2),
    Mode("exception", fails=True),
    Mode("second backward", twice=True),
)

ATTEMPTS = {1: "forward", 2: "recompute", 3: "backward"}
"""Step → where its first attempt fails."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ATTRIBUTES = ("dropout", "attention_dropout", "activation_dropout")


def mode(name: str) -> Mode:
    """A mode by its name."""
    return next(item for item in MODES if item.name == name)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Gives every dropout of a model, in modules and in their attributes, this probability."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = probability
            continue
        for name in _ATTRIBUTES:
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, probability)


def model_for(architecture: Architecture, mode: Mode) -> nn.Module:
    """A fresh model with the same weights every time; the generators stand at a known place afterwards."""
    model = built(architecture.case, Loop(freeze=architecture.freeze))
    if mode.dropout is not None:
        set_dropout(model, mode.dropout)
    torch.manual_seed(7)
    return model


class Interrupted(Exception):
    """What a failing attempt raises."""


@contextmanager
def failing(model: nn.Module, where: str) -> Iterator[None]:
    """Makes a module in the middle of the model, or its gradient's arrival, raise `Interrupted`."""
    leaves = [
        module
        for module in model.modules()
        if not module._modules
        and any(value.requires_grad for value in module._parameters.values() if value is not None)
    ]
    leaf = leaves[len(leaves) // 2]
    if where == "backward":
        parameter = next(value for value in leaf.parameters() if value.requires_grad)
        handle = parameter.register_post_accumulate_grad_hook(calls.failing(Interrupted))
    else:
        handle = leaf.register_forward_pre_hook(calls.failing(Interrupted, 1 if where == "forward" else 2))
    try:
        yield
    finally:
        handle.remove()


def one_step(
    model: nn.Module, architecture: Architecture, mode: Mode, number: int, run: Around = call
) -> dict[str, Tensor]:
    """Forward and backward of one optimizer step; gradients are left in `.grad`.

    Returns:
        The loss of every micro-batch, and how many attempts failed, by name.
    """
    case, made = architecture.case, {}

    def loss_of(part: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast):
            return case.loss(run(model, case.batch(number * mode.accumulate + part)))

    if mode.fails and number in ATTEMPTS:
        raised = 0
        try:
            with failing(model, ATTEMPTS[number]):
                loss_of(0).backward()
        except Interrupted:
            raised = 1
        for parameter in model.parameters():
            parameter.grad = None
        if ATTEMPTS[number] != "recompute":  # the plain step has no recompute that could fail
            made["failed attempts"] = torch.tensor(raised)
    for part in range(mode.accumulate):
        loss = loss_of(part)
        scaled = loss / mode.accumulate
        if mode.twice:
            scaled.backward(retain_graph=True)
        scaled.backward()
        made[f"loss {part}"] = loss.detach().clone()
        del loss, scaled
    return made
