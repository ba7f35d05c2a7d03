# SPDX-License-Identifier: Apache-2.0
"""A Trainer's `auto_find_batch_size` under a plan: settled beforehand, and the effective batch stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memscale
from memscale.errors import BudgetError
from trainer_samples import Counted, Stream, Trained, trained, weights
from zoo.training import same_bits

pytest.importorskip("transformers")

ASKED: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 24}
BUDGETS = {"64MiB": (24, 1), "6MiB": (12, 2)}


def config(budget: str | int, **more: Any) -> memscale.Config:
    return memscale.Config(memory_budget=budget, **more)


def batch_of(run: Trained) -> tuple[int, int, bool]:
    args = run.trainer.args
    return args.per_device_train_batch_size, args.gradient_accumulation_steps, args.auto_find_batch_size


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_the_largest_part_that_fits_is_accumulated(
    budget: str, strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every bit is that of a plain Trainer with these numbers."""
    lines, parts = BUDGETS[budget]
    plain = trained(tmp_path, None, per_device_train_batch_size=lines, gradient_accumulation_steps=parts)
    planned = trained(tmp_path, config(budget, strict_budget=strict), **ASKED)
    assert batch_of(planned) == (lines, parts, False)
    assert planned.losses == plain.losses and planned.executor.plan.fits
    pairs = zip(weights(plain.model), weights(planned.model), strict=True)
    assert all(same_bits(one, other) for (_, one), (_, other) in pairs)
    assert caplog.text.count("auto_find_batch_size: superseded") == 1
    assert "the effective batch stays 24" in caplog.text
    memscale.detach(planned.trainer)
    assert batch_of(planned) == (24, 1, True) and planned.trainer._train_batch_size == 24


def test_what_was_accumulated_before_is_accumulated_still(tmp_path: Path) -> None:
    run = trained(tmp_path, config("6MiB"), **ASKED, gradient_accumulation_steps=3, max_steps=1)
    assert batch_of(run) == (12, 6, False)


def test_another_wrap_looks_at_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    run = trained(tmp_path, config("6MiB"), **ASKED, max_steps=1)
    memscale.wrap(run.trainer, config("64MiB"))
    assert batch_of(run) == (24, 1, False)
    with pytest.raises(BudgetError):
        memscale.wrap(run.trainer, config(1, strict_budget=True))
    assert batch_of(run) == (24, 1, False) and run.executor.plan.fits


def test_where_nothing_fits_it_stays_with_transformers(tmp_path: Path) -> None:
    asked = {**ASKED, "per_device_train_batch_size": 3}  # each divisor is predicted
    run = trained(tmp_path, config(1), **asked, max_steps=1)
    assert batch_of(run) == (3, 1, True)
    with pytest.raises(BudgetError):
        trained(tmp_path, config(1, strict_budget=True), **asked)


@pytest.mark.parametrize("kind", ["stream", "steps of its own"])
def test_where_no_batch_can_be_drawn_it_stays_with_transformers(kind: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": Stream()} if kind == "stream" else {"kind": Counted}
    run = trained(tmp_path, config("64MiB"), **ASKED, **own, max_steps=1)
    assert batch_of(run)[2]
