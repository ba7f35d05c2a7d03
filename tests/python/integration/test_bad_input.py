# SPDX-License-Identifier: Apache-2.0
"""Wrong input: an error that says what is wrong and what is allowed, and a model that nothing has touched."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from test_restore import assert_as_before, image

import memscale
from memscale import Config
from memscale.errors import BudgetError, ConfigError, ProfileError
from zoo.blocks import WIDTH, Stack, inputs
from zoo.models import Case, case
from zoo.odd import ODD
from zoo.training import SMALLEST, built, peak_bytes, seed, train

GPT2 = case("gpt2")


def find(name: str) -> Case:
    return next(case for case in ODD if case.name == name)


def stack() -> Stack:
    seed()
    return Stack().train()


@pytest.mark.parametrize(
    "target", [None, 3, "model", [torch.nn.Linear(1, 1)], Stack, torch.zeros(3), object()]
)
@pytest.mark.parametrize("function", [memscale.wrap, memscale.detach])
def test_a_target_that_is_no_model(target: Any, function: Any) -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        function(target)


def test_a_module_that_only_contains_a_model_is_wrapped_itself() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = stack()

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x)

    holder = memscale.wrap(Holder(), SMALLEST, inputs(0))
    assert memscale.executor_of(holder) is not None and memscale.executor_of(holder.model) is None


@pytest.mark.parametrize("config", [{"memory_budget": 1}, "8GiB", 8, Config])
def test_a_config_that_is_none(config: Any) -> None:
    model = stack()
    before = image(model)
    with pytest.raises(TypeError, match="Config"):
        memscale.wrap(model, config)
    assert_as_before(before, image(model))


@pytest.mark.parametrize(
    "fields",
    [
        {"memory_budget": 0},
        {"memory_budget": -1},
        {"memory_budget": "0GiB"},
        {"memory_budget": "-3GiB"},
        {"memory_budget": "much"},
        {"memory_budget": 1.5},
        {"memory_budget": True},
        {"memory_budget": 10**30},
        {"target_gpu_utilization": 0},
        {"target_gpu_utilization": 1.1},
        {"target_gpu_utilization": float("nan")},
        {"warmup_steps": -1},
        {"mode": "fast"},
        {"enable_checkpointing": 1},
        {"exact": True, "enable_tiling": True},
        {"exact": True, "use_8bit_optimizer": True},
    ],
    ids=str,
)
def test_a_field_that_is_not_allowed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        Config(**fields)
    assert isinstance(caught.value, ConfigError)
    assert any(name in str(caught.value) for name in fields)


def test_an_unknown_field() -> None:
    with pytest.raises((TypeError, ValueError), match="memory_budgte"):
        Config(memory_budgte=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="memory_budget"):
        Config.from_json('{"version": 1, "memory_budgte": 1}')


@pytest.mark.parametrize("sample", [3, 2.5, object(), "text"], ids=lambda sample: type(sample).__name__)
def test_a_sample_of_a_wrong_type(sample: Any) -> None:
    model = stack()
    before = image(model)
    with pytest.raises(TypeError, match="sample_input"):
        memscale.wrap(model, SMALLEST, sample)
    assert_as_before(before, image(model))


SAMPLES = [
    (torch.zeros(4, WIDTH + 1),),
    {"unknown": torch.zeros(4, WIDTH)},
    (),
    (torch.zeros(4, WIDTH), 3),
    ("text",),
]


@pytest.mark.parametrize("how", ["wrap", "optimize", "plan", "verify"])
@pytest.mark.parametrize("sample", SAMPLES, ids=["width", "keyword", "empty", "many", "text"])
def test_a_sample_that_the_model_rejects(sample: Any, how: str) -> None:
    model = stack()
    before = image(model)
    with pytest.raises(Exception) as own:
        model(**sample) if isinstance(sample, dict) else model(*sample)
    with pytest.raises(type(own.value)) as caught:
        if how == "optimize":
            with memscale.optimize(model, config=SMALLEST, sample_input=sample):
                pass
        elif how == "verify":
            memscale.verify(model, sample)
        else:
            getattr(memscale, how)(model, config=SMALLEST, sample_input=sample)
    note = "".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert note.count("memscale:") == 1 and "profiling step" in note
    assert str(own.value).splitlines()[0] in str(caught.value)
    assert_as_before(before, image(model))


def test_a_sample_as_a_callable_is_called_and_its_error_is_its_own() -> None:
    assert memscale.executor_of(memscale.wrap(stack(), SMALLEST, lambda: inputs(0))).plan.active
    model = stack()
    before = image(model)

    def fails() -> Any:
        raise LookupError("no data")

    with pytest.raises(LookupError, match="no data"):
        memscale.wrap(model, SMALLEST, fails)
    assert_as_before(before, image(model))


def test_a_sample_is_needed_for_a_plan() -> None:
    with pytest.raises(TypeError, match="plan needs sample_input"):
        memscale.plan(stack())
    with pytest.raises(TypeError, match="verify needs sample_input"):
        memscale.verify(stack(), None)


def test_a_sample_is_not_changed_and_not_kept() -> None:
    import weakref

    batch = GPT2.batch(0)
    before = {key: value.clone() for key, value in batch.items()}
    model = memscale.wrap(built(GPT2), SMALLEST, batch)
    assert all(torch.equal(before[key], value) and value.grad is None for key, value in batch.items())
    alive = [weakref.ref(value) for value in batch.values()]
    del batch, before
    assert not any(ref() is not None for ref in alive)
    memscale.detach(model)


def test_both_ways_of_profiling_switched_off() -> None:
    with pytest.raises(ValueError, match="use_empirical_fallback"):
        Config(use_static_profiling=False, use_empirical_fallback=False)


def test_a_model_that_the_only_way_left_cannot_profile() -> None:
    def model() -> torch.nn.Module:
        return built(find("data-dependent"))

    static, either = Config(use_empirical_fallback=False, enable_logging=False), SMALLEST
    refused = model()
    before = image(refused)
    with pytest.raises(Exception):  # noqa: B017 - what fake tensors say
        memscale.wrap(refused, static, inputs(0))
    assert_as_before(before, image(refused))
    assert memscale.executor_of(memscale.wrap(model(), either, inputs(0))).plan.profile == "empirical"
    memscale.wrap(refused, static)
    refused(*inputs(0)).mean().backward()  # runs as it is, with a warning


class TakesGradients(torch.nn.Module):
    """Of a part of itself, by a function that refuses hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.last(row).tanh().sum()))(x)
        return (x + slopes).sum()


