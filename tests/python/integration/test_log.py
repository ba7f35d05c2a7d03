# SPDX-License-Identifier: Apache-2.0
"""The log of a training run: one block that says everything, then silence."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale import AsyncOffloadConfig, Config, log
from zoo.models import case
from zoo.training import Loop, train

GPT2 = case("gpt2")
BUDGET = "3500KiB"


def blocks(text: str) -> int:
    return text.count("---- MemScale")


@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
def test_one_block_then_silence(sample: bool, caplog: pytest.LogCaptureFixture) -> None:
    run = train(GPT2, Loop(steps=3), Config(memory_budget=BUDGET, auto_policy=True), sample)
    assert run.plan.active
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("memscale")]
    assert len([message for message in messages if blocks(message)]) == 1
    (block,) = (message for message in messages if blocks(message))
    for word in (
        "device",
        "budget",
        "peak",
        "step time",
        "undo",
        "memscale.detach(model)",
        "checkpoint",
        "no effect",
    ):
        assert word in block
    assert "auto_policy" in block and "use_cache" in block
    assert len(messages) == 1 + (not run.plan.fits)


def test_a_long_planning_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Less and less often; with logging off, not at all."""
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    pace = log.Pace()
    log.setup(Config())
    for _ in range(12):
        pace.traced()
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" in ")[2] for line in said] == ["12 s", "20 s", "40 s"]
    assert "3 ways" in said[0]
    log.setup(Config(enable_logging=False))
    for _ in range(40):
        pace.traced()
    assert len(caplog.records) == 3
    log.teardown()


def test_nothing_to_do_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = train(GPT2, Loop(steps=2), Config(memory_budget="4GiB"), sample=True)
    assert run.plan.fits and not run.plan.active
    assert "nothing to do" in caplog.text and "use_cache " not in caplog.text
    assert run.model.config.use_cache is True


def test_conservative_mode_has_no_field_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(
        memory_budget=BUDGET, mode=memscale.OptimizationMode.CONSERVATIVE, enable_offloading=False
    )
    train(GPT2, Loop(steps=1), config, sample=True)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_offloading": False, "async_offload": True}, "async_offload (offload is off)"),
        ({"mode": "conservative", "async_config": AsyncOffloadConfig()}, "async_config (offload is off)"),
        ({"auto_policy": True}, "auto_policy (the policy is not in this version)"),
        ({"async_offload": True}, ""),
    ],
)
def test_what_has_no_effect_is_said(
    given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    memscale.wrap(model, Config(memory_budget="1GiB", **given), torch.ones(2, 4))
    memscale.detach(model)
    lines = [line for line in caplog.text.splitlines() if "no effect" in line]
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_silent_when_logging_is_off(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(GPT2, Loop(steps=2), Config(memory_budget="16MiB", force_optimize=True, enable_logging=False))
    assert run.plan.fits
    assert not [record for record in caplog.records if record.name.startswith("memscale")]
    assert "memscale" not in capfd.readouterr().err.lower()


def test_a_fallback_to_a_real_step_does_not_flood_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(case("mixtral"), Loop(steps=1), Config(memory_budget="64MiB", enable_logging=False))
    assert run.plan.fits
    assert "Traceback" not in capfd.readouterr().err


def test_the_log_file_gets_the_block(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    try:
        train(GPT2, Loop(steps=2), Config(memory_budget=BUDGET, log_file=str(path)), sample=True)
    finally:
        log.teardown()
    assert blocks(path.read_text()) == 1 and "undo" in path.read_text()


def test_a_change_of_plan_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from test_replanning import Trainer, rows

    trainer = Trainer(config=Config(memory_budget="2MiB"))
    trainer.step(rows(64))
    caplog.clear()
    trainer.step(rows(1024))
    lines = [record.getMessage() for record in caplog.records if "re-planned" in record.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0]
