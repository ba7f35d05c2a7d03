# SPDX-License-Identifier: Apache-2.0
"""What the public functions return can be copied, pickled and printed in a line."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import memscale


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_plans_and_predictions_can_be_copied(again: Any) -> None:
    config = memscale.Config(memory_budget="600KiB")
    made = memscale.predict(model(), config=config, sample_input=torch.zeros(64, 64), device="cpu")
    assert made.plan is not None
    assert again(made.plan) == made.plan and again(made.plan).frontier == made.plan.frontier
    assert again(made) == made


def test_reports_are_printed_in_a_line() -> None:
    report = memscale.verify(model(), torch.zeros(64, 64))
    assert len(repr(report)) < 160 and "bit-equal" in repr(report)


@pytest.mark.parametrize(
    "terms", [{"steps": 10**400}, {"price_per_hour": 10**400}, {"price_per_hour": 1e308}]
)
def test_savings_are_finite(terms: dict[str, Any]) -> None:
    with pytest.raises(memscale.errors.ConfigError, match="is not allowed"):
        memscale.estimate_savings(model(), sample_input=torch.zeros(2, 64), device="cpu", **terms)
    found = memscale.estimate_savings(
        model(), sample_input=torch.zeros(2, 64), device="cpu", steps=10**15, price_per_hour=1e12
    )
    assert "Infinity" not in found.to_json() and json.loads(found.to_json())
