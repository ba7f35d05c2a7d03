# SPDX-License-Identifier: Apache-2.0
"""Training with modules left out: bits are those of plain PyTorch, what is left out runs once."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from memscale import AsyncOffloadConfig, Config
from memscale.errors import RecomputeError
from memscale.plans.plan import Plan
from patched import use_disk_of

STEPS = 3
X = torch.linspace(-1, 1, 8 * 16 * 32).view(8, 16, 32)


@pytest.fixture(autouse=True)
def nothing_has_run() -> None:
    """Forwards are counted by the `id` of the block."""
    tallies.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        tallies.add(id(self), torch.is_grad_enabled() and type(x) is Tensor)  # not those of a trace
        result: Tensor = x + self.down(self.drop(torch.tanh(self.up(x))))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.lm_head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        result: Tensor = self.lm_head(x)
        return result


def recomputed(model: nn.Module) -> list[str]:
    return [choice.module for choice in memscale.executor_of(model).plan.active]


def step(model: nn.Module, number: int) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(number)
    loss = model(X + number).square().mean()
    loss.backward()
    return [loss.detach(), *(value.grad.clone() for value in model.parameters() if value.grad is not None)]


def train(model: nn.Module) -> list[Tensor]:
    return [value for number in range(STEPS) for value in step(model, number)]


def wrapped(model: nn.Module | None = None, **fields: Any) -> Any:
    config = Config(memory_budget=1, **{"enable_logging": False, **fields})
    return memscale.wrap(Model() if model is None else model, config)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)] == []


class TestBits:
    @pytest.mark.parametrize(
        ("fields", "twice"),
        [
            ({}, [0, 1, 2, 3]),
            ({"exclude": "h.1"}, [0, 2, 3]),
            ({"exclude": "h.[02].drop"}, [1, 3]),  # a recompute of a block around it would run it twice
            ({"exclude": "h"}, []),
            ({"exclude": ""}, []),
            ({"only": "h.1"}, [1]),
            ({"only": ("h.*", "lm_head"), "exclude": ("h.0", "*.3")}, [1, 2]),
        ],
    )
    def test_what_is_left_out_runs_once(self, fields: dict[str, Any], twice: list[int]) -> None:
        plain, model = Model(), wrapped(**fields)
        assert_equal(train(model), train(plain))
        times = [tallies.of(id(block)) for block in model.h]
        last = max(twice, default=-1)  # nothing is saved behind the last one's: it may be worth no recompute
        assert [count for i, count in enumerate(times) if i not in twice] == [STEPS] * (4 - len(twice))
        assert all(times[i] == 2 * STEPS for i in twice if i != last) and times[last] >= STEPS

    def test_children_of_a_chain_around_one_that_is_left_out(self) -> None:
        def chain() -> nn.Sequential:
            torch.manual_seed(0)
            layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())]
            return nn.Sequential(*layers)

        model = wrapped(chain(), exclude="4")
        assert_equal(train(model), train(chain()))
        assert recomputed(model) and "4" not in recomputed(model)
        regions = [choice.module for choice in memscale.executor_of(model).plan.active if choice.joined]
        assert regions and "5" not in regions  # none goes across it

    def test_a_recording_of_real_steps_runs_it_once_too(self) -> None:
        class Deciding(Model):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x if float(x.sum()) > 1e6 else x * 1.0)

        model, plain = wrapped(Deciding(), exclude="h.1"), Deciding()
        assert_equal(train(model), train(plain))
        assert memscale.executor_of(model).plan.profile == "empirical" and "h.1" not in recomputed(model)
        assert tallies.of(id(model.h[1])) < tallies.of(id(model.h[0]))


class TestOffload:
    def test_what_it_saves_and_its_parameters_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_disk_of(monkeypatch)
        settings = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
        fields = {"enable_checkpointing": False, "async_config": settings}

        def moved(**more: Any) -> set[str]:
            config = Config(memory_budget=1, enable_logging=False, **fields, **more)
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
            x = torch.randn(1024, 512)
            plan = memscale.plan(model, config=config, sample_input=x)
            return {choice.module for choice in plan.choices if choice.offloads}

        assert moved() >= {"0"} or moved() >= {"0.0"} or "" in moved()
        assert not any(path in ("", "0") or path.startswith("0.") for path in moved(exclude="0"))
        assert all(path == "1" or path.startswith("1.") for path in moved(only="1"))


class TestTiles:
    def test_a_head_that_is_left_out_has_none(self) -> None:
        class Scored(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.body, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 4096)

            def forward(self, x: Tensor, labels: Tensor) -> Tensor:
                logits = self.lm_head(torch.tanh(self.body(x)))
                return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        labels = torch.arange(8 * 16).view(8, 16)

        def places(**fields: Any) -> tuple[str, ...]:
            config = Config(memory_budget=1, enable_tiling=True, **fields)
            plan = memscale.plan(Scored(), config=config, sample_input=(X, labels))
            return tuple(path for item in plan.steps for path in item.modules)

        assert places() == ("lm_head",)
        assert places(exclude="lm_head") == places(only="body") == ()


class TestPlan:
    def test_choices_text_and_json_say_so(self) -> None:
        plan = memscale.plan(Model(), config=Config(memory_budget=1, exclude="h.1.drop"), sample_input=X)
        reasons = {choice.module: choice.reason for choice in plan.choices}
        assert reasons["h.1.drop"] == "excluded by configuration"
        assert reasons["h.1"].startswith("a module inside it is excluded by configuration")
        for text in (plan.explain(), plan.explain(verbose=True), plan.to_json()):
            assert "excluded by configuration" in text
            assert "exclude: h.1.drop: left as is" in text
        assert Plan.from_json(plan.to_json()).explain() == plan.explain()

    def test_the_log_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "memscale"):
            model = wrapped(only="h.*", exclude=("h.0", "h.1"), enable_logging=True)
            step(model, 0)
        assert "exclude: h.0-1: left as is" in caplog.text
        assert "only: h.0-3" in caplog.text

    def test_a_plan_without_patterns_is_the_one_it_was(self) -> None:
        first, second = (
            memscale.plan(Model(), config=Config(memory_budget=1, **fields), sample_input=X)
            for fields in ({}, {"exclude": (), "only": ("",)})
        )
        assert first.digest == second.digest and first.choices == second.choices

    def test_patterns_are_those_of_a_step_that_is_planned_later(self) -> None:
        """Parts may go while a model is wrapped: then a pattern that matches nothing is no error."""
        model = wrapped(exclude="h.3")
        step(model, 0)
        del model.h[3]
        assert_equal(step(model, 1), step_of_three(1))
        assert memscale.executor_of(model).failures == 0


def step_of_three(number: int) -> list[Tensor]:
    model = Model()
    del model.h[3]
    return step(model, number)


class TestKept:
    """After a recompute has failed."""

    def test_it_is_not_recomputed_again(self, caplog: pytest.LogCaptureFixture) -> None:
        model, plain = wrapped(), Model()
        step(model, 0)
        assert "h.1" in recomputed(model)
        noting = threading.Thread(
            target=memscale.executor_of(model).keep_module, args=("h.1", "it read a global")
        )
        noting.start()
        noting.join()
        assert "h.1" in recomputed(model)  # nothing happens in the middle of a backward
        with caplog.at_level(logging.WARNING, "memscale"):
            assert_equal(step(model, 1), step(plain, 1))
        assert "h.1" not in recomputed(model) and "h.0" in recomputed(model)
        assert "'h.1' (it read a global)" in caplog.text and 'Config(exclude=("h.1",))' in caplog.text
        reasons = {choice.module: choice.rule for choice in memscale.executor_of(model).plan.choices}
        assert reasons["h.1"] == "differed" and "kept: h.1" in memscale.executor_of(model).plan.explain()

    def test_also_in_plans_for_other_steps_that_are_known(self) -> None:
        model = wrapped()
        executor = None
        for training in (True, False, True):
            model.train(training)
            step(model, 0)
            executor = memscale.executor_of(model)
        assert executor is not None
        executor.keep_module("h.1", "a difference")
        for training in (True, False):
            model.train(training)
            step(model, 0)
            assert "h.1" not in recomputed(model)

    def test_it_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        model = wrapped()
        step(model, 0)
        with caplog.at_level(logging.WARNING, "memscale"):
            for number in range(3):
                memscale.executor_of(model).keep_module("h.1", f"difference {number}")
                step(model, number)
        assert caplog.text.count("not recomputed for the rest of this run") == 1

    def test_all_children_of_a_run(self) -> None:
        torch.manual_seed(0)
        chain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
        model = wrapped(chain)
        step(model, 0)
        joined = [choice.module for choice in memscale.executor_of(model).plan.active if choice.joined]
        last = int(joined[0])
        memscale.executor_of(model).keep_module(f"{last - 1} to {last}", "a difference")
        step(model, 1)
        assert {str(last - 1), str(last)}.isdisjoint(recomputed(model))

    def test_where_there_is_no_other_plan_the_model_runs_unchanged(self) -> None:
        model, plain = wrapped(), Model()
        step(model, 0)
        memscale.executor_of(model).keep_module("h.1", "a difference")
        model.h[0].forward = lambda x: x if x.device.type == "cuda" else broken(x)  # plans no more
        with pytest.raises(ZeroDivisionError):
            step(model, 1)
        del model.h[0].forward
        assert_equal(step(model, 2), step(plain, 2))
        assert memscale.executor_of(model).plan is None or "h.1" not in recomputed(model)

    def test_another_wrap_starts_anew(self) -> None:
        model = wrapped()
        step(model, 0)
        memscale.executor_of(model).keep_module("h.1", "a difference")
        step(model, 1)
        wrapped(model)
        step(model, 2)
        assert "h.1" in recomputed(model)


def broken(x: Tensor) -> Tensor:
    raise ZeroDivisionError


class TestError:
    def test_it_says_what_to_write(self) -> None:
        error = RecomputeError("module 'h.3' differs", "h.3", "saved tensor 2", "a global was read")
        assert (error.module, error.tensor, error.cause) == ("h.3", "saved tensor 2", "a global was read")
        assert "Likely cause: a global was read" in str(error)
        assert str(error).endswith('Config(exclude=("h.3",))')

    @pytest.mark.parametrize(
        ("module", "end"),
        [
            ("0 to 2", '("0", "1", "2"))'),
            ("net.9 to net.10", '("net.9", "net.10"))'),
            ("net.first to net.last", '("net",))'),
        ],
    )
    def test_a_run_of_a_chain(self, module: str, end: str) -> None:
        assert str(RecomputeError("differs", module)).endswith(f"Config(exclude={end}")

    def test_what_it_says_to_write_can_be_written(self) -> None:
        text = str(RecomputeError("differs", "h.0 to h.1"))
        config = eval(text[text.index("Config(") :], {"Config": Config})
        assert memscale.plan(Model(), config=config, sample_input=X).choices

    def test_json_of_a_config_has_the_patterns(self) -> None:
        assert json.loads(Config(exclude="h.1").to_json())["exclude"] == ["h.1"]
