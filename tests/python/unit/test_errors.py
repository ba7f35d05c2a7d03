# SPDX-License-Identifier: Apache-2.0
"""The exceptions: their family, their messages, and that they survive the way to another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from memscale import errors


def test_all_belong_to_one_family() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.MemScaleError), name


def test_only_a_config_error_is_a_value_error() -> None:
    value_errors = {name for name in errors.__all__ if issubclass(getattr(errors, name), ValueError)}
    assert value_errors == {"ConfigError"}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_docstring_says_when_it_is_raised(name: str) -> None:
    text = getattr(errors, name).__doc__
    assert text is not None
    assert "Raised" in text


def test_budget_error_carries_its_figures() -> None:
    error = errors.BudgetError(1 << 30, 3 << 30, ("halve the batch", "use the file tier"))
    assert (error.budget_bytes, error.smallest_peak_bytes) == (1 << 30, 3 << 30)
    assert error.advice == ["halve the batch", "use the file tier"]
    text = str(error)
    for part in ("1.00 GiB", "1073741824 bytes", "3.00 GiB", "2.00 GiB too much", "  - halve the batch"):
        assert part in text


def test_budget_error_without_advice_says_what_to_do() -> None:
    assert "Raise memory_budget" in str(errors.BudgetError(1, 2))


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
@pytest.mark.parametrize(
    "error",
    [
        errors.BudgetError(5, 7, ["less"]),
        errors.ConfigError("mode=3 is not allowed", "mode"),
        errors.ProfileError("no"),
        errors.AttachError("no"),
    ],
)
def test_copies_and_pickles(error: errors.MemScaleError, copier: object) -> None:
    assert callable(copier)
    again = copier(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_config_error_names_its_field() -> None:
    assert errors.ConfigError("text").field is None
    assert errors.ConfigError("text", "mode").field == "mode"
