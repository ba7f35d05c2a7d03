# SPDX-License-Identifier: Apache-2.0
"""Where steps inside of backward cannot be, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backward_step_samples import PROMISE, around
from memscale.config.config import Config
from memscale.hardware.detect import card_hardware
from memscale.techniques.optimizer.step_in_backward import find, why_not

WHY_NOT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS has one state for all parameters"),
    "sparse": (torch.optim.SparseAdam, "SparseAdam takes sparse gradients only"),
    "differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), "is differentiable"),
    "none of them": (lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))]), "no parameter of the model"),
    "nobody": (lambda p: None, "the optimizer is not known"),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_why_not(name: str) -> None:
    make, words = WHY_NOT[name]
    model = nn.Linear(4, 4)
    optimizer = make([*model.parameters()])
    assert words in why_not(model, around(optimizer)) and not find(model, around(optimizer))
    assert why_not(model, around(optimizer, Config())) == "" and not find(model, around(optimizer, Config()))


def test_why_not_with_a_step_of_its_own() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert why_not(model, around(optimizer)) == ""
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    assert "has been replaced" in why_not(model, around(optimizer))


def test_why_not_where_parameters_share_memory() -> None:
    model = nn.Linear(4, 4)
    model.other = nn.Parameter(model.weight.detach()[:2])
    assert "share memory" in why_not(model, around(torch.optim.SGD(model.parameters())))


def test_why_not_with_distributed_data_parallel() -> None:
    model = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel.__new__(DistributedDataParallel))
    nn.Module.__init__(model[1])
    optimizer = torch.optim.SGD(model.parameters())
    assert "DistributedDataParallel averages" in why_not(model, around(optimizer))
    assert not find(model, around(optimizer))


def test_why_not_in_fp16() -> None:
    """Only where mixed precision is asked for, on a card without BF16."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    turing = card_hardware("some card", (7, 5), 16 << 30)
    for mixed, words in ((True, "which it may skip"), (False, "")):
        config = PROMISE.replace(use_mixed_precision=mixed)
        surroundings = replace(around(optimizer, config), hardware=turing)
        assert words in why_not(model, surroundings)
        assert bool(find(model, surroundings)) is not mixed