@pytest.mark.parametrize("static", [True, False])
def test_a_forward_that_refuses_hooks_runs_as_it_is(static: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = SMALLEST.replace(use_static_profiling=static)
    torch.manual_seed(0)
    model, batch = TakesGradients(), torch.ones(2, 8)
    plain = model(batch)
    with pytest.raises(ProfileError, match=r"torch\.func"):
        memscale.plan(model, config=config, sample_input=batch)
    memscale.wrap(model, config, sample_input=batch)
    for rows in (2, 3, 4):  # it is not tried again
        loss = model(torch.ones(rows, 8))
        assert rows > 2 or torch.equal(loss, plain)
        loss.backward()
    memscale.detach(model)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "runs unchanged" in warning and "torch.func" in warning


def test_lazy_modules_are_planned_once_they_have_shapes(caplog: pytest.LogCaptureFixture) -> None:
    def lazy() -> torch.nn.Module:
        layers = [torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.Tanh(), torch.nn.Linear(64, 8))] * 2
        return torch.nn.Sequential(*(copy.deepcopy(layer) for layer in layers), torch.nn.LazyBatchNorm1d())

    x = torch.ones(16, 8)
    with pytest.raises(ProfileError, match=r"'0\.0\.weight' gets its shape .* run one forward"):
        memscale.wrap(lazy(), SMALLEST, x)
    model = memscale.wrap(lazy(), SMALLEST)
    model(x).sum().backward()
    assert memscale.executor_of(model).plan is None and "'0.0.weight'" in caplog.text
    model(x).sum().backward()
    assert memscale.executor_of(model).plan is not None
    memscale.detach(model)


