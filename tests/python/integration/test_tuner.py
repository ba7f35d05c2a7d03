# SPDX-License-Identifier: Apache-2.0
"""`AutoTuner` with real steps: its answer holds in the loop, and a wrong prediction is no OOM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memscale
from memscale.autotuning import TuningResult, confirm
from memscale.observability.tensor_peak import TensorPeak
from memscale.plans.budget import budget_for
from tuning_samples import (
    Words,
    assert_same,
    plain_peak,
    state_of,
    step,
    tuned,
    words,
)

pytestmark = pytest.mark.usefixtures("few_timed_steps")


# ---- the answer holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.02, 0.97])
def test_the_loop_of_the_answer_fits(share: float) -> None:
    torch.manual_seed(1)
    model = Words(blocks=6)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    budget = int(budget_for(plain_peak(model, optimizer, 4)) * share)
    result = tuned(model, optimizer, budget, confirm=2)
    assert result.fits and result.confirmed
    assert result.micro_batch * result.accumulation == 8
    dataset = [{name: value[0] for name, value in words(1).items()} for _ in range(16)]
    present = [*model.parameters()]
    names = {
        "memscale": memscale, "model": model, "optimizer": optimizer, "dataset": dataset,
        "DataLoader": torch.utils.data.DataLoader,
    }  # fmt: skip
    with TensorPeak(present) as peak:
        peak.mark()
        exec(result.snippet(), names)
        most, _ = peak.end()
    assert memscale.executor_of(model) is not None or share > 1
    assert most <= budget


def test_accumulated_gradients_are_those_of_the_batch() -> None:
    torch.manual_seed(2)
    model = Words().eval()  # no dropout
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = tuned(model, optimizer, budget_for(plain_peak(model, optimizer, 4)), confirm=0)
    assert result.accumulation > 1
    batch = words(8)
    model(**batch).backward()
    whole = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    optimizer.zero_grad()
    parts = zip(*(value.split(result.micro_batch) for value in batch.values()), strict=True)
    for part in parts:
        (model(**dict(zip(batch, part, strict=True))) / result.accumulation).backward()
    for expected, value in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(value.grad, expected, rtol=1e-4, atol=1e-6)


def test_measured_peaks_are_within_what_was_predicted() -> None:
    model = Words(blocks=6)
    optimizer = torch.optim.AdamW(model.parameters())
    result = tuned(model, optimizer, budget_for(plain_peak(model, optimizer, 8)) - 100_000, confirm=4)
    run = [one for one in result.candidates if one.confirmed is not None]
    assert len(run) >= 2
    for one in run:
        assert one.confirmed is not None and one.prediction is not None
        assert one.confirmed.peak_bytes <= one.highest_bytes <= result.budget_bytes
        assert one.confirmed.peak_bytes >= one.prediction.error_band_bytes[0]
        assert one.confirmed.alloc_retries == 0


# ---- predictions that are too low ----------------------------------------------------------------------


def test_an_underestimate_ends_in_the_guard_and_the_state_is_restored() -> None:
    model = Words(hidden_bytes=600 << 20)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    result = tuned(model, optimizer, "64MiB")
    assert not result.fits and result.out_of_memory == 1
    assert any("ran into the guard" in note for note in result.notes)
    assert_same(before, state_of(model, optimizer))
    with confirm.data_limit(64 << 20), pytest.raises(RuntimeError, match="allocate memory"):
        torch.ones(600 << 20, dtype=torch.uint8)


def test_a_step_that_takes_more_than_predicted_narrows_the_rest() -> None:
    model = Words(hidden_bytes=3 << 20)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = budget_for(plain_peak(model, optimizer, 8)) + (2 << 20)
    result = tuned(model, optimizer, budget, confirm=3)
    assert result.fits and result.chosen is not None and result.chosen.confirmed is not None
    assert result.chosen.confirmed.peak_bytes <= budget
    assert any("plans are made for" in note or "are dropped" in note for note in result.notes)
    assert result.out_of_memory == 0


def test_an_error_of_the_model_is_its_own_and_the_state_is_restored() -> None:
    class Fails(Words):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = super().forward(input_ids, labels)
            if len(calls) and loss.device.type == "cpu" and type(loss) is torch.Tensor:
                raise ZeroDivisionError("of the model")
            return loss

    calls: list[int] = []
    model = Fails()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = state_of(model, optimizer)
    calls.append(1)
    with pytest.raises(ZeroDivisionError, match="of the model"):
        tuned(model, optimizer, "16MiB")
    assert_same(before, state_of(model, optimizer))


# ---- where nothing is run ------------------------------------------------------------------------------


def noted(result: TuningResult) -> str:
    assert result.fits and not result.confirmed
    return "\n".join(result.notes)


def test_hooks_on_gradients_that_step_are_not_run() -> None:
    model = Words()
    stepped: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda value: stepped.append(1))
    assert "no step was run: hooks run" in noted(tuned(model, None, "16MiB"))
    assert stepped == []


def test_an_optimizer_that_needs_a_closure_is_not_run() -> None:
    model = Words()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    assert tuned(model, schedule.optimizer, "16MiB", 1).confirmed  # a schedule wraps its `step`
    assert "needs a closure" in noted(tuned(model, torch.optim.LBFGS(model.parameters()), "64MiB", 1))


def test_under_a_profiler_nothing_is_run() -> None:
    model = Words()
    with torch.autograd.profiler.profile():
        assert "profiler runs" in noted(tuned(model, None, "16MiB"))


def test_without_room_for_copies_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    model = Words(blocks=12)
    before = state_of(model, torch.optim.SGD(model.parameters()))
    assert "was not run" in noted(tuned(model, torch.optim.SGD(model.parameters()), "64MiB"))
    assert_same(before, state_of(model, torch.optim.SGD(model.parameters())))
