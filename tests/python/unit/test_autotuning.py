# SPDX-License-Identifier: Apache-2.0
"""`AutoTuner` by prediction alone: candidates, refusals, bad input, and the forms of its answer."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.autotuning import AutoTuner, TuningResult, candidates
from memscale.autotuning.samples import resized, samples_in, samples_of
from memscale.errors import MemScaleError
from memscale.plans.budget import budget_for
from tuning_samples import Pictures, Words, pictures, words


def predicted(
    model: nn.Module, budget: int | str, total: int = 8, sample: Any = words, **more: Any
) -> TuningResult:
    return AutoTuner(model, None, sample, total, memory_budget=budget, confirm=False, **more).tune()


def peak_of(model: nn.Module, batch: int) -> int:
    return memscale.predict(model, sample_input=words(batch)).plain.device_used_peak_bytes


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Words()


# ---- which candidate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360])
def test_divisors(number: int) -> None:
    assert candidates.divisors(number) == [value for value in range(1, number + 1) if number % value == 0]


def test_the_largest_that_fits_is_found_and_the_next_does_not_fit(model: nn.Module) -> None:
    result = predicted(model, budget_for(peak_of(model, 6)), 24)
    looked = {one.micro_batch: one for one in result.candidates}
    largest = max(size for size, one in looked.items() if one.fits)
    following = min(size for size in candidates.divisors(24) if size > largest)
    assert largest >= 6 and not looked[following].fits
    for one in result.candidates:
        limit = result.budget_bytes
        assert one.highest_bytes <= limit if one.fits else budget_for(one.smallest_peak_bytes) > limit
        assert one.micro_batch * one.accumulation == 24
    assert result.chosen is not None
    assert result.chosen.step_ns == min(one.step_ns for one in result.candidates if one.fits)


def test_a_step_of_many_micro_batches_has_one_step_of_the_optimizer(model: nn.Module) -> None:
    result = predicted(model, "1GiB")
    whole, one = (next(it for it in result.candidates if it.micro_batch == size) for size in (8, 1))
    assert one.prediction is not None and whole.prediction is not None
    assert one.step_ns < 8 * one.prediction.step_time_ns
    assert whole.step_ns == whole.prediction.step_time_ns


def test_gradients_of_earlier_micro_batches_count(model: nn.Module) -> None:
    result = predicted(model, "1GiB")
    two = next(one for one in result.candidates if one.micro_batch == 2)
    alone = memscale.predict(model, sample_input=words(2)).device_used_peak_bytes
    assert two.peak_bytes > alone


def test_sizes_that_contradict_each_other_are_all_looked_at(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = candidates.Candidates.of

    def odd(self: Any, size: int, config: Any) -> Any:
        from dataclasses import replace

        return replace(own(self, size, config), fits=size in (4, 16))

    monkeypatch.setattr(candidates.Candidates, "of", odd)
    result = predicted(model, "1GiB", 32)
    assert [one.micro_batch for one in result.candidates if one.fits] == [4, 16]
    assert len(result.candidates) == 6


def test_nothing_fits_is_an_answer_with_advice(model: nn.Module) -> None:
    result = predicted(model, 300_000)
    assert not result.fits and result.micro_batch == 0 and result.chosen is None and not result.confirmed
    assert 0 < result.smallest_peak_bytes == min(one.smallest_peak_bytes for one in result.candidates)
    assert any("raise the budget to" in line for line in result.advice)
    assert "nothing fits" in result.explain() and "nothing fits" in repr(result)
    with pytest.raises(ValueError, match="nothing fits"):
        result.snippet()
    assert json.loads(result.to_json())["snippet"] is None


def test_for_a_card_that_is_not_here_it_is_predicted_and_says_so() -> None:
    with torch.device("meta"):
        model = Words()
    result = AutoTuner(model, None, words, 8, device="RTX 3090").tune()
    assert result.fits and not result.confirmed and "RTX 3090" in result.device
    assert "predicted, no step was run" in result.headline()
    assert any("another device" in note for note in result.notes)


def test_processes_share_the_global_batch(model: nn.Module) -> None:
    result = predicted(model, "1GiB", 8, world_size=4)
    assert {one.micro_batch * one.accumulation for one in result.candidates} == {2}
    assert "× 4 processes = 8 samples" in result.headline()


# ---- what must not be split ----------------------------------------------------------------------------


def test_batch_normalisation_is_not_split_unless_allowed() -> None:
    model = Pictures()
    budget = budget_for(memscale.predict(model, sample_input=pictures(4)).smallest_peak_bytes)
    refused = predicted(model, budget, 8, pictures)
    assert not refused.fits and [one.micro_batch for one in refused.candidates] == [8]
    assert any("net.1" in note for note in refused.notes)
    assert any("splittable=True" in line for line in refused.advice)
    allowed = predicted(model, budget, 8, pictures, splittable=True)
    assert allowed.fits and allowed.micro_batch <= 4
    assert any("sees the micro-batch alone" in note for note in allowed.notes)


def test_a_batch_that_fits_whole_is_no_question_of_splitting() -> None:
    assert predicted(Pictures(), "1GiB", 8, pictures).micro_batch == 8


def test_frozen_batch_normalisation_may_be_split() -> None:
    model = Pictures()
    model.net[1].eval()
    assert candidates.batch_norms(model) == []
    assert candidates.batch_norms(Pictures().eval()) == ["net.1"]  # the loop calls train()
    assert candidates.batch_norms(nn.Sequential(nn.SyncBatchNorm(4))) == ["0"]  # over processes, not in time


def test_a_loss_over_the_whole_batch_is_not_split(model: nn.Module) -> None:
    result = predicted(model, budget_for(peak_of(model, 2)), 64, splittable=False)
    assert [one.micro_batch for one in result.candidates] == [64]
    assert any("splittable=False" in note for note in result.notes)


# ---- worst batches -------------------------------------------------------------------------------------


def test_the_longest_and_the_fullest_batch_of_a_loader_decide() -> None:
    long, full, small = words(2, 64), {**words(2, 8), "labels": torch.zeros(2, 900)}, words(4, 4)
    found = samples_in([small, long, full])
    shapes = [tuple(value.shape for value in make(3).values()) for make in found.makers]
    assert shapes == [((3, 8), (3, 900)), ((3, 8), (3, 900))] or shapes == [((3, 8), (3, 900))]
    found = samples_in([small, long, {**words(2, 8), "labels": torch.zeros(2, 20, 100)}])
    shapes = [tuple(value.shape for value in make(3).values()) for make in found.makers]
    assert shapes == [((3, 64), (3, 64)), ((3, 8), (3, 20, 100))]
    assert found.sequence == 64 and found.note == ""


def test_a_resized_batch_repeats_samples_on_its_own_memory() -> None:
    ids = torch.arange(6).reshape(3, 2)
    (got, scalar), _ = resized(((ids, torch.tensor(7)), {}), 5)
    assert torch.equal(got, ids[[0, 1, 2, 0, 1]]) and scalar == 7
    assert got.data_ptr() != ids.data_ptr()


def test_a_loader_is_looked_at_and_left_as_it_was(model: nn.Module) -> None:
    dataset = [{name: value[0] for name, value in words(1).items()} for _ in range(12)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    before, own = torch.get_rng_state(), random.getstate()
    result = AutoTuner(model, None, loader=loader, global_batch=8, memory_budget="1GiB", confirm=0).tune()
    assert result.sequence == 32 and result.call == "keywords"
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == own


def test_a_long_loader_is_scanned_in_part_and_that_is_said() -> None:
    found = samples_in([words(2, 4 + index) for index in range(10)], scan=4)
    assert found.sequence == 7 and "first 4 batches" in found.note


def test_a_function_is_asked_for_the_sequence() -> None:
    asked: list[tuple[int, int]] = []

    def sample(batch: int, sequence: int = 16) -> Any:
        asked.append((batch, sequence))
        return words(batch, sequence)

    samples_of(sample, 24).of(3)
    found = samples_of(sample, None)
    found.of(2)
    assert asked == [(3, 24), (2, 16)] and found.sequence == 16


# ---- bad input -----------------------------------------------------------------------------------------


def _needs_sequence(batch: int, sequence: int) -> Any:
    return words(batch, sequence)


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"global_batch": 0}, ValueError, "global_batch is 0; allowed: a whole number, 1 or more"),
        ({"global_batch": 2.5}, TypeError, "global_batch is 2.5; allowed"),
        ({"global_batch": True}, TypeError, "global_batch is True"),
        ({"global_batch": None}, TypeError, "global_batch is None; allowed"),
        ({"world_size": 3}, ValueError, "global_batch is 8, not for 3 processes; allowed: a multiple of 3"),
        ({"sample": None}, TypeError, "of sample and loader neither are given"),
        ({"loader": [words(2)]}, TypeError, "of sample and loader both are given"),
        ({"splittable": "yes"}, TypeError, "splittable is 'yes'; allowed: True, False or None"),
        ({"confirm": -1}, ValueError, "confirm is -1; allowed: a whole number, 0 or more"),
        ({"sample": words(2)}, TypeError, "allowed: a callable"),
        ({"sample": lambda size: size}, TypeError, "sample takes size; allowed: batch, and sequence"),
        ({"sample": _needs_sequence}, ValueError, "sequence is None; allowed: the longest"),
        ({"sample": pictures, "sequence": 4}, ValueError, "sequence is 4, and sample takes none"),
        ({"sample": None, "loader": iter([words(2)])}, TypeError, "loader is an iterator"),
        ({"sample": None, "loader": 5}, TypeError, "loader is 5; allowed: an iterable"),
        ({"sample": None, "loader": []}, ValueError, "loader is empty"),
        ({"sample": None, "loader": [words(2)], "sequence": 4}, ValueError, "sequence is 4 beside loader"),
        ({"memory_budget": 9, "config": memscale.Config(memory_budget=1 << 20)}, ValueError, "leave one"),
        ({"device": "RTX 9999"}, ValueError, "closest"),
        ({"optimizer": "adam"}, TypeError, "optimizer is a str"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    model: nn.Module, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = {"sample": words, "global_batch": 8, **more}
    with pytest.raises(error, match=text.replace("(", r"\(")):
        AutoTuner(model, **given).tune()


def test_the_models_own_error_comes_through(model: nn.Module) -> None:
    def sample(batch: int) -> Any:
        return {"input_ids": torch.full((batch, 4), 1.5), "labels": torch.zeros(batch, 4)}

    with pytest.raises((RuntimeError, TypeError)):
        AutoTuner(model, None, sample, 4, memory_budget="1GiB").tune()


# ---- forms of the answer -------------------------------------------------------------------------------


def test_the_snippet_names_what_the_loop_needs(model: nn.Module) -> None:
    plain = predicted(model, "1GiB", 8)
    split = predicted(model, budget_for(peak_of(model, 2)) + 100_000, 8)
    planned = predicted(model, budget_for(peak_of(model, 8)) - 100_000, 8, splittable=False)
    for result in (plain, split, planned):
        text = result.snippet()
        compile(text, "snippet", "exec")
        assert f"batch_size={result.micro_batch}," in text
        assert (f"/ {result.accumulation}" in text) is (result.accumulation > 1)
        assert result.chosen is not None
        assert ("memscale.wrap(model, memory_budget=" in text) is bool(result.chosen.techniques)
    assert split.accumulation > 1 and "wrap" in planned.snippet() and "wrap" not in plain.snippet()


def test_a_size_that_the_model_does_not_take_is_left_out() -> None:
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def sample(batch: int) -> torch.Tensor:
        return torch.randn(batch, 8)

    result = predicted(normed, "1GiB", 4, sample, splittable=True)
    assert [one.micro_batch for one in result.candidates] == [2, 4]
    assert any(
        "micro-batch 1 was left out: ValueError: Expected more than 1" in note for note in result.notes
    )


def test_json_has_all_of_it_and_no_plan(model: nn.Module) -> None:
    result = predicted(model, "1GiB")
    data = json.loads(result.to_json())
    assert data["format"] == "memscale-tuning" and data["version"] == 1
    assert data["micro_batch"] == result.micro_batch and len(data["candidates"]) == len(result.candidates)
    assert "prediction" not in data["candidates"][0] and data["candidates"][0]["samples_per_s"] > 0


def test_without_matplotlib_the_picture_says_what_to_install(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MemScaleError, match="pip install matplotlib"):
        predicted(model, "1GiB").save_picture(tmp_path / "picture.png")


def test_the_picture_is_drawn(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    predicted(model, "1GiB").save_picture(tmp_path / "picture.svg")
    assert (
        "samples/s" in (tmp_path / "picture.svg").read_text()
        or (tmp_path / "picture.svg").stat().st_size > 5000
    )


def test_progress_is_said(model: nn.Module) -> None:
    said: list[str] = []
    say: Callable[[str], None] = said.append
    predicted(model, "1GiB", 2, progress=say)
    assert said == ["predicting micro-batch 2", "predicting micro-batch 1"]