def test_a_model_without_parameters_or_gradients() -> None:
    for model in (torch.nn.ReLU(), stack().requires_grad_(False), torch.nn.Sequential()):
        memscale.wrap(model.train(), SMALLEST, inputs(0))
        assert not memscale.executor_of(model).plan.active
        model(*inputs(0))
        memscale.detach(model)


def test_an_environment_variable_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "perhaps")
    model = stack()
    with pytest.raises(ValueError, match="MEMSCALE_ASYNC_OFFLOAD"):
        memscale.wrap(model, SMALLEST)
    assert memscale.executor_of(model) is None


class TestBudgetThatCannotBeMet:
    def test_the_smallest_plan_is_attached_and_trains(self, caplog: pytest.LogCaptureFixture) -> None:
        run = train(GPT2, config=Config(memory_budget="1MiB"), sample=True)
        records = [record for record in caplog.records if record.name == "memscale"]
        warnings = [record.getMessage() for record in records if record.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "1.00 MiB" in warnings[0] and "What would help" in warnings[0]
        plan = run.plan
        assert not plan.fits and not plan.predicted.fits and plan.active and plan.advice
        assert plan.smallest_peak_bytes == plan.predicted.device_used_peak_bytes > plan.budget_bytes
        assert "DOES NOT FIT" in plan.explain()

    def test_the_advised_budget_is_enough(self) -> None:
        small = memscale.plan(built(GPT2), config=SMALLEST, sample_input=GPT2.batch(0))
        needed = int(small.advice[0].split("(")[1].split(" ")[0])
        config = Config(memory_budget=needed, enable_logging=False)
        assert memscale.plan(built(GPT2), config=config, sample_input=GPT2.batch(0)).fits
        assert peak_bytes(lambda: train(GPT2, config=config, record=False)) <= needed

    def test_strict_raises_and_touches_nothing(self) -> None:
        model = built(GPT2)
        before = image(model)
        with pytest.raises(BudgetError) as caught:
            memscale.wrap(
                model, Config(memory_budget=1, strict_budget=True, enable_logging=False), GPT2.batch(0)
            )
        assert caught.value.budget_bytes == 1 < caught.value.smallest_peak_bytes and caught.value.advice
        assert_as_before(before, image(model))
        assert memscale.executor_of(model) is None


def _other() -> torch.optim.Optimizer:
    return torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


_WITH_OPTIMIZER: dict[str, Any] = {
    "wrap": lambda model, optimizer: memscale.wrap(model, sample_input=rows(), optimizer=optimizer),
    "optimize": lambda model, optimizer: memscale.optimize(model, optimizer).__enter__(),
    "apply_all_optimizations": memscale.apply_all_optimizations,
    "plan": lambda model, optimizer: memscale.plan(model, optimizer, sample_input=rows()),
    "predict": lambda model, optimizer: memscale.predict(model, optimizer, sample_input=rows()),
    "verify": lambda model, optimizer: memscale.verify(model, rows(), optimizer),
}


def rows() -> torch.Tensor:
    return torch.zeros(2, WIDTH)


@pytest.mark.parametrize("function", list(_WITH_OPTIMIZER))
@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        ("adamw", TypeError, "optimizer is a str; allowed"),
        (torch.optim.AdamW, TypeError, "optimizer is AdamW; allowed"),
        ((value for value in ()), TypeError, "optimizer is a generator; allowed"),
        (_other(), ValueError, "trains none of this Stack's"),
    ],
    ids=["name", "class", "generator", "other parameters"],
)
def test_an_optimizer_that_is_none_of_this_model(
    function: str, optimizer: Any, error: type[Exception], words: str
) -> None:
    model = stack()
    with pytest.raises(error, match=re.escape(words)):
        _WITH_OPTIMIZER[function](model, optimizer)
    assert memscale.executor_of(model) is None and "forward" not in model.__dict__
