# SPDX-License-Identifier: Apache-2.0
"""`apply_all_optimizations`: the model wrapped, an optimizer with 8-bit state where that is possible."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, OptimizationMode
from memscale.errors import BudgetError, ConfigError
from memscale.optim.eight_bit import is_8bit
from optim_samples import OUR_ADAMW
from zoo.models import case
from zoo.training import Run, assert_same, built, call

GPT2 = case("gpt2")
ROOMY = Config(OptimizationMode.AGGRESSIVE, memory_budget="4GiB")
PACKAGE = ROOMY.replace(eight_bit_backend="bitsandbytes")
EIGHT_BIT = "8-bit optimizer state"

pytestmark = pytest.mark.usefixtures("bf16_host")


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "torchao"):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **more)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines about 8-bit state."""
    return [record.getMessage() for record in caplog.records if EIGHT_BIT in record.getMessage()]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, autocast: bool = False) -> Run:
    run = Run(model=model)
    torch.manual_seed(7)  # dropout
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = GPT2.loss(call(model, GPT2.batch(step)))
        loss.backward()
        run.values[step, "loss", ""] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            run.values[step, "gradient", name] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return run


@OUR_ADAMW
class TestOwnState:
    """Parameters on the CPU: the optimizer itself, with our state."""

    @pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
    def test_the_same_optimizer_and_one_line(self, sample: bool, caplog: pytest.LogCaptureFixture) -> None:
        model, plain = built(GPT2), built(GPT2)
        given = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(given, 2, gamma=0.5)
        with caplog.at_level(logging.INFO, "memscale"):
            wrapped, optimizer = memscale.apply_all_optimizations(
                model, given, ROOMY, GPT2.batch(0) if sample else None
            )
            assert wrapped is model and optimizer is given and is_8bit(given)
            assert isinstance(given, torch.optim.AdamW)
            run = loop(model, optimizer, 4)
            planned = memscale.executor_of(model).plan
            loop(model, optimizer, 2)
        assert said(caplog) == ["8-bit optimizer state: memscale's, AdamW goes on with it"]
        standard = loop(plain, adamw(plain), 4, autocast=True)
        assert run.values[0, "loss", ""] == standard.values[0, "loss", ""]
        assert float(run.values[3, "loss", ""]) == pytest.approx(
            float(standard.values[3, "loss", ""]), rel=0.02
        )
        assert memscale.executor_of(model).plan is planned  # for the optimizer that it was made for
        taken = sum(entry["memscale_state"].nbytes for entry in given.state.values())
        assert planned.predicted.by_category["optimizer_state"] == taken
        assert taken < 0.51 * planned.predicted.by_category["parameter"]
        scheduler.step()

    def test_detach_gives_it_back(self) -> None:
        model = built(GPT2)
        given = adamw(model)
        before = dict(vars(given))
        memscale.apply_all_optimizations(model, given, ROOMY, GPT2.batch(0))
        loop(model, given, 2)
        memscale.detach(model)
        assert type(given) is torch.optim.AdamW and not is_8bit(given)
        assert vars(given).keys() == before.keys()
        state = given.state[next(model.parameters())]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 2
        loop(model, given, 1)

    def test_what_cannot_have_it(self, no_packages: None, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        given = adamw(model, amsgrad=True)
        with caplog.at_level(logging.INFO, "memscale"):
            _, optimizer = memscale.apply_all_optimizations(model, given, ROOMY, GPT2.batch(0))
            loop(model, optimizer, 1)
        assert optimizer is given and type(given) is torch.optim.AdamW
        assert said(caplog)[0].startswith(
            "8-bit optimizer state: not used, AdamW stays as it is (memscale: amsgrad is on; "
        )

    def test_a_missing_backend_that_was_asked_for(
        self, no_packages: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = built(GPT2)
        given = adamw(model)
        with caplog.at_level(logging.INFO, "memscale"):
            _, optimizer = memscale.apply_all_optimizations(
                model, given, ROOMY.replace(eight_bit_backend="torchao"), GPT2.batch(0)
            )
        assert optimizer is given and type(given) is torch.optim.AdamW
        assert said(caplog) == [
            "8-bit optimizer state: not used, AdamW stays as it is (torchao: not installed)"
        ]

    def test_one_that_has_stepped_goes_on(self) -> None:
        model, plain = built(GPT2), built(GPT2)
        given, standard = adamw(model), adamw(plain)
        loop(model, given, 2)
        loop(plain, standard, 2)
        config = ROOMY.replace(use_mixed_precision=False)
        memscale.apply_all_optimizations(model, given, config, GPT2.batch(0))
        assert all(entry["memscale_step"] == 2 for entry in given.state.values())
        run, reference = loop(model, given, 3), loop(plain, standard, 3)
        assert run.values[0, "loss", ""] == reference.values[0, "loss", ""]
        assert float(run.values[2, "loss", ""]) == pytest.approx(
            float(reference.values[2, "loss", ""]), rel=0.02
        )

    def test_the_defaults_are_those_of_aggressive(self) -> None:
        model = built(GPT2)
        memscale.apply_all_optimizations(model, adamw(model))
        assert memscale.executor_of(model).config == Config(OptimizationMode.AGGRESSIVE)

    def test_a_config_without_a_mode_starts_from_aggressive(self) -> None:
        model = built(GPT2)
        given = Config(memory_budget="4GiB", use_mixed_precision=False, enable_logging=False)
        memscale.apply_all_optimizations(model, adamw(model), given)
        used = memscale.executor_of(model).config
        assert used == given.replace(mode=OptimizationMode.AGGRESSIVE)
        assert used.use_8bit_optimizer and used.enable_tiling and used.async_offload
        assert not used.effective().exact and not used.use_mixed_precision

    def test_the_environment_overrides_the_modes_offload(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "0")
        model = built(GPT2)
        memscale.apply_all_optimizations(
            model, adamw(model), Config(memory_budget="4GiB", enable_logging=False)
        )
        assert not memscale.executor_of(model).config.async_offload


class TestArguments:
    def test_a_config_without_8_bits_keeps_the_optimizer(self, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        given = adamw(model)
        config = Config(OptimizationMode.CONSERVATIVE, memory_budget="4GiB")
        with caplog.at_level(logging.INFO, "memscale"):
            _, optimizer = memscale.apply_all_optimizations(model, given, config, GPT2.batch(0))
        assert optimizer is given and said(caplog) == []
        assert not memscale.executor_of(model).plan.steps

    @pytest.mark.parametrize("optimizer", [None, "adamw", [nn.Parameter(torch.ones(1))]])
    def test_what_is_no_optimizer(self, optimizer: Any) -> None:
        model = built(GPT2)
        with pytest.raises(TypeError, match=r"allowed: a torch\.optim\.Optimizer"):
            memscale.apply_all_optimizations(model, optimizer)
        assert memscale.executor_of(model) is None

    def test_what_is_no_model(self) -> None:
        with pytest.raises(TypeError, match=r"nn\.Module"):
            memscale.apply_all_optimizations("model", adamw(built(GPT2)))  # type: ignore[type-var]

    def test_contradictions(self) -> None:
        with pytest.raises(ConfigError):
            ROOMY.replace(exact=True, use_8bit_optimizer=True)

    def test_a_strict_budget_leaves_both_as_they_were(self) -> None:
        model = built(GPT2)
        given = adamw(model)
        loop(model, given, 1)
        groups, state = [dict(group) for group in given.param_groups], dict(given.state)
        values = [entry["exp_avg"].clone() for entry in state.values()]
        with pytest.raises(BudgetError):
            memscale.apply_all_optimizations(
                model, given, ROOMY.replace(memory_budget=1, strict_budget=True), GPT2.batch(0)
            )
        assert memscale.executor_of(model) is None and "forward" not in model.__dict__
        assert [dict(group) for group in given.param_groups] == groups and type(given) is torch.optim.AdamW
        assert all(given.state[key] is entry for key, entry in state.items())
        assert all(torch.equal(a, entry["exp_avg"]) for a, entry in zip(values, state.values(), strict=True))


class TestWhereTheOptimizerIsTheLoops:
    CONFIG = Config(memory_budget="4GiB", use_8bit_optimizer=True)

    def test_wrap_without_one_names_the_way_to_8_bits(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "memscale"):
            memscale.wrap(built(GPT2), self.CONFIG, GPT2.batch(0))
        (line,) = said(caplog)
        assert "memscale.apply_all_optimizations" in line

    def test_another_backend_cannot_be_put_in_place(self, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        given = adamw(model)
        with caplog.at_level(logging.INFO, "memscale"):
            config = self.CONFIG.replace(eight_bit_backend="torchao")
            memscale.wrap(model, config, GPT2.batch(0), optimizer=given)
        (line,) = said(caplog)
        assert "memscale.apply_all_optimizations" in line and not is_8bit(given)

    @OUR_ADAMW
    def test_optimize_has_it_for_its_time(self, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        given = adamw(model)
        with (
            caplog.at_level(logging.INFO, "memscale"),
            memscale.optimize(model, given, self.CONFIG, GPT2.batch(0)) as executor,
        ):
            assert is_8bit(given) and executor.plan is not None
            loop(model, given, 2)
        assert len(said(caplog)) == 1
        assert type(given) is torch.optim.AdamW and "exp_avg" in given.state[next(model.parameters())]

    @OUR_ADAMW
    def test_wrap_has_it_until_detach(self) -> None:
        model = built(GPT2)
        given, other = adamw(model), adamw(model)
        memscale.wrap(model, self.CONFIG, optimizer=given)
        assert is_8bit(given)
        memscale.wrap(model, self.CONFIG, optimizer=given)
        assert is_8bit(given)
        memscale.wrap(model, self.CONFIG, optimizer=other)
        assert is_8bit(other) and not is_8bit(given)
        memscale.wrap(model, Config(memory_budget="4GiB"))
        assert not is_8bit(other)
        memscale.wrap(model, self.CONFIG, optimizer=given)
        memscale.detach(model)
        assert type(given) is torch.optim.AdamW and type(other) is torch.optim.AdamW

    def test_silence_where_it_was_not_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        with caplog.at_level(logging.INFO, "memscale"):
            memscale.wrap(model, Config(memory_budget="4GiB"), GPT2.batch(0))
        assert said(caplog) == []


class TestWithBitsAndBytes:
    """With the real package."""

    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("bitsandbytes.optim")

    def test_it_trains_and_is_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        model, plain = built(GPT2), built(GPT2)
        given = adamw(model)
        with caplog.at_level(logging.INFO, "memscale"):
            _, optimizer = memscale.apply_all_optimizations(model, given, PACKAGE, GPT2.batch(0))
            planned = memscale.executor_of(model).plan
            run = loop(model, optimizer, 8)
        assert is_8bit(optimizer) and not given.state
        (line,) = said(caplog)
        assert "bitsandbytes's AdamW8bit in place of AdamW" in line
        assert memscale.executor_of(model).plan is planned  # the optimizer was the one that was planned for
        standard = loop(plain, adamw(plain), 8, autocast=True)
        first, last = (0, "loss", ""), (7, "loss", "")
        assert run.values[first] == standard.values[first]
        assert run.values[last] == pytest.approx(float(standard.values[last]), rel=0.02)
        state = planned.predicted.by_category["optimizer_state"]
        weights = planned.predicted.by_category["parameter"]
        assert state < 1.2 * weights  # small parameters keep theirs in FP32, at twice the weights
        assert (
            memscale.predict(plain, adamw(plain), PACKAGE, GPT2.batch(0)).by_category["optimizer_state"]
            > 2 * weights
        )

    def test_no_second_line_in_optimize(self, caplog: pytest.LogCaptureFixture) -> None:
        model = built(GPT2)
        _, optimizer = memscale.apply_all_optimizations(model, adamw(model), PACKAGE)
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "memscale"),
            memscale.optimize(model, optimizer, PACKAGE, GPT2.batch(0)),
        ):
            pass
        assert said(caplog) == []

    def test_an_optimizer_that_has_stepped_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        model, plain = built(GPT2), built(GPT2)
        given, standard = adamw(model), adamw(plain)
        loop(model, given, 2)
        loop(plain, standard, 2)
        with caplog.at_level(logging.INFO, "memscale"):
            _, optimizer = memscale.apply_all_optimizations(
                model, given, PACKAGE.replace(use_mixed_precision=False), GPT2.batch(0)
            )
        assert optimizer is given and "state would be lost" in said(caplog)[0]
        assert_same(loop(plain, standard, 3), loop(model, optimizer, 3))
