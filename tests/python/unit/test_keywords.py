# SPDX-License-Identifier: Apache-2.0
"""Fields of `Config` as keywords of the public functions, and what is said about a budget of a few bytes."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import memscale
from cli_samples import sized
from memscale.core.arguments import merged
from memscale.errors import ConfigError

QUIET: dict[str, Any] = {"memory_budget": "1GiB", "enable_logging": False}


def test_every_function_takes_fields() -> None:
    model, ids = sized(4, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(**QUIET)
    expected = memscale.plan(model, sample_input=ids, config=config)
    assert memscale.plan(model, sample_input=ids, **QUIET).to_json() == expected.to_json()
    assert memscale.predict(model, sample_input=ids, device="cpu", **QUIET).budget_bytes == 1 << 30
    assert memscale.verify(model, ids, **QUIET).passed
    found = memscale.estimate_savings(model, sample_input=ids, device="RTX 3090", **QUIET)
    assert found.to_dict() == memscale.estimate_savings(
        model, sample_input=ids, device="RTX 3090", config=config
    ).to_dict()  # fmt: skip
    with memscale.optimize(model, optimizer, sample_input=ids, **QUIET) as executor:
        assert executor.config.memory_budget == "1GiB"
    assert memscale.wrap(model, sample_input=ids, **QUIET) is model
    assert memscale.executor_of(model).config.memory_budget == "1GiB"
    memscale.detach(model)
    memscale.apply_all_optimizations(model, optimizer, sample_input=ids, enable_logging=False)
    assert memscale.executor_of(model).config.mode is memscale.OptimizationMode.AGGRESSIVE
    memscale.detach(model)


def test_fields_are_put_into_a_configuration_that_has_not_got_them() -> None:
    given = memscale.Config(memory_budget="8GiB")
    assert merged(given, {}) is given
    assert merged(None, {}) is None
    both = merged(given, {"strict_budget": True})
    assert both == memscale.Config(memory_budget="8GiB", strict_budget=True)
    assert not given.strict_budget
    with pytest.raises(
        ConfigError, match="memory_budget='4GiB' is not allowed: config has memory_budget='8GiB'"
    ):
        merged(given, {"memory_budget": "4GiB"})
    with pytest.raises(ConfigError, match=r"'memory_budgt'.*Did you mean 'memory_budget'"):
        memscale.wrap(torch.nn.Linear(2, 2), memory_budgt="8GiB")
    with pytest.raises(TypeError, match="config is a dict"):
        memscale.wrap(torch.nn.Linear(2, 2), {}, strict_budget=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["RTX 3090", "24GiB", "cpu"])
def test_a_plan_for_another_device_is_that_of_a_prediction(device: str) -> None:
    with torch.device("meta"):
        model, ids = sized(64, 64)
    budget = memscale.predict(model, sample_input=ids, device=device).plain.device_used_peak_bytes  # type: ignore[union-attr]
    settings = {"memory_budget": int(0.99 * budget), "enable_logging": False}
    found = memscale.plan(model, sample_input=ids, device=device, **settings)
    predicted = memscale.predict(model, sample_input=ids, device=device, **settings)
    assert found.digest == predicted.plan.digest  # type: ignore[union-attr]
    assert found.predicted.device_used_peak_bytes == predicted.device_used_peak_bytes


def test_a_plan_for_an_unknown_device_is_refused() -> None:
    model, ids = sized(2, 8)
    with pytest.raises(ValueError, match="closest: "):
        memscale.plan(model, sample_input=ids, device="RTX 3091")


@pytest.mark.parametrize("budget", [8, 24, "8"])
def test_a_budget_of_a_few_bytes_is_warned_of(budget: int | str) -> None:
    with pytest.warns(UserWarning, match=rf'for GiB write memory_budget="{budget}GiB"') as caught:
        memscale.Config(memory_budget=budget)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("budget", [None, "8GiB", "8B", 1 << 20])
def test_other_budgets_are_not(budget: int | str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memscale.Config(memory_budget=budget)


def test_a_mode_as_text_has_the_right_type() -> None:
    """For type checkers: the names of the modes, and no other text."""
    kinds = get_args(get_type_hints(memscale.Config)["mode"])
    names = [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    assert memscale.OptimizationMode in kinds
    assert names == [mode.value for mode in memscale.OptimizationMode]
    assert memscale.Config(mode="balanced").mode is memscale.OptimizationMode.BALANCED
